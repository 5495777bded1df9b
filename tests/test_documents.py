"""Recipes and commands in the documents are valid."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import DOCS, PAGES, ROOT, Block, arguments, blocks, name_of

from largebatch.cli.launch import KINDS
from largebatch.cli.main import parse
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.polish import SWA, SWAP, Affine, Polish, Statistics
from largebatch.recipe.section import Duration

sys.path.append(str(ROOT / "benchmarks"))
import gpu
import measuring
import renew
import sources
import table

POLISHING = DOCS / "final-polishing.md"
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
CLUSTERS = DOCS / "clusters.md"
COMMANDS = [
    pytest.param(call, id=f"{page.stem}: {' '.join(call)[:60]}")
    for page in PAGES
    for block in blocks(page, "console")
    for command in block.commands
    for call in arguments(command)
]
NEEDS = {
    "a cluster",
    "an account at W&B",
    "finished runs",
    "finished runs on ImageNet",
    "hours and a data set",
    "photographs",
    "ImageNet",
    "ImageNet and GPUs",
    "ImageNet and weights",
    "Penn Treebank",
    "root on Linux",
    "the archives of Fashion-MNIST",
    "the network",
}


def yaml_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page, "yaml")]


def polish_blocks() -> list[Block]:
    return [block for block in yaml_blocks() if block.text.startswith("polish:")]


@pytest.mark.parametrize("block", polish_blocks(), ids=lambda block: block.page.stem)
def test_a_section_on_polishing_can_be_copied_into_a_recipe(block: Block, tmp_path: Path) -> None:
    recipe = (ROOT / "recipes" / "quickstart" / "digits_96.yaml").read_text(encoding="utf-8")
    without, count = re.subn(r"^polish:\n(  .*\n)+", "", recipe, flags=re.MULTILINE)
    assert count == 1
    path = tmp_path / "recipe.yaml"
    path.write_text(without + "\n" + block.text, encoding="utf-8")
    assert load_recipe(path).polish is not None


def test_the_documents_show_such_sections() -> None:
    shown = [block.page.stem for block in polish_blocks()]
    assert shown == ["final-polishing"] * 3 + ["writing-a-recipe"]


def test_the_document_on_polishing_names_every_key() -> None:
    longest = max((block.text for block in blocks(POLISHING, "yaml")), key=len)
    sections = (Polish, SWA, SWAP, Affine, Statistics, Duration)
    for key in {key for section in sections for key in section.model_fields}:
        assert re.search(rf"\b{key}:", longest), key


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_is_parsed(words: list[str]) -> None:
    parse(words)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_can_be_pasted_into_a_shell(page: Path) -> None:
    lines = [command for block in blocks(page, "console") for command in block.commands]
    check = subprocess.run(
        ["bash", "-n"], input="\n".join(lines), text=True, check=False, capture_output=True
    )
    assert not check.stderr


def test_most_pages_have_commands_and_every_prompt_is_in_a_console_block() -> None:
    with_commands = [page for page in PAGES if any(b.commands for b in blocks(page, "console"))]
    assert len(with_commands) >= 14
    assert len(COMMANDS) >= 50
    for page in PAGES:
        prompts = re.findall(r"^\s*\$ ", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(prompts) == sum(len(block.commands) for block in blocks(page, "console")), page


def test_the_needs_of_a_block_are_known() -> None:
    marks = [
        mark
        for page in PAGES
        for mark in re.findall(r"^<!-- needs (.*) -->\n```", page.read_text("utf-8"), re.MULTILINE)
    ]
    assert set(marks) == NEEDS
    marked = [b for page in PAGES for b in blocks(page, "console") if b.needs is not None]
    assert len(marked) == len(marks)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_linked_files_exist(page: Path) -> None:
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" not in link:
            place, _, heading = link.partition("#")
            target = page.parent / place if place else page
            assert target.is_file(), link
            if heading and "reference" not in target.parts:  # keys of a recipe: test_site
                assert heading in anchors(target), link


def anchors(page: Path) -> list[str]:
    """Return the names that code hosts and the site give to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    ]


def test_every_page_is_in_the_navigation() -> None:
    trees = re.findall(
        r"^```\{toctree\}\n(.*?)^```", (DOCS / "index.md").read_text(), re.DOTALL | re.MULTILINE
    )
    entries = [line for tree in trees for line in tree.splitlines() if line and line[0] != ":"]
    listed = {path.resolve() for entry in entries for path in DOCS.glob(f"{entry}.md")}
    listed |= {(DOCS / f"{entry}.md").resolve() for entry in entries if entry.startswith("..")}
    assert listed == {*PAGES, ROOT / "benchmarks" / "README.md"} - {DOCS / "index.md"}


def test_the_page_on_where_things_are_names_folders_and_files_that_are_there() -> None:
    text = (DOCS / "where-things-are.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([a-z_]+/(?:[a-z_/]+\.py)?)`", text))
    package = ROOT / "largebatch"
    roots = (ROOT, package, package / "data")
    for name in names:
        assert any((root / name).exists() for root in roots), name
    for folder in (ROOT / "largebatch").iterdir():
        if (folder / "__init__.py").exists():
            assert f"`{folder.name}/`" in text, folder


def test_pictures_are_small() -> None:
    pictures = [*DOCS.rglob("*.png")]
    assert len(pictures) >= 9
    for picture in pictures:
        assert picture.stat().st_size <= 200_000, picture


def test_the_document_on_clusters_has_a_command_for_each_kind_of_job() -> None:
    rows = re.findall(r"^\|[^|]*\| `((?:\\\||[^`|])*)", CLUSTERS.read_text(), flags=re.MULTILINE)
    commands = [re.split(r" >| \\\|", row)[0].split() for row in rows]
    assert {words[0] for words in commands} == {*KINDS, "largebatch"}
    for words in commands[1:]:
        parse(["launch", *(word.replace("N", "4") for word in words)])


def test_the_table_of_benchmarks_is_that_of_the_results() -> None:
    assert (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8") == table.page()


@pytest.fixture
def lars_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the sources that the benchmark of LARS measures, and write a result for them."""
    for file in sources.measured_files("lars"):
        copy = tmp_path / file.relative_to(sources.PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(sources, "PACKAGE", tmp_path)
    for module in (measuring, table, renew):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    ratio = {"median": 1.0, "low": 0.9, "high": 1.1, "n": 3}
    monkeypatch.setattr("largebatch.accelerator.names", list)
    measuring.write("lars", "python benchmarks/lars.py", {"ratios": {"ours / sgd": ratio}})
    return tmp_path


def table_cell() -> str:
    (row,) = (line for line in table.page().splitlines() if "SGD(fused=True)" in line)
    return row.split("|")[3].strip()


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_a_figure_is_stale_once_the_code_it_measures_has_changed(lars_copy: Path) -> None:
    file = lars_copy / "optim" / "lars.py"
    assert table_cell() == "1.000 (0.900 to 1.100, 3)"
    edit(file, "import math", "import math  # a comment\nCHANGED = 1")
    assert table_cell() == "1.000 (0.900 to 1.100, 3), stale"
    assert renew.stale_benchmarks()["lars"] == "python benchmarks/lars.py"


def test_a_figure_is_not_stale_after_a_move_or_a_change_of_words(
    lars_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = lars_copy / "optim" / "lars.py"
    edit(file, "import math", "import math  # a comment")
    edit(file, '"""', '"""Another first line. ')
    edit(file, "from largebatch.recipe.choices import", "from largebatch.moved.choices import")
    file.rename(lars_copy / "optim" / "kernels" / "moved.py")
    monkeypatch.setitem(sources.MEASURED, "lars", ("optim/kernels",))
    assert table_cell() == "1.000 (0.900 to 1.100, 3)"
    assert "lars" not in renew.stale_benchmarks()


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_result_names_the_commit_and_the_source_files_it_measures(path: Path) -> None:
    name, _, _ = path.stem.rsplit("_", 2)
    assert name in sources.MEASURED
    result = json.loads(path.read_text(encoding="utf-8"))
    for part in [result] if "command" in result else result.values():
        assert part["sources"]
        assert part["commit"]


@pytest.mark.parametrize("row", table.ROWS, ids=lambda row: row.what)
def test_every_row_of_the_table_is_measured_by_a_command(row: table.Row) -> None:
    assert row.benchmark in renew.COMMANDS or row.benchmark in {part.name for part in gpu.PARTS}


@pytest.mark.parametrize("name", sources.MEASURED)
def test_measured_files_exist(name: str) -> None:
    assert sources.measured_files(name)

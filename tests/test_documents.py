"""Recipes and commands in the documents are valid."""

import re
import subprocess
from argparse import ArgumentParser
from pathlib import Path

import pytest
from documents import DOCS, PAGES, ROOT, Block, arguments, blocks, name_of

from largebatch.cli.launch import KINDS
from largebatch.cli.main import make_parser
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.polish import SWA, SWAP, Affine, Polish, Statistics
from largebatch.recipe.section import Duration

POLISHING = DOCS / "final-polishing.md"
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


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    return make_parser()


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_is_parsed(words: list[str], parser: ArgumentParser) -> None:
    parser.parse_args(words)


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
        make_parser().parse_args(["launch", *(word.replace("N", "4") for word in words)])

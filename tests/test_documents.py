"""Links, commands and recipes in the documents are valid."""

import re
import subprocess
from pathlib import Path
from pkgutil import resolve_name

import pytest
from documents import DOCS, PAGES, ROOT, Block, arguments, blocks, commands, name_of, options_of

from largebatch.cli.launch import KINDS
from largebatch.cli.main import make_app, parse
from largebatch.recipe.explain import meanings
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.polish import SWA, Affine, Polish, Statistics
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Duration

COMMANDS = [
    pytest.param(call, id=f"{page.stem}: {' '.join(call)[:60]}")
    for page in PAGES
    for command in commands(page, here=False)
    for call in arguments(command)
]
NEEDS = {
    "a bucket",
    "a cluster",
    "finished runs",
    "finished runs on ImageNet",
    "photographs",
    "ImageNet",
    "ImageNet and GPUs",
    "ImageNet and weights",
    "the archives of Fashion-MNIST",
    "root and the data of the papers",
    "the network",
}
PACKAGE = ROOT / "largebatch"
PRESENT = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""Pages on what there is now."""


def polish_blocks() -> list[Block]:
    found = [block for page in PAGES for block in blocks(page, "yaml")]
    return [block for block in found if block.text.startswith("polish:")]


@pytest.mark.parametrize("block", polish_blocks(), ids=lambda block: block.page.stem)
def test_a_section_on_polishing_can_be_copied_into_a_recipe(block: Block, tmp_path: Path) -> None:
    recipe = (ROOT / "recipes" / "quickstart" / "digits_96.yaml").read_text(encoding="utf-8")
    without, count = re.subn(r"^polish:\n(  .*\n)+", "", recipe, flags=re.MULTILINE)
    assert count == 1
    path = tmp_path / "recipe.yaml"
    path.write_text(without + "\n" + block.text, encoding="utf-8")
    assert load_recipe(path).polish is not None


def test_the_page_on_polishing_has_every_key() -> None:
    longest = max((block.text for block in polish_blocks()), key=len)
    sections = (Polish, SWA, Affine, Statistics, Duration)
    for key in {key for section in sections for key in section.model_fields}:
        assert re.search(rf"\b{key}:", longest), key


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_is_parsed(words: list[str]) -> None:
    parse(words)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_can_be_pasted_into_a_shell(page: Path) -> None:
    text = "\n".join(commands(page, here=False))
    check = subprocess.run(["bash", "-n"], input=text, text=True, check=False, capture_output=True)
    assert not check.stderr


def test_commands_can_be_copied_and_their_needs_are_known() -> None:
    assert len(COMMANDS) >= 50
    marks = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"^\s*\$ |^```console", text, re.MULTILINE), page
        marks += re.findall(r"^<!-- needs (.*) -->\n```", text, re.MULTILINE)
    assert set(marks) == NEEDS


def without_blocks(page: Path, language: str = "") -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(rf"^```{language}.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def without_generated(page: Path) -> str:
    """Return a page without blocks of Python and without the docstrings of the package."""
    docstrings = r"<!-- python \S.*?<!-- end -->"
    return re.sub(docstrings, "", without_blocks(page, "python"), flags=re.DOTALL)


@pytest.mark.parametrize("page", PRESENT, ids=name_of)
def test_keys_of_a_recipe_exist(page: Path) -> None:
    keys = rf"(?<![\w./-])(?:{'|'.join(Recipe.model_fields)})(?:\.[a-z]\w*)+(?![\w(])"
    for key in re.findall(keys, without_generated(page)):
        if not key.endswith((".md", ".onnx")):  # files
            meanings(re.sub(r"\.arguments\..*", ".arguments", key))


def test_commands_in_sentences_exist_and_have_the_options() -> None:
    known = {name.strip(): options for name, options in options_of(make_app())}
    groups = "|".join({name.split()[0] for name in known})
    wrong = rf"(?:{groups}) \w|(?!horovodrun|sha256sum|srun|sbatch|tensorboard|torchrun)\w+ --\w"
    text = " ".join("".join(map(without_blocks, PRESENT)).split())
    for start, code in re.findall(r"`(largebatch )?([a-z][^`]*)`", text):
        names = [name for name in known if f"{code} ".startswith(f"{name} ")]
        assert names or not (start or re.match(wrong, code)), code
        own = code.split(".py ")[0]  # what follows a script is its
        given = re.findall(r"(?<!\S)--[a-z-]+", own) if names else []
        assert {*given} <= {*known.get(max(names, key=len, default=""), ()), "--help"}, code
        if code.startswith("data import ") and given:
            parse(code.split())  # values of options, too


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_linked_files_and_headings_exist(page: Path) -> None:
    text = without_blocks(page)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" not in link:
            place, _, heading = link.partition("#")
            target = page.parent / place if place else page
            assert target.is_file(), link
            if heading:
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


def test_every_object_of_the_python_reference_exists() -> None:
    text = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    names = " ".join(re.findall(r"^<!-- python (.*) -->$", text, re.MULTILINE)).split()
    assert len(names) > 20
    for name in (name.removeprefix("-") for name in names):
        if not name.startswith("largebatch.integrations"):  # they need their libraries
            resolve_name(name)


def test_every_picture_is_shown() -> None:
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for picture in DOCS.rglob("*.png"):
        assert f"{picture.name})" in texts, picture


def test_where_things_are_names_files_that_exist_and_every_folder() -> None:
    text = (DOCS / "where-things-are.md").read_text(encoding="utf-8")
    for name in re.findall(r"`([a-z_]+/(?:[a-z_/]+(?:\.py)?)?)`", text):
        roots = (ROOT, PACKAGE, PACKAGE / "data", ROOT / "tests")
        assert any((root / name).exists() for root in roots), name
    for folder in PACKAGE.iterdir():
        if (folder / "__init__.py").exists():
            assert f"`{folder.name}/`" in text, folder


def test_the_page_on_clusters_has_a_command_for_each_kind_of_job() -> None:
    text = (DOCS / "clusters.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]*\| `((?:\\\||[^`|])*)", text, flags=re.MULTILINE)
    calls = [re.split(r" >| \\\|", row)[0].split() for row in rows if " RECIPE " in row]
    assert {words[0] for words in calls} == KINDS.keys()
    for words in calls:
        parse(["launch", *(word.replace("N", "4") for word in words)])

"""What the documents tell people to copy works: recipes load, commands are understood."""

import re
import shlex
from pathlib import Path

import pytest

from largebatch.cli.launch import KINDS
from largebatch.cli.main import _parser
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.sections import SWA, SWAP, Affine, Duration, Polish, Statistics

ROOT = Path(__file__).parents[1]
POLISHING = ROOT / "docs" / "final-polishing.md"
CLUSTERS = ROOT / "docs" / "clusters.md"
DOCUMENTS = [
    *(ROOT / "README.md", POLISHING),
    *(
        ROOT / "docs" / name
        for name in ("which-batch.md", "planner.md", "mlperf.md", "lr-bench.md")
    ),
]
PARTS = ROOT / "docs" / "parts.md"  # its code runs in test_parts.py


def blocks(path: Path, language: str) -> list[str]:
    """Return what stands in fences of this language."""
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def polish_blocks() -> list[tuple[str, str]]:
    found = [(path.stem, text) for path in DOCUMENTS for text in blocks(path, "yaml")]
    return [(name, text) for name, text in found if text.startswith("polish:")]


@pytest.mark.parametrize(("name", "text"), polish_blocks())
def test_a_section_on_polishing_can_be_copied_into_a_recipe(
    name: str, text: str, tmp_path: Path
) -> None:
    recipe = (ROOT / "recipes" / "quickstart" / "digits_96.yaml").read_text(encoding="utf-8")
    without, count = re.subn(r"^polish:\n(  .*\n)+", "", recipe, flags=re.MULTILINE)
    assert count == 1
    path = tmp_path / f"{name}.yaml"
    path.write_text(without + "\n" + text, encoding="utf-8")
    assert load_recipe(path).polish is not None


def test_both_documents_show_such_sections() -> None:
    assert [name for name, _ in polish_blocks()] == ["README"] + ["final-polishing"] * 3


def test_the_document_on_polishing_names_every_key() -> None:
    longest = max(blocks(POLISHING, "yaml"), key=len)
    sections = (Polish, SWA, SWAP, Affine, Statistics, Duration)
    for key in {key for section in sections for key in section.model_fields}:
        assert re.search(rf"\b{key}:", longest), key


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_command_is_one_that_the_program_understands(path: Path) -> None:
    text = "".join(blocks(path, "console")).replace("\\\n", " ")
    commands = re.findall(r"^\$ (?:\S*/)?(?:horovodrun .*? )?largebatch (.*)$", text, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        _parser().parse_args(shlex.split(command, comments=True))


@pytest.mark.parametrize("path", [*DOCUMENTS, PARTS, CLUSTERS], ids=lambda path: path.stem)
def test_files_that_are_linked_are_there(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
    here = [link for link in links if "://" not in link]
    assert here
    for link in here:
        assert (path.parent / link).exists(), link


def test_the_document_on_clusters_has_a_command_for_each_kind_of_job() -> None:
    rows = re.findall(r"^\|[^|]*\| `((?:\\\||[^`|])*)", CLUSTERS.read_text(), flags=re.MULTILINE)
    commands = [re.split(r" >| \\\|", row)[0].split() for row in rows]
    assert {words[0] for words in commands} == {*KINDS, "largebatch"}
    for words in commands[1:]:
        _parser().parse_args(["launch", *(word.replace("N", "4") for word in words)])

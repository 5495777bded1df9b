"""The reference has every key, every command and the Python that others use, as they are now."""

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from documents import DOCS, options_of

from largebatch.cli.main import make_app
from largebatch.lab.studies.study import Study
from largebatch.recipe.explain import meanings, sections_below
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Section

REFERENCE = DOCS / "reference"

PUBLIC = {
    "largebatch.load_recipe",
    "largebatch.run",
    "largebatch.audit.audit",
    "largebatch.integrations.lightning.Polish",
    "largebatch.optim.muon.Muon",
    "largebatch.tracking.events.Summary",
    "largebatch.polish.polish",
    "largebatch.training.evaluate",
    "largebatch.lab.studies.metrics.cost",
    "largebatch.optim.LARS",
    "largebatch.schedules.functions.polynomial",
    "largebatch.models.build",
    "largebatch.models.param_groups",
    "largebatch.models.with_span",
    "largebatch.distributed.connect",
    "largebatch.distributed.Serial",
    "largebatch.errors.RecipeError",
}


STALE = """
from generate import REFERENCE, renewed
print([page.name for page in REFERENCE.glob("*.md") if renewed(page) != page.read_text("utf-8")])
"""


def test_every_page_is_that_of_the_package_now() -> None:
    """In a process of its own: other tests change what help texts show."""
    pytest.importorskip("griffe", reason="griffe is not installed: pip install 'largebatch[docs]'")
    assert len(list(REFERENCE.glob("*.md"))) == 7
    program = [sys.executable, "-c", STALE]
    result = subprocess.run(program, cwd=DOCS, check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", "run: python docs/generate.py"


def keys(key: str, seen: list[str], root: type[Section]) -> Iterator[str]:
    """Yield the keys below a key, but those of a section that was there before."""
    for section in sections_below(key, root):
        if section.__name__ not in seen:
            seen.append(section.__name__)
            for name in section.model_fields:
                dotted = f"{key}.{name}".lstrip(".")
                yield dotted
                yield from keys(dotted, seen, root)


@pytest.mark.parametrize(("pattern", "root"), [("recipe*.md", Recipe), ("studies.md", Study)])
def test_every_key_of_a_file_has_its_values_on_one_page(pattern: str, root: type[Section]) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob(pattern))
    headings = re.findall(r"^##+ (\S+)$", text, re.MULTILINE)
    plain = text.replace("\\", "")
    found = list(keys("", [], root))
    assert len(found) > (100 if root is Recipe else 10)
    for key in found:
        if not key.endswith(".kind"):
            assert headings.count(key) == 1, key
            for meaning in meanings(key, root):
                assert meaning.values in plain, key


def test_every_command_is_on_one_page_with_its_options() -> None:
    text = (REFERENCE / "commands.md").read_text(encoding="utf-8")
    found = list(options_of(make_app(), "largebatch"))
    assert len(found) > 20
    for command, options in found:
        assert f" {command}\n" in text
        assert all(option in text for option in options), command


def test_the_public_python_api_is_on_one_page() -> None:
    text = (REFERENCE / "python.md").read_text(encoding="utf-8")
    for name in PUBLIC:
        assert f"### {name}\n" in text, name

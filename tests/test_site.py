"""The site that `make docs` makes has every key, every command and the Python that others use."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import PAGES, ROOT, options_of
from playwright.sync_api import sync_playwright

from largebatch.cli.main import make_app
from largebatch.lab.studies.study import Study
from largebatch.recipe.explain import meanings, sections_below
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Section

FILES: list[tuple[str, str, type[Section]]] = [
    ("recipe*", "", Recipe),
    ("studies", "study.", Study),
]
"""Its pages, what stands before keys in links to it, and the section that such a file is."""

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it as `make docs` does: a warning is an error."""
    pytest.importorskip("sphinx", reason="sphinx is not installed: pip install 'largebatch[docs]'")
    out = tmp_path_factory.mktemp("site")
    (line,) = re.findall(r"-m (sphinx .*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    words = line.replace("build/docs", str(out)).split()
    done = subprocess.run(
        [sys.executable, "-m", *words, "-d", str(out / ".doctrees")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return out


def keys(key: str, seen: list[str], root: type[Section]) -> Iterator[str]:
    """Yield the keys below a key, but those of a section that stood there before."""
    for section in sections_below(key, root):
        if section.__name__ not in seen:
            seen.append(section.__name__)
            for name in section.model_fields:
                dotted = f"{key}.{name}".lstrip(".")
                yield dotted
                yield from keys(dotted, seen, root)


@pytest.mark.long
def test_every_page_exists(site: Path) -> None:
    for page in PAGES:
        assert (site / page.relative_to(ROOT)).with_suffix(".html").exists(), page
    assert "docs/index.html" in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.long
def test_pages_fit_a_phone_and_show_whole_lines_on_a_laptop(site: Path) -> None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    cut = (
        "[...document.querySelectorAll('.highlight-sh pre, .highlight-text pre')]"
        ".filter(block => block.scrollWidth > block.clientWidth).map(block => block.innerText)"
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page()
        for source in PAGES:
            page.goto((site / source.relative_to(ROOT)).with_suffix(".html").as_uri())
            page.set_viewport_size({"width": 390, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, source
            page.set_viewport_size({"width": 1300, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") <= 1300, source
            assert not page.evaluate(cut), source


@pytest.mark.long
@pytest.mark.parametrize(("name", "before", "root"), FILES)
def test_every_key_of_a_file_has_its_values_on_one_page(
    site: Path, name: str, before: str, root: type[Section]
) -> None:
    pages = (site / "docs/reference").glob(f"{name}.html")
    page = "".join(path.read_text(encoding="utf-8") for path in pages)
    text = re.sub(r"<[^>]+>", "", page)
    found = list(keys("", [], root))
    assert len(found) > (100 if root is Recipe else 10)
    for key in found:
        if key.endswith(".kind"):
            continue
        assert page.count(f'id="{before}{key}"') == 1, key
        for meaning in meanings(key, root):
            values = meaning.values.replace("<", "&lt;").replace(">", "&gt;")
            assert values.replace('"', "&quot;") in text or values in text, (key, values)


@pytest.mark.long
def test_every_command_is_on_one_page_with_its_options(site: Path) -> None:
    page = (site / "docs/reference/commands.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", "", page)
    found = list(options_of(make_app(), "largebatch"))
    assert len(found) > 20
    for command, options in found:
        assert command in text
        assert all(option in text for option in options), command


@pytest.mark.long
def test_the_public_python_api_is_on_one_page(site: Path) -> None:
    page = (site / "docs/reference/python.html").read_text(encoding="utf-8")
    for name in PUBLIC:
        assert f'id="{name}"' in page, name
    text = re.sub(r"<[^>]+>", "", page)
    for internal in ("Annotated[", "Pydantic", "PlainSerializer", "&lt;lambda&gt;"):
        assert internal not in text

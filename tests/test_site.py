"""The site that `make docs` makes has every page, and a phone and a laptop show whole lines."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import PAGES, ROOT
from playwright.sync_api import sync_playwright


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

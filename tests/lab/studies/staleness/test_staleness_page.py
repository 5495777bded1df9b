"""The page of a staleness study in a real browser without a network."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import opened, point_at, rows_of, shown_axis, started_browser, titles_of
from playwright.sync_api import Browser, Page
from short_staleness import STUDY, write_study

from largebatch.errors import LargebatchError, StudyError
from largebatch.lab.studies.staleness.page import describe, make_page
from largebatch.lab.studies.staleness.run import Row
from largebatch.lab.studies.staleness.study import Cell, cells_of, load_study

HOSTILE = "<img src=x onerror=alert(1)>"
FREE = "asynchronous, modulation staleness"
GRID = {
    "recipes": ["plain"],
    "times": ["usual", "slow"],
    "sigma": [0, "lambda"],
    "mu": [8, 16],
    "learners": [2, 4],
}
SPREAD = (-0.01, 0.0, 0.02)
"""Standard deviation of top-1 over the seeds."""


def record(cell: Cell, spread: float) -> dict[str, Any]:
    """Return what a run could have left: error follows mu x lambda, waiting takes longer."""
    late = [1, 2, 6, 2, 1] if cell.sigma else [12]
    slow = {"usual": 1.0, "slow": 5.0}[cell.times] if not cell.sigma else 1.0
    diverged = cell.sigma and cell.times == "slow" and cell.mu * cell.learners == 64
    return {
        "seed": SPREAD.index(spread) + 1,
        "top1": 0.9 - cell.mu * cell.learners / 400 - 0.04 * bool(cell.sigma) + spread,
        "diverged": "the loss is no number" if diverged else None,
        "tau": late,
        "tau_mean": float(np.average(range(len(late)), weights=late)),
        "updates": 12,
        "simulated_seconds": slow * (1 + cell.mu) / cell.learners,
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("study")
    cells = cells_of(load_study(str(write_study(folder, grids=[GRID]))), folder)
    return [Row(cell, tuple(record(cell, spread) for spread in SPREAD)) for cell in cells]


@pytest.fixture(scope="module")
def path(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_page(rows, title=HOSTILE).write(tmp_path_factory.mktemp("page") / "study.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(browser: Browser, path: Path) -> Iterator[Page]:
    with opened(browser, path) as page:
        yield page


def cells(page: Page) -> list[tuple[str, ...]]:
    """Return protocol, mu and lambda of the rows in sight."""
    titles = titles_of(page, "cells")
    places = [titles.index(name) for name in ("Protocol", "Times", "mu", "lambda")]
    return [tuple(row[place] for place in places) for row in rows_of(page, "cells")]


def test_the_sentences_name_the_best_the_quickest_and_what_diverged(rows: list[Row]) -> None:
    slow = [row for row in rows if row.cell.times == "slow"]
    best, quickest, diverged = describe("plain, slow", slow)
    reach = 4.302652729911275 * np.std(SPREAD, ddof=1) / np.sqrt(3)
    assert best == (
        "plain, slow: the highest top-1 is "
        f"{0.9 - 16 / 400 + np.mean(SPREAD):.2%} ± {100 * reach:.2f}, of hardsync (mu 8, lambda 2)"
        ", in 22.5 s of the simulated cluster."
    )
    assert quickest.startswith(
        f"The quickest, {FREE} (mu 8, lambda 4), takes 0.20 times as long as hardsync. Its top-1 "
    )
    assert quickest.endswith("; minus hardsync's, -4.00 points (-4.00 to -4.00).")
    assert diverged == f"Runs diverged, which counts as chance, of {FREE} (mu 16, lambda 4)."
    assert "hardsync" not in " ".join(describe("alone", [slow[-1]]))


def test_the_table_has_a_row_for_every_cell_and_sorts(page: Page) -> None:
    assert len(cells(page)) == 8
    titles = titles_of(page, "cells")
    rows = [dict(zip(titles, row, strict=False)) for row in rows_of(page, "cells")]
    free = next(row for row in rows if row["sigma"] == "4" and row["mu x lambda"] == "64")
    assert (free["Protocol"], free["Modulation"]) == ("asynchronous", "staleness")
    assert (free["sigma"], free["Mean tau"], free["Highest tau"]) == ("4", "2.00", "4")
    assert (free["tau > 2 sigma, %"], free["Seconds"], free["Seeds"]) == ("0.0000", "4.25", "3")
    assert free["Top-1, %"] == f"{100 * (0.9 - 64 / 400 - 0.04 + np.mean(SPREAD)):.2f}"
    page.locator("#cells thead button", has_text="Seconds").click()
    seconds = [row[titles.index("Seconds")] for row in rows_of(page, "cells")]
    assert seconds == sorted(seconds, key=float, reverse=True)
    assert page.locator("img").count() == 0  # that of the hostile name


def test_filters_and_the_legend_hide_cells(page: Page) -> None:
    assert {times for _, times, *_ in cells(page)} == {"usual"}
    page.get_by_label("plain, slow", exact=True).check(force=True)
    assert {times for _, times, *_ in cells(page)} == {"slow"}
    page.get_by_label("32", exact=True).uncheck(force=True)
    assert {(mu, learners) for _, _, mu, learners in cells(page)} == {("8", "2"), ("16", "4")}
    page.locator(".legend").get_by_role("button", name="hardsync").click()
    assert set(cells(page)) == {
        ("asynchronous", "slow", "8", "2"), ("asynchronous", "slow", "16", "4"),
    }  # fmt: skip
    page.locator(".legend").get_by_role("button", name="hardsync").click()
    page.get_by_label("32", exact=True).check(force=True)
    page.get_by_label("plain, usual", exact=True).check(force=True)


def test_the_trade_off_is_drawn_against_time_or_what_is_chosen(page: Page) -> None:
    axis = shown_axis(page, "trade_off")
    assert axis.title == "Simulated seconds of a run"
    assert 9 / 4 / 2 < axis.start < 9 / 4
    (tip, *_) = point_at(page, "trade_off", "hardsync", 0)
    assert tip.startswith("hardsync cell mu 8, lambda 2 top-1 86.33% ± ")
    assert tip.endswith("seconds 4.50 mean tau 0.00")
    page.get_by_label("mu x lambda, samples").check(force=True)
    axis = shown_axis(page, "trade_off")
    assert (axis.title, axis.start < 16, axis.end > 64) == ("mu x lambda, samples", True, True)


def test_the_histogram_shows_the_share_of_every_staleness(page: Page) -> None:
    (tip, *_) = point_at(page, "staleness", FREE, 2)
    assert tip == f"{FREE} cell mu 8, lambda 2 tau 2 gradients 50 %"


def test_a_phone_shows_all_of_it_without_scrolling_to_the_side(
    browser: Browser, path: Path
) -> None:
    with opened(browser, path, width=390) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_what_cannot_be_shown_or_written_is_an_error(rows: list[Row], tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="no run of the study has ended"):
        make_page([], title="empty")
    (tmp_path / "file").touch()
    with pytest.raises(LargebatchError, match=r"file/study.html: the page cannot be written: "):
        make_page(rows[:1], title=STUDY["name"]).write(tmp_path / "file" / "study.html")

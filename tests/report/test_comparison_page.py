"""The page that compares runs in a real browser without a network: what a reader sees and does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import (
    colours_of,
    columns_in_sight,
    opened,
    point_at,
    rows_of,
    shown_axis,
    started_browser,
    titles_of,
)
from fake_runs import SMALL_RESNET, FakeRun, give_recipe
from playwright.sync_api import Browser, Page

from largebatch.report import write_comparison
from largebatch.report.comparison import compare_runs
from largebatch.report.comparison_page import make_comparison_page
from largebatch.report.interactive_charts import series
from largebatch.report.style import DARK, LIGHT

HOSTILE = "<img src=x onerror=alert(1)>"
LOGARITHMIC = '"name":"LogScale"'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as started:
        yield started


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A good run with polishing, one that ends lower and sooner, one of a strange name."""
    folder = tmp_path_factory.mktemp("runs")
    good = FakeRun(folder / "good")
    good.curve(525, best=0.965)
    good.end("train", 525, 0.9583)
    good.train(525, 600, stage="clean", rate=905.0)
    good.end("clean", 75, 0.9722)
    good.drift(SMALL_RESNET)
    good.end("statistics", 0, 0.9861)
    for name, top1 in (("short", 0.75), (HOSTILE, 0.875)):
        run = FakeRun(folder / name, clean_steps=0, global_batch=192, steps=300)
        run.curve(300, best=top1 - 0.01)
        run.end("train", 300, top1)
        give_recipe(run.write(), "batch.global_batch=192", f"seed={round(100 * top1)}")
    return [give_recipe(good.write()), folder / "short", folder / HOSTILE]


@pytest.fixture(scope="module")
def path(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "compare.html"
    return write_comparison(runs, out)[0]


@pytest.fixture(scope="module")
def page(browser: Browser, path: Path) -> Iterator[Page]:
    """The page, which every test leaves as it found it, but for the order of a table."""
    with opened(browser, path) as shown:
        yield shown


def more_columns(page: Page) -> int:
    """The number in "11 more columns →" above the table of runs."""
    words = page.locator("#runs").get_attribute("data-more")
    assert words is not None
    return int(words.removesuffix(" →").removesuffix("s").removesuffix(" more column"))


def scroll_to_the_end(page: Page) -> None:
    page.locator("#runs > div").evaluate("(holder) => (holder.scrollLeft = holder.scrollWidth)")


def evaluations(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [found for found in map(json.loads, lines) if found["event"] == "evaluation"]


def seconds_at(folder: Path, number: int) -> float:
    """The time of an evaluation of a run without interruption, by its log."""
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    spent, seen = 0.0, 0
    records: Iterator[dict[str, Any]] = map(json.loads, lines)
    for record in records:
        spent += float(record.get("step_seconds", 0)) + float(record.get("seconds", 0))
        seen += record["event"] == "evaluation"
        if seen > number:
            return spent
    raise AssertionError(number)


def test_the_page_says_which_run_is_best_and_a_click_on_a_header_sorts(
    page: Page, runs: list[Path]
) -> None:
    assert page.locator(".verdict p").first.inner_text() == (
        f"good ends with the highest top-1, 98.61 %, 11.11 points above {HOSTILE}: more than the "
        "noise of the 360 validation images."
    )
    assert [row[:3] for row in rows_of(page, "runs")] == [
        ["good", "98.61", "0.00"],
        [HOSTILE, "87.50", "-11.11"],
        ["short", "75.00", "-23.61"],
    ]
    titles = titles_of(page, "runs")
    reached = titles.index("75 % in, s")
    for row in rows_of(page, "runs"):
        folder = next(run for run in runs if run.name == row[0])
        number = [found["top1"] >= 0.75 for found in evaluations(folder)].index(True)
        assert row[reached] == f"{seconds_at(folder, number):.2f}"
    steps = page.locator("#runs thead button", has_text="Steps")
    steps.click()
    assert rows_of(page, "runs")[0][0] == "good"
    steps.click()
    assert rows_of(page, "runs")[2][0] == "good"
    page.locator("#runs thead button", has_text="Top-1, %").click()
    assert [row[0] for row in rows_of(page, "runs")] == ["good", HOSTILE, "short"]


def test_the_settings_that_differ_stand_beside_each_other(page: Page) -> None:
    assert titles_of(page, "differences") == ["Setting", "good", "short", HOSTILE]
    assert rows_of(page, "differences") == [
        ["seed", "1", "75", "88"],
        ["batch.global_batch", "96", "192", "192"],
    ]
    assert page.locator("img").count() == 0  # that of the hostile name


def test_pointing_at_a_point_shows_the_numbers_of_the_log(page: Page, runs: list[Path]) -> None:
    found = evaluations(runs[1])[4]
    (tip,) = point_at(page, "accuracy", "short", 4)
    assert tip == (
        f"short top-1 {100 * found['top1']:.2f} % loss {found['loss']:.4f} stage train "
        f"step {found['step']} epoch {found['epoch']:.2f} samples {found['step'] * 192:,} "
        f"time {seconds_at(runs[1], 4):.2f} s"
    )
    assert point_at(page, "times", HOSTILE, 0)[0].startswith(f"{HOSTILE} top-1")


def test_the_legend_hides_a_run_in_every_chart_and_the_ranges_follow(page: Page) -> None:
    good = series(0, "good").colour
    charts = ("accuracy", "loss", "throughput", "times", "stages")
    assert all(good in colours_of(page, chart) for chart in charts)
    end = shown_axis(page, "accuracy").end
    page.locator(".legend").get_by_role("button", name="good").click()
    assert not any(good in colours_of(page, chart) for chart in charts)
    assert shown_axis(page, "accuracy").end < 0.6 * end  # the others have half the steps
    page.locator(".legend").get_by_role("button", name="all or none").click()
    assert series(1, "short").colour not in colours_of(page, "accuracy")
    page.locator(".legend").get_by_role("button", name="all or none").click()
    assert all(good in colours_of(page, chart) for chart in charts)


def test_charts_tables_and_the_legend_have_the_colours_of_the_scheme(
    browser: Browser, path: Path
) -> None:
    with opened(browser, path, scheme="dark") as page:
        for chart in ("accuracy", "loss", "throughput", "times", "stages"):
            assert DARK["train"] in colours_of(page, chart)
            assert LIGHT["train"] not in colours_of(page, chart)
        for part, name in (("tbody th", "color"), (".legend path", "stroke")):
            found = page.locator(part).first.evaluate("(one, n) => getComputedStyle(one)[n]", name)
            assert found == "rgb({}, {}, {})".format(*bytes.fromhex(DARK["train"][1:]))
        page.emulate_media(color_scheme="light")
        assert LIGHT["train"] in colours_of(page, "accuracy")
        assert DARK["train"] not in colours_of(page, "accuracy")


def test_the_choice_of_the_axis_moves_the_curves(page: Page, runs: list[Path]) -> None:
    last = seconds_at(runs[0], len(evaluations(runs[0])) - 2)
    for title, low, high in (
        ("Epochs", 600 * 96 / 1437, 1.1),
        ("Samples", 600 * 96, 1.1),
        ("Time, s", last, 1.2),
        ("Steps", 600, 1.1),
    ):
        page.get_by_text(title, exact=True).first.click()
        for chart in ("accuracy", "loss", "throughput"):
            axis = shown_axis(page, chart)
            assert axis.title == title
            assert 0.98 * low <= axis.end <= high * low, (chart, axis)
        assert shown_axis(page, "times").title == "Top-1 to reach, %"
    page.get_by_text("Samples", exact=True).first.click()
    assert "samples 11,520" in point_at(page, "accuracy", "short", 1)[0]
    page.get_by_text("Steps", exact=True).first.click()


def test_one_wild_validation_loss_does_not_flatten_the_loss_chart(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", clean_steps=0)
    run.curve(600, best=0.9)
    run.end("train", 600, 0.95)
    comparison = compare_runs([run.write()])
    assert LOGARITHMIC not in make_comparison_page(comparison).html()
    next(record for record in run.records if record["event"] == "evaluation")["loss"] = 114.0
    run.folder = tmp_path / "wild"
    assert LOGARITHMIC in make_comparison_page(compare_runs([run.write()])).html()


def test_a_phone_shows_all_of_it_without_scrolling_to_the_side(
    browser: Browser, path: Path
) -> None:
    with opened(browser, path, width=390) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert len(rows_of(page, "runs")) == 3


def test_a_phone_shows_the_columns_that_matter_and_how_many_more_there_are(
    browser: Browser, path: Path
) -> None:
    with opened(browser, path, width=390) as page:
        shown = columns_in_sight(page, "runs")
        assert shown[:4] == ["Run", "Top-1, %", "To the best", "Beyond noise"]
        assert more_columns(page) == len(titles_of(page, "runs")) - len(shown) > 0
        scroll_to_the_end(page)
        page.wait_for_function("() => document.querySelector('#runs[data-more]') === null")


def test_a_phone_shows_two_runs_of_long_names_side_by_side(
    browser: Browser, tmp_path: Path
) -> None:
    names = [f"digits-96-20261124-10300{second}" for second in range(3)]
    for place, name in enumerate(names):
        run = FakeRun(tmp_path / name, clean_steps=0)
        run.curve(600, best=0.9)
        run.end("train", 600, 0.95)
        give_recipe(run.write(), f"seed={place}", f"batch.global_batch={96 * (place + 1)}")
    page_path, _ = write_comparison([tmp_path / name for name in names], tmp_path / "page.html")
    with opened(browser, page_path, width=390) as page:
        assert columns_in_sight(page, "differences") == ["Setting", *names[:2]]
        for title in page.locator("#differences thead button").all()[:3]:
            assert title.evaluate("""(title) => {
              const parts = [title, title.parentElement];
              const [inner, outer] = parts.map((part) => part.getBoundingClientRect());
              return inner.bottom <= outer.bottom && inner.right <= outer.right;
            }""")


def test_a_table_that_is_wider_than_the_window_says_how_many_columns_are_beyond(
    page: Page,
) -> None:
    assert (
        more_columns(page) == len(titles_of(page, "runs")) - len(columns_in_sight(page, "runs")) > 0
    )
    assert page.locator("#differences[data-more]").count() == 0  # all of it is in sight


def test_the_keyboard_sorts_a_table_and_missing_values_stay_last(page: Page) -> None:
    header = page.locator("#runs thead th", has_text="98 % in, s")
    place = titles_of(page, "runs").index(header.inner_text())
    header.get_by_role("button").focus()
    for direction in ("descending", "ascending"):
        page.keyboard.press("Enter")
        assert header.get_attribute("aria-sort") == direction
        values = [row[place] for row in rows_of(page, "runs")]
        assert (values[0], set(values[1:])) == ("77.40", {"–"})
    page.locator("#runs thead button", has_text="Top-1, %").press("Enter")
    assert header.get_attribute("aria-sort") is None
    assert [row[0] for row in rows_of(page, "runs")] == ["good", HOSTILE, "short"]


def test_without_javascript_the_tables_are_there_and_a_note_says_what_is_not(
    browser: Browser, path: Path
) -> None:
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(path.as_uri())
    assert "Charts, filters and sorting need JavaScript" in page.locator("header").inner_text()
    assert page.locator("#runs tbody tr").count() == 3
    context.close()

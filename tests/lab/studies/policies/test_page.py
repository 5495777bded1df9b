"""The page of a study: its numbers against NumPy's, and in a real browser what a reader does."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
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
from playwright.sync_api import Browser, Page
from policy_databases import Policy, fill
from study_results import cell, run, trial

from largebatch.cli.main import DONE, USER, main
from largebatch.errors import StudyError
from largebatch.lab.studies.policies.by_class import MOST_CLASSES, ByClass, shown_classes
from largebatch.lab.studies.policies.page import make_page, thinned
from largebatch.lab.studies.policies.standings import Axis, describe, pareto_front, stand
from largebatch.lab.studies.queue.results import CellResults, Result
from largebatch.report.interactive_charts import series

HOSTILE = "<img src=x onerror=alert(1)>"
POLICIES = ("constant", "cosine", "late", HOSTILE)
FAST = {"warmup": "null", "decay": "{kind: constant}"}
COSINE = {"decay": "{kind: cosine}"}
LATE = {"decay": "{kind: polynomial, power: 2.0}"}


def search(best: float) -> list[Result]:
    """Three trials: that found, one that was stopped early, one that diverged."""
    return [trial(0.5, best), trial(0.2, 0.9, pruned_after=150), trial(1.25, 0.1)]


@pytest.fixture(scope="module")
def found() -> list[CellResults]:
    """Updates to 0.9: constant 300, cosine 450, late 600 for two seeds of three."""
    steady = [run(seed, [0.7, 0.9, 0.9, 0.91 + seed / 100], every=150) for seed in (1, 2, 3)]
    falling = [run(seed, [0.5, 0.8, 0.95, 0.97 + seed / 200], every=150) for seed in (1, 2, 3)]
    late = [run(seed, [0.5, 0.6, 0.7, 0.9], every=150, diverged=seed == 3) for seed in (1, 2, 3)]
    others = [
        run(1, [0.5, top1], every=300, scale=by)
        for by, top1 in ((0.1, 0.6), (0.5, 0.8), (5, 0.7), (10, 0.4))
    ]
    under_way = [run(2, [0.5, 0.1], every=300, scale=0.1)]
    return [
        cell("constant", steady, search=search(0.92), schedule=FAST, scaled=[*others, *under_way]),
        cell("cosine", falling, search=search(0.97), schedule=COSINE),
        cell("late", late, search=search(0.9), schedule=LATE),
        cell("cosine", falling[:1], configuration="large", search=search(0.98), schedule=COSINE),
        cell(HOSTILE, [], configuration="large", search=search(0.9)[:1], schedule=FAST),
    ]


@pytest.fixture(scope="module")
def path(found: list[CellResults], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_page(found, targets=[0.9]).write(tmp_path_factory.mktemp("page") / "study.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_browser() as started:
        yield started


@pytest.fixture(scope="module")
def page(browser: Browser, path: Path) -> Iterator[Page]:
    """The page, which every test leaves as it found it, but for the order of the table."""
    with opened(browser, path) as shown:
        yield shown


def names(page: Page) -> list[str]:
    return [row[0] for row in rows_of(page, "policies")]


def test_the_front_is_what_a_comparison_of_all_pairs_leaves() -> None:
    draw = np.random.default_rng(7)
    for number in (0, 1, 2, 5, 36, 36, 36):
        cost, value = draw.integers(0, 9, (2, number)).astype(float)  # with many ties
        as_good = (cost[:, None] <= cost) & (value[:, None] >= value)
        better = (cost[:, None] < cost) | (value[:, None] > value)
        left = np.flatnonzero(~(as_good & better).any(axis=0))
        assert sorted(pareto_front(list(cost), list(value))) == list(left)


def test_a_run_that_diverged_has_not_reached_what_it_had_on_the_way() -> None:
    reached, diverged = (run(1, [0.5, 0.9], every=10, diverged=it) for it in (False, True))
    assert diverged.evaluations == reached.evaluations
    found = reached.cost(0.5)
    assert found is not None
    assert found.updates == 10
    assert diverged.cost(0.5) is None


def test_a_policy_that_not_all_seeds_bring_to_the_target_is_on_no_front(
    found: list[CellResults],
) -> None:
    standings = stand(found, [0.9])
    axis = Axis("updates", 0.9)
    late = next(one for one in standings.cells if one.found.policy == "late")
    assert (late.cost(axis), late.costs(0.9).reached, late.competes(axis)) == (600, 2, False)
    assert {one.found.policy for one in standings.of(0) if standings.on_front(one, axis)} == {
        "constant",
        "cosine",
    }
    assert stand([found[2]], [0.9]).fronts[axis] == frozenset()


def test_the_sentences_have_the_answer_and_what_it_rests_on(found: list[CellResults]) -> None:
    gaps = np.array([0.055, 0.050, 0.045])  # cosine minus constant, seed by seed
    reach = 4.302652729911275 * gaps.std(ddof=1) / math.sqrt(3)  # Student, 2 degrees of freedom
    first, second, *_, counts, waiting = describe(stand(found, [0.9]))
    assert first == (
        "small: cosine has the highest top-1, 98.00 % ± 1.24 (3 seeds); within the noise of seeds "
        "of it: late."
    )
    assert second == (
        "small: 90 % takes the fewest updates with constant, 300; within the noise of it: cosine; "
        "all seeds reach it with 2 of 3 policies."
    )
    assert counts == (
        "28 runs: 13 trials of the search, 10 runs with seeds, 5 at other rates, on node-7 "
        "(x86_64, 2 threads) with torch 2.9.0."
    )
    assert waiting == f"Not finished: {HOSTILE}."
    (alone, *_) = describe(stand(found[:2], [0.9]))
    assert alone == (
        f"cosine has the highest top-1, 98.00 % ± 1.24 (3 seeds), {100 * gaps.mean():.2f} points "
        f"above constant ({100 * (gaps.mean() - reach):.2f} to "
        f"{100 * (gaps.mean() + reach):.2f}): more than the noise of seeds."
    )


def test_robustness_and_confidence_are_told_in_words(found: list[CellResults]) -> None:
    scales = {0.25: 0.8, 0.5: 0.9, 2.0: 0.9, 4.0: 0.4}

    def scaled(more: float) -> list[Result]:
        return [
            run(seed, [0.5, top1 + more + seed / 1000], every=300, scale=by)
            for seed in (1, 2, 3)
            for by, top1 in scales.items()
        ]

    steady, falling, *_ = found
    cells = [
        replace(steady, scaled=tuple(scaled(0.0))),
        replace(falling, scaled=tuple(scaled(0.05))),
    ]
    robust, confident = [text for text in describe(stand(cells, [0.9])) if "(AC)" in text or
                         "times the rate found" in text]  # fmt: skip
    assert robust.startswith("At 0.25 to 4 times the rate found, cosine has the highest top-1 on")
    assert "constant the lowest, " in robust
    assert "within the noise" not in robust
    assert "between classes it deviates (CDAC) by" in confident
    page = make_page(cells)
    assert {"How much the rate matters", "Confidence"} <= {one.title for one in page.sections}


def test_policies_with_two_seeds_are_too_few_to_compare_and_have_no_interval(
    tmp_path: Path,
) -> None:
    """42.25 and 64.75 %: an interval of 95 % would reach 143 points."""
    two = [run(1, [0.2, 0.4222], every=300), run(2, [0.2, 0.6472], every=300)]
    three = [run(seed, [0.2, 0.30 + seed / 100], every=300) for seed in (1, 2, 3)]
    cells = [cell("warm", two, search=search(0.9)), cell("cold", three, search=search(0.9))]
    standings = stand(cells, [0.9])
    first, *_ = describe(standings)
    assert first == (
        "warm has the highest top-1, 53.47 % (2 seeds); too few seeds to compare with cold: 3 or "
        "more tell policies apart."
    )
    assert not standings.has_enough_seeds
    text = make_page(cells).write(tmp_path / "study.html").read_text("utf-8")
    assert '<div class="verdict bad">' in text
    assert "142.94" not in text
    assert stand(cells[:1], [0.9]).has_enough_seeds  # there is nothing to compare with


def test_the_fewest_updates_are_those_of_one_policy_where_evaluations_are_close_enough() -> None:
    """20 to 22 updates against 80 to 110, and 22 to 24, of which the last is in the noise."""

    def reaching(*steps: int) -> list[Result]:
        each = enumerate(steps, start=1)
        return [run(seed, [0.1] * (at - 1) + [0.9] * 5, every=1) for seed, at in each]

    cells = [
        cell("quick", reaching(20, 22, 21)),
        cell("slow", reaching(80, 110, 100)),
        cell("as quick", reaching(22, 24, 22)),
    ]
    _, fewest, *_ = describe(stand(cells, [0.9]))
    assert fewest.startswith(
        "90 % takes the fewest updates with quick, 21; within the noise of it: as quick; all seeds"
    )
    _, fewest, *_ = describe(stand(cells[:2], [0.9]))
    assert fewest.startswith("90 % takes the fewest updates with quick, 21; all seeds reach it")


def test_a_click_on_a_header_sorts_and_the_cells_are_the_means(page: Page) -> None:
    titles = titles_of(page, "policies")
    rows = {row[0]: dict(zip(titles, row, strict=False)) for row in rows_of(page, "policies")}
    assert list(rows) == ["cosine", "constant", "late"]  # of the first recipe, the best one first
    assert rows["constant"]["Top-1, %"] == f"{100 * np.mean([0.92, 0.93, 0.94]):.2f}"
    assert rows["constant"]["±"] == "2.48"  # 4.3027 x 1 / sqrt(3)
    assert rows["constant"]["Pareto front"].startswith("90 %: updates, images, seconds")
    assert rows["late"]["Pareto front"] == "–"
    reached = titles.index("reached")
    assert [row[reached] for row in rows_of(page, "policies")] == ["3 of 3", "3 of 3", "2 of 3"]
    assert rows["cosine"]["Images to 90 %"] == f"{450 * 96:,}"
    header = page.locator("#policies thead button", has_text="Updates to 90 %")
    header.click()
    assert names(page) == ["late", "cosine", "constant"]
    header.click()
    assert names(page) == ["constant", "cosine", "late"]


def test_pointing_at_a_mean_shows_its_interval_and_its_costs(page: Page) -> None:
    (tip, *_) = point_at(page, "costs", "constant", 0)
    assert tip == (
        "constant top-1 93.00 % ± 2.48 (3 seeds) to 90 % 300 updates, 28,800 images, 3.0 s; "
        "3 of 3 seeds whole run 600 updates, 57,600 images, 6.0 s; 3 of 3 seeds"
    )
    tips = point_at(page, "search_0", "late", 1)  # by rate: 0.2, 0.5, 1.25
    assert "late peak_lr 0.5 accuracy 90.00 % trial found" in tips
    assert point_at(page, "search_0", "cosine", 2)[0].endswith("diverged: counts as chance")
    assert point_at(page, "scales", "constant", 0)[0] == (
        "constant rate 0.1 times top-1 60.00 % (1 seed)"  # seed 2 is not run at the others yet
    )
    assert point_at(page, "scales", "constant", 2)[0] == (
        "constant rate 1 times top-1 92.00 % (1 seed)"  # of seed 1, which was run at the others
    )


def test_the_table_by_class_has_the_accuracy_of_each_class_and_its_mean_confidence(
    page: Page,
) -> None:
    rows = {row[0]: dict(zip(titles_of(page, "classes_0"), row, strict=True))
            for row in rows_of(page, "classes_0")}  # fmt: skip
    assert (rows["constant"]["4"], rows["constant"]["9"]) == ("83.3", "0.0")
    cells = page.locator("#classes_0 tbody tr", has_text="constant").locator("td")
    assert cells.nth(4).get_attribute("title") == "75 of 90 right, average confidence 0.8400"
    assert cells.nth(9).get_attribute("title") == "0 of 90 right, average confidence –"


def test_the_choice_of_the_cost_moves_the_marks_and_the_front(page: Page) -> None:
    for title, end in (("Seconds to 90 %", 6.0), ("Images to 90 %", 57_600), (None, 600)):
        page.locator(".filter").get_by_text(title or "Updates to 90 %", exact=True).click()
        axis = shown_axis(page, "costs")
        assert axis.title == (title or "Updates to 90 %")
        assert end <= axis.end <= 1.2 * end


def test_filters_change_the_table_and_every_chart(page: Page) -> None:
    late = series(2, "late").colour
    charts = ("costs", "shapes", "search_0")
    assert all(late in colours_of(page, chart) for chart in charts)
    page.get_by_text("Only the Pareto front", exact=True).click()
    assert sorted(names(page)) == ["constant", "cosine"]
    assert not any(late in colours_of(page, chart) for chart in charts)
    assert sorted(row[0] for row in rows_of(page, "classes_0")) == ["constant", "cosine"]
    page.get_by_text("Only the Pareto front", exact=True).click()
    page.locator(".controls").get_by_text("polynomial", exact=True).click()
    assert sorted(names(page)) == ["constant", "cosine"]
    assert not any(late in colours_of(page, chart) for chart in charts)
    page.locator(".controls").get_by_text("polynomial", exact=True).click()
    page.locator(".legend").get_by_role("button", name="late").click()
    assert not any(late in colours_of(page, chart) for chart in charts)
    page.locator(".legend").get_by_role("button", name="late").click()
    assert all(late in colours_of(page, chart) for chart in charts)
    assert len(names(page)) == 3


def test_another_recipe_of_the_study_takes_the_place_of_the_first(page: Page) -> None:
    assert page.locator("#classes_1").is_hidden()
    page.locator(".filter").get_by_text("large", exact=True).click()
    assert sorted(names(page)) == [HOSTILE, "cosine"]
    assert page.locator("img").count() == 0  # that of the hostile name
    assert page.locator("#classes_0").is_hidden()
    assert series(0, "constant").colour not in colours_of(page, "costs")
    page.locator(".filter").get_by_text("small", exact=True).click()
    assert len(names(page)) == 3


def test_a_phone_shows_all_of_it_without_scrolling_to_the_side(
    browser: Browser, path: Path
) -> None:
    with opened(browser, path, width=390) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert len(names(page)) == 3
        shown = ["Policy", "Top-1, %", "±", "Updates to 90 %"]
        assert columns_in_sight(page, "policies")[:4] == shown
        page.get_by_text("Only the Pareto front", exact=True).click()
        assert len(names(page)) == 2


@pytest.mark.long
def test_a_page_of_thirty_six_policies_stays_small(tmp_path: Path) -> None:
    many = [
        cell(f"policy-{n}", [run(seed, [0.5, 0.8 + n / 200], every=300) for seed in range(1, 6)],
             search=[trial(0.1 * (k + 1), 0.9) for k in range(8)])
        for n in range(36)
    ]  # fmt: skip
    assert make_page(many).write(tmp_path / "many.html").stat().st_size < 4_000_000


def test_a_study_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="no run that has ended"):
        make_page([cell("early", [])])


def test_a_long_shape_keeps_its_peaks_and_its_lows() -> None:
    rates = np.abs(np.sin(np.arange(100_000) / 97))
    places = thinned(rates)
    assert len(places) <= 602
    assert {int(rates.argmax()), int(rates.argmin()), 0, 99_999} <= set(places.tolist())
    assert np.array_equal(thinned(rates[:600]), np.arange(600))


def test_of_many_classes_those_are_drawn_in_which_policies_differ_most() -> None:
    draw = np.random.default_rng(3)
    labels = tuple(f"class {number}" for number in range(500))
    accuracies = draw.random((3, 500))
    accuracies[:, 17] = math.nan  # no images
    found = [ByClass(labels, row, row, row, row) for row in accuracies]
    spread = np.ptp(accuracies, axis=0)
    spread[17] = 0
    widest = sorted(np.argsort(-spread)[:MOST_CLASSES])
    assert shown_classes(found) == [labels[place] for place in widest]


def test_the_page_is_written_as_a_study_ends_and_again_of_its_database(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, {"fall": Policy(reached=[6], top1=[0.91])}, targets=[0.9])  # one of one seed
    page = tmp_path / "study.html"
    assert (
        main(["lab", "study", "bench", str(tmp_path / "study.yaml"), "--out", str(tmp_path)])
        == DONE
    )
    assert capsys.readouterr().out.splitlines()[-1] == f"page: {page}"
    text = page.read_text(encoding="utf-8")
    assert "Updates to 90 %" in text
    assert "fall has the highest top-1, 91.00 % (1 seed); it is the only policy" in text
    page.unlink()
    assert main(["lab", "study", "report", str(tmp_path), "--target", "0.85"]) == DONE
    assert capsys.readouterr().out == f"page: {page}\n"
    assert "Updates to 85 %" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("study", "message"),
    [("{}", "no study.db"), ("sqlite:///{}/gone.db", "no such file"), ("{}/x", "cannot be used")],
)
def test_a_page_without_a_database_is_refused_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], study: str, message: str
) -> None:
    assert main(["lab", "study", "report", study.format(tmp_path)]) == USER
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

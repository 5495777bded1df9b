"""Utility, cost and robustness of runs: each by hand, from folders with known numbers."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from fake_runs import FakeRun
from hypothesis import given
from hypothesis import strategies as st
from schedules_of import schedule_of
from scipy import stats
from short_runs import DIGITS

from largebatch import load_recipe
from largebatch.lab.studies.metrics import (
    Cost,
    Interval,
    Ratio,
    cost,
    costs,
    difference,
    has_diverged,
    interval,
    measurements,
    ratio,
    ratio_of_updates,
    robustness,
)
from largebatch.recipe.scaling import scaled
from largebatch.recipe.writing import dump_yaml
from largebatch.report.run import Run, read_run

SCALES = (0.1, 0.5, 1.0, 5.0, 10.0)
"""Multiples of LRBench, with the rate found itself."""

EVALUATIONS = [(10, 0.5), (20, 0.8), (30, 0.7), (40, 0.9)]


def a_run(folder: Path, *, evaluations: list[tuple[int, float]] = EVALUATIONS) -> FakeRun:
    """Forty updates of 96 samples, each 0.12 s, and evaluations of 0.2 s."""
    run = FakeRun(folder, steps=40, clean_steps=0)
    begin = 0
    for step, top1 in evaluations[:-1]:
        run.train(begin, step)
        run.evaluate("train", step, top1)
        begin = step
    run.train(begin, 40)
    run.end("train", 40, evaluations[-1][1])
    return run


def reread(run: FakeRun, *, seed: int = 7, **summary: object) -> Run:
    folder = run.write(**summary)
    recipe = dump_yaml(load_recipe(DIGITS, [f"seed={seed}"]))
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    return read_run(folder)


def test_a_target_costs_what_its_first_evaluation_had_cost(tmp_path: Path) -> None:
    run = reread(a_run(tmp_path / "run"))
    expected = Cost(
        updates=20,
        updates_before=10,
        images=20 * 96,
        seconds=pytest.approx(20 * 0.12 + 2 * 0.2),  # type: ignore[arg-type]  # pytest's stand-in
    )
    assert cost(measurements(run), 0.8) == expected  # exactly at the target is at the target
    assert cost(measurements(run), 0.75) == expected  # the fall to 0.7 after it takes nothing back
    last = cost(measurements(run), 0.81)
    assert last is not None
    assert (last.updates, last.updates_before, last.images) == (40, 30, 3840)
    assert last.seconds == pytest.approx(40 * 0.12 + 4 * 0.2)
    first = cost(measurements(run), 0.1)
    assert first is not None
    assert (first.updates, first.updates_before) == (10, 0)
    assert cost(measurements(run), 0.9001) is None


def test_images_follow_a_batch_schedule(tmp_path: Path) -> None:
    changes = [{"step": 15, "position": 15 * 96, "global_batch": 192}]
    run = a_run(tmp_path / "run")
    run.plan["batch_changes"] = changes
    found = cost(measurements(reread(run)), 0.8)
    assert found is not None
    assert found.images == 15 * 96 + 5 * 192


def test_a_target_that_polishing_reached_has_its_seconds_and_those_of_what_was_rolled_back(
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path / "run")
    run.end("clean", 0, 0.85)  # each of the two took 3.2 s, by the summary
    run.decide("clean", before=0.9, after=0.8)
    run.end("statistics", 0, 0.95)
    found = cost(measurements(reread(run)), 0.95)
    assert found is not None
    assert (found.updates, found.updates_before) == (40, 40)
    assert found.seconds == pytest.approx(40 * 0.12 + 4 * 0.2 + 2 * 3.2)


def test_a_last_loss_that_is_no_number_is_divergence_and_an_early_one_is_not(
    tmp_path: Path,
) -> None:
    for place, diverged in ((-1, True), (0, False)):
        run = a_run(tmp_path / str(place))
        evaluations = [one for one in run.records if one["event"] == "evaluation"]
        evaluations[place]["loss"] = None
        assert has_diverged(reread(run)) == diverged


def test_an_interval_by_hand() -> None:
    """0.90, 0.92, 0.94: deviation 0.02; t(0.975, 2) = 4.302653; 0.02 / sqrt(3) = 0.01154701."""
    mean, low, high, number = interval([0.90, 0.92, 0.94])
    assert mean == pytest.approx(0.92)
    assert number == 3
    assert low == pytest.approx(0.92 - 4.302653 * 0.01154701, abs=1e-7)
    assert high == pytest.approx(0.92 + 4.302653 * 0.01154701, abs=1e-7)
    assert interval([0.5]) == Interval(0.5, -math.inf, math.inf, 1)
    with pytest.raises(ValueError, match="one value or more"):
        interval([])


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=20))
def test_an_interval_is_scipys(values: list[float]) -> None:
    found = interval(values, together=4)
    error = stats.sem(np.array(values))
    if error > 0:
        level = 1 - 0.05 / 4
        low, high = stats.t.interval(level, len(values) - 1, loc=np.mean(values), scale=error)
        assert found[1:3] == pytest.approx((low, high), rel=1e-9, abs=1e-12)


def test_seeds_are_compared_in_pairs() -> None:
    """What is common to a seed cancels: 0.02, 0.02 and 0.05 lie 0.03 from 0, with 0.0173205."""
    one = {1: 0.52, 2: 0.72, 3: 0.95, 4: 0.1}
    found = difference(one, {3: 0.90, 1: 0.50, 2: 0.70, 5: 0.3})
    assert found.number == 3
    assert found.mean == pytest.approx(0.03)
    assert found.high - found.mean == pytest.approx(
        4.302653 * 0.0173205081 / math.sqrt(3), abs=1e-7
    )
    paired = stats.ttest_rel([0.52, 0.72, 0.95], [0.50, 0.70, 0.90]).confidence_interval()
    assert (found.low, found.high) == pytest.approx(tuple(paired))
    with pytest.raises(ValueError, match="one value or more"):
        difference({1: 0.5}, {2: 0.5})


def test_a_ratio_of_costs_by_hand() -> None:
    """Ratios 2, 2 and 0.25: the geometric mean is 1; seed 4 is censored on one side."""
    one = {1: 20.0, 2: 40.0, 3: 10.0, 4: 10.0, 9: 1.0}
    found = ratio(one, {1: 10.0, 2: 20.0, 3: 40.0, 4: None})
    assert found.interval is not None
    assert (found.reached, found.reached_other, found.seeds) == (4, 3, 4)
    assert found.interval.mean == pytest.approx(1.0)
    # ln 2, ln 2 and -2 ln 2 have a deviation of sqrt(6 / 2) ln 2 = 1.2005663; over sqrt(3): ln 2
    assert found.interval.high == pytest.approx(2**4.302653, rel=1e-6)
    assert found.interval.low == pytest.approx(2**-4.302653, rel=1e-6)
    nothing = ratio({1: None, 2: 5.0}, {1: 5.0, 2: None})
    assert nothing == Ratio(interval=None, reached=1, reached_other=1, seeds=2)


def test_a_ratio_of_updates_is_no_surer_than_the_evaluations_are() -> None:
    """All seeds alike, 800 updates against 700: with one evaluation in 100 they may be equal."""

    def found(updates: int, before: int) -> Cost:
        return Cost(updates=updates, updates_before=before, images=9, seconds=9.0)

    slow = dict.fromkeys((1, 2, 3), found(800, 700))
    quick = dict.fromkeys((1, 2, 3), found(700, 600))
    against = ratio_of_updates(slow, {**quick, 4: None}).interval
    assert against is not None
    assert against == pytest.approx((8 / 7, 1.0, 8 / 6, 3))
    at_once = dict.fromkeys((1, 2, 3), found(100, 0))
    against = ratio_of_updates(slow, at_once).interval
    assert against is not None
    assert against == pytest.approx((8.0, 7.0, math.inf, 3))
    assert ratio_of_updates({1: None}, {1: found(9, 0)}).interval is None


def test_runs_that_never_reached_the_target_are_counted_apart(tmp_path: Path) -> None:
    reached = [
        cost(measurements(reread(a_run(tmp_path / str(n), evaluations=[(n, 0.8), (40, 0.9)]))), 0.8)
        for n in (10, 20)
    ]
    found = costs([*reached, None])
    assert (found.reached, found.runs) == (2, 3)
    assert found.updates is not None
    assert found.images is not None
    assert (found.updates.mean, found.images.mean) == (15, 15 * 96)
    assert found.updates.high == pytest.approx(15 + 12.7062047 * 5, abs=1e-5)  # t(0.975, 1)
    assert costs([None]).updates is None


def test_robustness_by_hand() -> None:
    top1 = {0.1: [0.1, 0.3], 0.5: [0.9], 1.0: [0.94, 0.96], 5.0: [0.8], 10.0: [0.1]}
    shuffled = dict(random.Random(0).sample(list(top1.items()), len(top1)))
    found = robustness(shuffled)
    assert tuple(found.by_scale) == SCALES
    assert found.worst_drop == pytest.approx(0.95 - 0.1)
    assert found.mean == pytest.approx((0.2 + 0.9 + 0.95 + 0.8 + 0.1) / 5)
    # log10 of the scales: -1, -0.30103, 0, 0.69897, 1, over a length of 2
    strips = 0.69897 * (0.2 + 0.9) / 2 + 0.30103 * (0.9 + 0.95) / 2
    strips += 0.69897 * (0.95 + 0.8) / 2 + 0.30103 * (0.8 + 0.1) / 2
    assert found.area == pytest.approx(strips / 2, abs=1e-6)
    assert found.by_scale[1.0].number == 2


PIECES = (
    "schedule={peak_lr: 0.4, warmup: {steps: 5}, start_lr: 0.01, decay: {kind: piecewise, pieces: "
    "[{length: {epochs: 3}, peak_lr: 0.4, decay: {kind: tri, low_lr: 0.04, half_cycle: {epochs: 1}"
    "}}, {length: null, peak_lr: 0.2, decay: {kind: polynomial, power: 2.0, end_lr: 0.02}}]}}"
)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("change", ["seed=2", PIECES], ids=["simple", "pieces"])
def test_a_scaled_recipe_has_that_multiple_of_every_rate(scale: float, change: str) -> None:
    recipe = load_recipe(DIGITS, [change])
    changed = scaled(recipe, scale)
    before, after = (schedule_of(one) for one in (recipe, changed))
    for step in range(0, 600, 7):
        assert after(step) == pytest.approx(scale * before(step), rel=1e-9)
    assert changed.model_copy(update={"schedule": recipe.schedule}) == recipe
    assert json.loads(scaled(recipe, 1.0).model_dump_json()) == json.loads(recipe.model_dump_json())

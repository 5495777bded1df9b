"""Utility, cost, usage and robustness of runs: each by hand, from folders with known numbers."""

import math
from pathlib import Path

import numpy as np
import pytest
from fake_runs import FakeRun
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from short_runs import DIGITS

from largebatch import load_recipe
from largebatch.lab.studies.metrics import cost, has_diverged, measurements
from largebatch.lab.studies.trained import usage_of
from largebatch.recipe.writing import dump_yaml
from largebatch.report.run import Run, read_run
from largebatch.report.seeds import Interval, difference, interval, leads, ratio
from largebatch.tracking.events import SYSTEM

EVALUATIONS = [(10, 0.5), (20, 0.8), (30, 0.7), (40, 0.9)]


def a_run(folder: Path) -> FakeRun:
    """Forty updates of 96 samples, each 0.12 s, and evaluations of 0.2 s."""
    run = FakeRun(folder, steps=40, clean_steps=0)
    begin = 0
    for step, top1 in EVALUATIONS[:-1]:
        run.train(begin, step)
        run.evaluate("train", step, top1)
        begin = step
    run.train(begin, 40)
    run.end("train", 40, EVALUATIONS[-1][1])
    return run


def reread(run: FakeRun) -> Run:
    folder = run.write()
    (folder / "recipe.yaml").write_text(dump_yaml(load_recipe(DIGITS)), encoding="utf-8")
    return read_run(folder)


def test_a_target_costs_what_its_first_evaluation_had_cost(tmp_path: Path) -> None:
    found = measurements(reread(a_run(tmp_path / "run")))
    for target in (0.8, 0.75):  # exactly at the target is at it; the fall to 0.7 does not count
        first = cost(found, target)
        assert first is not None
        assert first.step == 20
        assert first.seconds == pytest.approx(20 * 0.12 + 2 * 0.2)
    last = cost(found, 0.81)
    assert last is not None
    assert last.step == 40
    assert last.seconds == pytest.approx(40 * 0.12 + 4 * 0.2)
    assert cost(found, 0.9001) is None


def test_a_target_that_polishing_reached_has_the_seconds_of_all_stages(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    run.end("clean", 0, 0.85)  # each of the two took 3.2 s, by the summary
    run.decide("clean", before=0.9, after=0.8)
    run.end("statistics", 0, 0.95)
    found = cost(measurements(reread(run)), 0.95)
    assert found is not None
    assert found.step == 40
    assert found.seconds == pytest.approx(40 * 0.12 + 4 * 0.2 + 2 * 3.2)


def test_an_infinite_last_loss_is_divergence_and_an_early_one_is_not(tmp_path: Path) -> None:
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
    """Differences and ratios of the seeds that both have, held against SciPy."""
    one = {1: 0.52, 2: 0.72, 3: 0.95, 4: 0.1}
    other = {3: 0.90, 1: 0.50, 2: 0.70, 5: 0.3}
    pairs = np.array([0.52, 0.72, 0.95]), np.array([0.50, 0.70, 0.90])
    gap, times = difference(one, other), ratio(one, other)
    assert gap is not None
    assert times is not None
    paired = stats.ttest_rel(*pairs).confidence_interval()
    assert gap == pytest.approx((0.03, paired.low, paired.high, 3))
    paired = stats.ttest_rel(*np.log(pairs)).confidence_interval()
    mean = stats.gmean(pairs[0] / pairs[1])
    assert times == pytest.approx((mean, math.exp(paired.low), math.exp(paired.high), 3))
    assert difference({1: 0.5}, {2: 0.5}) is None
    assert ratio({1: 0.5}, {2: 0.5}) is None


def test_the_lead_over_each_of_several_variants_holds_jointly() -> None:
    """Accuracies by differences and costs by ratios; what shares no seed has no lead."""
    best = {1: 0.90, 2: 0.92, 3: 0.91}
    others = {"worse": {1: 0.80, 2: 0.83, 3: 0.81}, "close": {1: 0.89, 2: 0.93, 3: 0.90}}
    found = leads(best, {**others, "apart": {4: 0.1}})
    assert [lead.is_sure for lead in found] == [True, False, False]
    assert found[0].gap == difference(best, others["worse"], together=3)
    assert found[2].gap is None
    # By costs the lowest is the best, so the same numbers lead the other way.
    (cheaper,) = leads(others["worse"], {"best": best}, of_costs=True)
    assert cheaper.is_sure
    assert cheaper.gap == ratio(best, others["worse"])
    (free,) = leads({1: 0.0}, {"best": {1: 0.9}}, of_costs=True)
    assert (free.gap, free.is_sure) == (None, False)


def test_usage_is_summed_over_records_and_workers(tmp_path: Path) -> None:
    draw = np.random.default_rng(4)
    seconds = np.repeat(draw.uniform(0.5, 2.0, (5, 1)), 2, axis=1)
    table = {
        "cpu_percent": draw.uniform(50, 200, (5, 2)),
        "peak_memory_bytes": np.sort(draw.uniform(1e8, 9e8, (5, 2)), axis=0),
        "gpu_percent": np.full((5, 2), 75.0),
        "seconds": seconds,
        "read_bytes": draw.uniform(0, 1e7, (5, 2)),
    }
    run = FakeRun(tmp_path / "run")
    for step in range(5):
        record = {name: [None, None] for name in SYSTEM}
        record |= {name: list(values[step]) for name, values in table.items()}
        run.records.append({"event": "system", "stage": "train", "step": step, **record})
    found = usage_of(read_run(run.write()))
    cpu = (table["cpu_percent"] * seconds).sum() / 100
    assert found["cpu_seconds"] == pytest.approx(cpu)
    assert found["cores"] == pytest.approx(cpu / seconds[:, 0].sum())
    assert found["peak_memory_bytes"] == table["peak_memory_bytes"][-1].sum()
    assert found["gpu_percent"] == pytest.approx(75)
    assert found["read_bytes"] == pytest.approx(table["read_bytes"].sum())
    assert math.isnan(found["gpu_memory_bytes"])

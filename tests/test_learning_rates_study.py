"""The study of benchmarks/learning_rates.py and its tables."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import learning_rates_statistics as statistics  # noqa: E402
import learning_rates_tables as tables  # noqa: E402
from learning_rates import CONFIGURATIONS, FACTORIAL, Configuration  # noqa: E402
from schedules_of import schedule_of  # noqa: E402

from largebatch.lab.studies.queue.cells import cells_of  # noqa: E402
from largebatch.lab.studies.queue.study import Study  # noqa: E402
from largebatch.recipe.arithmetic.plan import make_plan  # noqa: E402
from largebatch.recipe.loading import validate_tree  # noqa: E402


@pytest.mark.parametrize("one", CONFIGURATIONS, ids=lambda one: one.key)
def test_every_configuration_can_be_planned(one: Configuration) -> None:
    study = validate_tree(Study, one.study(), source=one.name)
    cells = cells_of(study, ROOT)
    assert [cell.variant for cell in cells] == list(one.study()["policies"])
    assert set(FACTORIAL) <= {cell.variant for cell in cells}
    for cell in cells:
        plan = make_plan(cell.recipe, workers=1)
        rates = schedule_of(cell.recipe)
        assert max(rates(step) for step in range(plan.steps)) <= cell.recipe.schedule.peak_lr


def test_whole_cycles_end_low_and_those_of_the_tables_at_the_peak() -> None:
    (one,) = (one for one in CONFIGURATIONS if one.key == "digits, small, sgd")
    study = validate_tree(Study, one.study(), source=one.name)
    ends = {}
    for cell in cells_of(study, ROOT):
        last = make_plan(cell.recipe, workers=1).steps - 1
        ends[cell.variant] = schedule_of(cell.recipe)(last) / cell.recipe.schedule.peak_lr
    assert max(ends[name] for name in ("tri", "tri2", "triexp", "sin", "sinexp", "cos")) < 0.2
    assert ends["tri-tables"] > 0.9


def a_policy(*top1: float, reached: int = 100) -> dict[str, Any]:
    """Seeds 1, 2 ... that end at these, and have it from an update on."""
    seeds: list[dict[str, Any]] = [
        {
            "seed": seed,
            "scale": 1.0,
            "top1": value,
            "diverged": None,
            "curve": [[reached - 10, 0.1], [reached, value], [200, value]],
        }
        for seed, value in enumerate(top1, start=1)
    ]
    scaled = [
        {**run, "scale": scale, "top1": run["top1"] - 0.1}
        for run in seeds
        for scale in (0.1, 0.5, 5.0, 10.0)
    ]
    trials = [{"rate": rate, "top1": top1} for rate, top1 in ((0.1, 0.5), (0.2, 0.495), (0.4, 0.3))]
    return {"rate": 0.1, "edge": None, "trials": trials, "seeds": seeds, "scaled": scaled}


def test_the_spread_of_policies_is_without_the_noise_of_seeds() -> None:
    """Two seeds: means .51, .61, .71; a residual of +-.01 in the last; seeds differ by .02."""
    exact = {"fix": a_policy(0.5, 0.52), "b": a_policy(0.6, 0.62), "c": a_policy(0.7, 0.72)}
    assert statistics.spread_of(exact) == pytest.approx((0.1, 1.0))
    noisy = {**exact, "c": a_policy(0.69, 0.73)}
    # residuals: the interaction of policy and seed is (-.01, +.01) less its mean over policies
    rest = 2 * ((0.02 / 3) ** 2 + 2 * (0.01 / 3) ** 2)
    error = rest / 2 / 1 / 2
    deviation, reliability = statistics.spread_of(noisy)
    assert deviation == pytest.approx((0.01 - error) ** 0.5)
    assert reliability == pytest.approx(1 - error / 0.01)


def test_a_policy_that_diverged_is_in_no_spread_and_in_no_rank_correlation() -> None:
    rest = {"fix": a_policy(0.5, 0.52), "b": a_policy(0.6, 0.62), "c": a_policy(0.7, 0.72)}
    lost = a_policy(0.9, 0.1)
    lost["seeds"][1]["diverged"] = "the loss is infinite"
    both = {**rest, "lost": lost}
    assert statistics.spread_of(both) == statistics.spread_of(rest)
    other = {**rest, "lost": a_policy(0.1, 0.1)}
    assert statistics.rank_correlation(both, other) == pytest.approx(1)


def test_orders_are_reversed_kept_or_open() -> None:
    one = {"fix": a_policy(0.5, 0.501, 0.502), "b": a_policy(0.6, 0.601, 0.602)}
    other = {"fix": a_policy(0.7, 0.701, 0.702), "b": a_policy(0.6, 0.601, 0.602)}
    open_ = {"fix": a_policy(0.7, 0.5, 0.3), "b": a_policy(0.2, 0.6, 0.7)}
    assert statistics.orders(one, other) == (1, 0, 1)
    assert statistics.orders(one, one) == (0, 1, 1)
    assert statistics.orders(one, open_) == (0, 0, 1)
    assert statistics.rank_correlation(one, other) == pytest.approx(-1)


def test_a_target_lies_between_the_evaluation_that_has_it_and_the_one_before() -> None:
    costs = statistics.costs_of(a_policy(0.8, 0.5, reached=60), 0.7)
    assert costs[2] is None
    assert costs[1] is not None
    assert (costs[1].updates_before, costs[1].updates) == (50, 60)
    fix, quick = a_policy(0.8, 0.8), a_policy(0.9, 0.9, reached=25)
    found = statistics.sooner(quick, fix, 0.7).interval
    assert found is not None
    assert found[:3] == pytest.approx((100 / 25, 90 / 25, 100 / 15))
    assert statistics.target_of({"fix": fix}, 0.95) == 0.76


def test_tables_have_every_claim_with_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for one in CONFIGURATIONS:
        sign = -1 if one.batch == "large" else 1
        policies = {
            name: a_policy(0.7 + 0.01 * sign * at, 0.702 + 0.01 * sign * at)
            for at, name in enumerate(one.study()["policies"])
        }
        found[one.key] = {"policies": {**policies, "tri": a_policy(0.91, 0.912, reached=25)}}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(found))
    monkeypatch.setattr(tables, "newest", lambda *_: path)
    tables.main()
    text = capsys.readouterr().out
    assert "### digits, small, sgd: updates to 70%; against fix" in text
    assert "| tri | 0.1 | 0.1 to 0.2 | 91.10 (89.83 to 92.37) | +21.00 (+21.00 to +21.00)" in text
    assert "| cifar10, large, lars | fix | 70% |" in text
    assert "tri 4.00 (3.60 to 6.67)" in text
    assert "| digits, small, sgd | tri | 83." in text
    rank = next(
        line for line in text.splitlines() if line.startswith("| digits, small, sgd | digits, l")
    )
    assert "| 1.00 |" in rank
    assert "| digits, small, sgd, one rate | policies at one rate | " in text

"""The studies of momentum and warm-up: momentum_by_tau.py, warmup_by_tau.py (cells, search and
differences), and the quadratic of momentum_quadratic.py against what is known in closed form.
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import momentum_by_tau as momentum  # noqa: E402
import momentum_quadratic as quadratic  # noqa: E402
import warmup_by_tau as warmup  # noqa: E402

from largebatch.lab.studies.staleness.study import StalenessStudy, cells_of  # noqa: E402
from largebatch.recipe.loading import validate_tree  # noqa: E402

ASYNCHRONOUS = "asynchronous, over tau"


def point(condition: str = ASYNCHRONOUS, of: float = 0.0, far: float = 0.05) -> momentum.Point:
    return momentum.Point(condition, of, far)


def row(top1: dict[int, float], *, tau: float = 27.0, loss: float = 1.0) -> Any:  # noqa: ANN401 -- a Row
    found = [{"seed": seed, "top1": value, "loss": loss} for seed, value in top1.items()]
    return SimpleNamespace(found=found, tau=tau)


def test_every_point_is_a_cell_whose_momentum_and_rate_go_as_far(tmp_path: Path) -> None:
    points = [
        point(condition, of, far)
        for condition, (_, _, momenta) in momentum.CONDITIONS.items()
        for of in momenta
        for far in momentum.GRID
    ]
    study = validate_tree(StalenessStudy, momentum.study(points, seeds=2), source="study")
    cells = {cell.name: cell for cell in cells_of(study, tmp_path)}
    assert len(cells) == len(points)
    for each in points:
        recipe = cells[each.cell].recipe
        assert recipe.optimizer.kind == "sgd"
        assert recipe.optimizer.momentum == each.momentum
        assert recipe.schedule.peak_lr == pytest.approx(each.far * (1 - each.momentum))


@pytest.mark.parametrize(("tau", "momenta"), [(0, 0.9), (5.5, 3.5 / 4.5), (9, 0), (27, 0)])
def test_the_rule_holds_the_age_of_gradients(tau: float, momenta: float) -> None:
    assert momentum.rule(tau) == pytest.approx(momenta)


def test_the_rule_has_a_momentum_near_it_in_every_condition() -> None:
    late = {"hardsync": 0, "6-softsync, over tau": 5.5}
    for condition, (_, _, momenta) in momentum.CONDITIONS.items():
        assert min(abs(it - momentum.rule(late.get(condition, 27))) for it in momenta) < 0.05


def test_rates_are_tried_until_the_best_has_neighbours_on_both_sides() -> None:
    search = {point(far=far): row({1: -abs(far - 3)}) for far in momentum.GRID}
    asked = []
    while missing := momentum.beyond(search):
        asked += [it.far for it in missing]
        search |= {it: row({1: -abs(it.far - 3)}) for it in missing}
    assert asked == [0.8, 3.2, 12.8]
    assert momentum.best(search) == [point(far=3.2)]


def test_the_lower_loss_decides_between_equal_trials_and_none_is_worst() -> None:
    search = {
        point(far=0.0125): row({1: 0.5}, loss=2.0),
        point(far=0.05): row({1: 0.5}),
        point(far=0.2): SimpleNamespace(found=[{"seed": 1, "top1": 0.5, "loss": None}], tau=27.0),
    }
    assert momentum.best(search) == [point(far=0.05)]


def test_a_rate_at_which_one_seed_fails_is_not_taken() -> None:
    search = {
        point(far=0.2): row({1: 0.95, 2: 0.1, 3: 0.95}),
        point(far=0.05): row({1: 0.8, 2: 0.7, 3: 0.8}),
        point(far=0.0125): row({1: 0.6, 2: 0.6, 3: 0.6}),
    }
    assert momentum.best(search) == [point(far=0.05)]
    assert momentum.trials_of(search)[0]["top1"] == [0.95, 0.1, 0.95]


def test_differences_leave_the_seeds_of_the_search_out() -> None:
    taus = {"hardsync": 0.0, "6-softsync, over tau": 5.5}
    rows = {
        point(condition, of): row(
            {1: 0.0, 2: 0.0, 3: 0.0}
            | {seed: 0.8 + 0.1 * (seed == 5) - of / 10 for seed in (4, 5, 6, 7)}
            | {8: 0.8 - of / 10 + 0.01 * (of > 0)},
            tau=taus.get(condition, 27.0),
        )
        for condition, (_, _, momenta) in momentum.CONDITIONS.items()
        for of in momenta
    }
    found = momentum.result({}, rows)["differences"]
    assert found["hardsync"]["nearest"] == 0.9
    assert found[ASYNCHRONOUS]["nearest"] == 0.0
    gain = found[ASYNCHRONOUS]["minus"]["0.9"]
    assert gain["mean"] == pytest.approx(9 - 1 / 5)
    assert gain["number"] == 5
    assert gain["low"] < gain["mean"] < gain["high"]

    rows[point(ASYNCHRONOUS, 0.9)].found[-1]["top1"] = 0.1
    found = momentum.result({}, rows)["differences"]
    assert list(found[ASYNCHRONOUS]["minus"]) == ["0.5"], "a cell with a failed run has none"


def test_what_warm_up_gains_is_held_against_what_it_gains_without_staleness() -> None:
    rows = {
        momentum.Point(condition, of, 0.05, length): row(
            {seed: 0.6 + 0.01 * (seed % 2) + gain for seed in range(1, momentum.SEEDS + 1)}
        )
        for condition in momentum.CONDITIONS
        for of in warmup.MOMENTA
        for length, gain in {0.0: 0.0, 1.0: 0.02 if condition == "hardsync" else 0.05}.items()
    }
    found = warmup.result({}, rows)["differences"]
    assert len(found) == 8 + 6
    assert found["hardsync, momentum 0.9"]["mean"] == pytest.approx(2)
    assert found[f"{ASYNCHRONOUS}, momentum 0"]["mean"] == pytest.approx(5)
    assert found[f"{ASYNCHRONOUS}, momentum 0, less hardsync's"]["mean"] == pytest.approx(3)

    rows[momentum.Point("hardsync", 0.0, 0.05, 0.0)].found[-1]["top1"] = 0.1
    found = warmup.result({}, rows)["differences"]
    assert len(found) == 7 + 3
    assert "hardsync, momentum 0" not in found
    assert f"{ASYNCHRONOUS}, momentum 0" in found


def test_an_arm_whose_seeds_are_not_all_there_has_no_difference() -> None:
    rows = {
        momentum.Point("hardsync", of, 0.05, length): row(dict.fromkeys(range(1, seeds + 1), 0.5))
        for of, length, seeds in ((0.0, 0.0, 8), (0.0, 1.0, 8), (0.9, 0.0, 8), (0.9, 1.0, 5))
    }
    assert list(warmup.result({}, rows)["differences"]) == ["hardsync, momentum 0"]


def test_warm_up_is_a_part_of_the_schedule_and_of_the_name() -> None:
    warm = momentum.Point(ASYNCHRONOUS, 0.9, 0.05, 1.0)
    assert momentum.recipe(warm)["set"]["schedule"]["warmup"] == {"epochs": 1.0}
    assert momentum.recipe(point())["set"]["schedule"]["warmup"] is None
    assert warm.recipe != warm._replace(warmup=0.0).recipe


@pytest.mark.parametrize("of", [0.0, 0.5, 0.9])
def test_the_stable_range_is_the_known_one_in_time_and_one_update_late(of: float) -> None:
    assert quadratic.largest_stable(0, of) == pytest.approx(2 * (1 + of))
    assert quadratic.largest_stable(1, of) == pytest.approx(1 - of)


@pytest.mark.parametrize("tau", [2, 6, 27])
def test_the_stable_range_without_momentum_is_that_of_a_delay(tau: int) -> None:
    """Levin and May 1976 (from memory): 2 sin(pi / (2 (2 tau + 1)))."""
    known = 2 * math.sin(math.pi / (2 * (2 * tau + 1)))
    assert quadratic.largest_stable(tau, 0.0) == pytest.approx(known)


@pytest.mark.parametrize(
    ("of", "factor"),
    [(0.9, math.sqrt(0.9)), (0.0, (quadratic.CONDITION - 1) / (quadratic.CONDITION + 1))],
)
def test_the_best_rate_in_time_is_polyaks(of: float, factor: float) -> None:
    found = quadratic.row(0, of)["updates"]
    assert found == pytest.approx(-1 / math.log(factor), rel=2e-3)


def test_the_document_has_the_computed_updates() -> None:
    page = (ROOT / "docs" / "studies" / "staleness.md").read_text(encoding="utf-8")
    for tau in (0, 6):
        cells = (f"{quadratic.row(tau, of)['updates']:,.0f}" for of in (-0.5, 0.0, 0.5, 0.9))
        assert f"| {tau} | {' | '.join(cells)} |" in page.replace("**", "")

"""The rates and the momentum of benchmarks/rate_drops.py, against updates written by hand."""

import sys
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import rate_drops

from largebatch.recipe.arithmetic.plan import make_plan

RATES = [0.4, 0.4, 0.4, 0.04, 0.04, 0.004]
MOMENTUM = 0.9


def gradient(step: int) -> float:
    return 1.0 + 0.3 * step


def trained(change: rate_drops.Change) -> float:
    """Return a weight after SGD with a change before each step."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = SGD([weight], lr=1.0, momentum=MOMENTUM)
    weights: list[torch.Tensor] = []
    with rate_drops.before_each_step(change, weights):
        for step, rate in enumerate(RATES):
            optimizer.param_groups[0]["lr"] = rate
            weight.grad = torch.full_like(weight, gradient(step))
            optimizer.step()
    assert weights[0] is weight
    return float(weight.detach())


def by_hand(*, corrected: bool) -> float:
    """Return a weight by Keras' momentum, which holds the rate: v = m v - rate g, w += v."""
    weight = velocity = 0.0
    for step, (rate, before) in enumerate(zip(RATES, [RATES[0], *RATES], strict=False)):
        momentum = MOMENTUM * (rate / before if corrected else 1.0)
        velocity = momentum * velocity - rate * gradient(step)
        weight += velocity
    return weight


def test_a_carried_rate_is_keras_momentum_and_horovods_correction_is_torchs() -> None:
    assert trained(rate_drops.carry) == pytest.approx(by_hand(corrected=False), rel=1e-12)
    assert trained(rate_drops.nothing) == pytest.approx(by_hand(corrected=True), rel=1e-12)
    assert abs(trained(rate_drops.carry)) > 1.3 * abs(trained(rate_drops.nothing))


@pytest.mark.parametrize(("epochs", "drops"), [(90, (10, 60)), (9, (1, 6))])
def test_the_rates_are_those_of_dell(epochs: int, drops: tuple[int, int]) -> None:
    recipe = rate_drops.recipe(epochs)
    plan = make_plan(recipe, workers=2)
    assert plan.steps == pytest.approx(epochs * 1437 / 96, abs=1)
    assert recipe.schedule.peak_lr == 0.4
    at = recipe.schedule.decay.at  # type: ignore[union-attr]
    assert [round(plan.steps_in(drop) * 96 / 1437) for drop in at] == list(drops)


def test_findings_say_which_curves_are_the_same_bits() -> None:
    cell = {
        "updates": 2, "refusal": "", "losses": "a", "weights": ["w", "w"],
        "curve": [{"epoch": 1.0, "top1": 0.5, "loss": 1.0}],
    }  # fmt: skip
    other = {**cell, "losses": "b", "weights": ["w", "v"]}
    other["curve"] = [{"epoch": 1.0, "top1": 0.25, "loss": 1.0}]
    late = {**cell, "refusal": "the weights of worker 1 differ"}
    found = {"one host": cell, "two hosts": dict(cell), "carried": other, "late": late}
    _, same, apart, refused = rate_drops.findings(found)
    assert "are the bits of one host; weights of its workers equal" in same
    assert "are NOT the bits of one host; weights of its workers DIFFERENT" in apart
    assert apart.endswith("at most 25.00% apart")
    assert refused == "late: ended after 2 updates: the weights of worker 1 differ"

"""The bounds that a range test suggests: quadratics, whose limits are known, and curves by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.special import spence
from short_runs import DIGITS

from largebatch import load_recipe
from largebatch.lab.measure.lr_range import (
    APART,
    Curve,
    RangeTest,
    bound,
    content,
    curve_of,
    describe,
    overshoot,
)
from largebatch.optim import LARS
from largebatch.report.run import FloatArray

SPECTRA = {
    "one": [1.0],
    "two": [1.0, 0.1],
    "many": np.geomspace(1e-4, 1, 30).tolist(),
}
FACTOR = 4.0
"""Without gradient noise the upper bound lies below the limit of stability by at most this; with
noise the loss of a quadratic, which then has a floor that rises with the rate, turns earlier."""


def losses_on_a_quadratic(
    rates: FloatArray, curvatures: list[float], *, momentum: float, nesterov: bool = False,
    noise: float = 0.0,
) -> FloatArray:  # fmt: skip
    """Return the losses of torch's SGD on sum(h w^2) / 2, with gradient noise."""
    h = torch.tensor(curvatures, dtype=torch.float64)
    weight = torch.nn.Parameter(torch.ones_like(h))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum, nesterov=nesterov)
    generator, losses = torch.Generator().manual_seed(0), []
    for rate in rates:
        losses.append(float((h * weight.detach() ** 2).sum() / 2))
        kick = torch.randn(h.shape, generator=generator, dtype=h.dtype)
        weight.grad = h * weight.detach() + noise * h.sqrt() * kick
        optimizer.param_groups[0]["lr"] = float(rate)
        optimizer.step()
    return np.array(losses)


def ranged(*curves: Curve, changes: tuple[str, ...] = ()) -> RangeTest:
    return RangeTest(load_recipe(DIGITS, changes), curves)


def sgd(momentum: float, *, nesterov: bool = False) -> tuple[str, ...]:
    words = f"kind: sgd, momentum: {momentum}, nesterov: {str(nesterov).lower()}"
    return (f"optimizer={{{words}}}",)


@pytest.mark.parametrize("spectrum", list(SPECTRA))
@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.9, False), (0.5, True), (0.9, True)]
)
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_the_upper_bound_lies_below_the_limit_of_stability_and_near_it(
    spectrum: str, momentum: float, nesterov: bool, noise: float
) -> None:
    """Gradient descent with momentum m on curvature 1 diverges at 2 (1 + m), Nesterov's at less."""
    limit = 2 * (1 + momentum) / (1 + 2 * momentum if nesterov else 1)
    rates = np.geomspace(1e-3, 100, 200 if noise else 100)
    losses = losses_on_a_quadratic(
        rates, SPECTRA[spectrum], momentum=momentum, nesterov=nesterov, noise=noise
    )
    test = ranged(curve_of(0, rates, losses), changes=sgd(momentum, nesterov=nesterov))
    found = test.bounds["upper"]
    assert found is not None
    assert found.value < limit
    assert noise or found.value > limit / FACTOR


@pytest.mark.parametrize("curvature", [1e-3, 1.0, 1e3])
def test_with_lars_the_limit_is_that_of_rate_times_eta_whatever_the_curvature(
    curvature: float,
) -> None:
    """The ratio eta |w| / |g| is eta / h on a round quadratic, so a step is lr eta w."""
    eta, rates = 0.02, np.geomspace(1e-3, 100, 100) / 0.02
    weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    optimizer = LARS([weight], lr=1.0, momentum=0.9, weight_decay=0.0, eta=eta)
    losses = []
    for rate in rates:
        losses.append(float(curvature * (weight.detach() ** 2).sum() / 2))
        weight.grad = curvature * weight.detach()
        optimizer.param_groups[0]["lr"] = float(rate)
        optimizer.step()
    test = ranged(curve_of(0, rates, np.array(losses)))
    upper = test.bounds["upper"]
    assert upper is not None
    assert 3.8 / eta / FACTOR < upper.value < 3.8 / eta


def test_the_overshoot_is_what_integrals_and_simulations_give() -> None:
    """Without momentum ln^2 k / 2 + Li2(1/k) = pi^2 / 3 at k times 1/h."""
    k = 2 * overshoot(0.0)
    assert math.log(k) ** 2 / 2 + spence(1 - 1 / k) == pytest.approx(math.pi**2 / 3, rel=2e-3)
    for momentum, nesterov, limit in ((0.5, False, 3.0), (0.9, False, 3.8), (0.5, True, 1.5)):
        rates = np.geomspace(1e-3, 1e2, 800)
        losses = losses_on_a_quadratic(rates, [1.0], momentum=momentum, nesterov=nesterov)
        back = rates[np.flatnonzero((losses > losses[0]) & (rates > limit))[0]]
        assert back / limit == pytest.approx(overshoot(momentum, nesterov=nesterov), rel=0.1)


def sigmoid(rates: FloatArray, *, center: float, fall: float, wall: float) -> FloatArray:
    """Return losses that fall along a sigmoid of the decades of the rate, and explode at a wall."""
    decades = np.log10(rates / center)
    losses: FloatArray = 2.3 - fall / (1 + np.exp(-4 * decades))
    return losses + np.minimum((rates / wall) ** 4, 1e9)


def test_the_bounds_of_a_smooth_curve_are_where_it_has_them() -> None:
    """A sigmoid has fallen by a tenth at ln(1/9) of its width."""
    rates = np.geomspace(1e-4, 10, 251)
    losses = sigmoid(rates, center=0.01, fall=1.0, wall=5.0)
    curve = curve_of(0, rates, losses)
    whole = 2.3 - losses.min()
    tenth = rates[np.flatnonzero(losses < 2.3 - 0.1 * whole)[0]]
    assert curve.lower == pytest.approx(tenth, rel=0.15)
    assert curve.turn == pytest.approx(rates[losses.argmin()], rel=0.15)
    assert curve.rises


def noisy(rates: FloatArray, seed: int, **shape: float) -> Curve:
    noise = np.random.default_rng(seed).normal(0, 0.05, len(rates))
    return curve_of(seed, rates, sigmoid(rates, **shape) + noise)


def test_noise_alone_is_hardly_ever_taken_for_a_fall() -> None:
    rates = np.geomspace(1e-4, 10, 100)
    flat = {"center": 1.0, "fall": 0.0, "wall": 1e6}
    assert sum(noisy(rates, seed, **flat).lower is not None for seed in range(100)) <= 3
    test = ranged(noisy(rates, 1, **flat), noisy(rates, 2, **flat))
    assert (test.bounds["lower"], test.bounds["upper"]) == (None, None)
    assert "2 of 2 seeds" in next(describe(test))


def test_a_side_beyond_the_range_names_the_option_that_widens_it() -> None:
    falling = np.geomspace(1e-4, 0.02, 60)
    test = ranged(curve_of(0, falling, sigmoid(falling, center=0.01, fall=1, wall=5)))
    text = " ".join(describe(test))
    assert test.bounds["lower"] is not None
    assert test.bounds["upper"] is None
    assert "--high" in text
    rising = np.geomspace(1, 100, 60)
    test = ranged(curve_of(0, rising, sigmoid(rising, center=0.01, fall=0, wall=5)))
    assert "--low" in next(describe(test))
    at_once = np.where(rising < 1.3, 2.3, math.nan)
    assert "--low" in next(describe(ranged(curve_of(0, rising, at_once))))


def test_losses_that_are_no_numbers_are_a_wall_and_not_an_error() -> None:
    rates = np.geomspace(1e-4, 10, 100)
    losses = sigmoid(rates, center=0.01, fall=1, wall=1e9)
    losses[70:] = math.nan
    curve = curve_of(0, rates, losses)
    assert curve.diverged == rates[70]
    assert curve.rises
    assert curve.turn is not None
    assert rates[55] < curve.turn < rates[70]


def test_seeds_that_disagree_are_named_and_their_interval_is_kept() -> None:
    rates = np.geomspace(1e-4, 10, 100)
    curves = [
        curve_of(seed, rates, sigmoid(rates, center=center, fall=1, wall=5))
        for seed, center in enumerate((0.003, 0.01, 0.03))
    ]
    test = ranged(*curves)
    lower = test.bounds["lower"]
    assert lower is not None
    assert lower.high / lower.low > APART
    assert lower.low < lower.value < lower.high
    assert bound([0.003, 0.01, 0.03]).value == pytest.approx(0.0096549, rel=1e-4)  # type: ignore[union-attr]
    assert "lower: seeds differ" in " ".join(describe(test))
    assert content(test)["lower"]["low"] == lower.low

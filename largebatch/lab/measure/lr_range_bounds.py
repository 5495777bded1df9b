"""Bounds on the learning rate from the losses of a range test, with figures and reasons.

The rate rises exponentially, so that steps are evenly spaced in its logarithm. Losses are smoothed
by a straight line fitted around every step with tricube weights (Cleveland 1979). Unlike the
exponential moving average of other finders it does not lag behind the rate.

A test passes every rate within a few steps. So the loss turns only after the stability limit:
whatever shrank at lower rates must grow back first. On a quadratic without gradient noise this
takes until the rate is `overshoot` times the limit, for any number of steps; with noise and
smoothing, less. So the limit lies between the rate where the loss turns and that rate over
`overshoot`, and the upper bound is their geometric mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from largebatch.recipe.optimizers import LAMB, SGD, AdamW
from largebatch.recipe.recipe import Recipe
from largebatch.report.run import FloatArray

WINDOW = 1 / 12
"""Fraction of the steps on each side of a step that its line is fitted to."""

CLEAR = 0.1
"""Fraction of the total fall from which the loss counts as falling."""

NOISE = 3.0
"""Number of standard errors of the smoothed loss that exceeds noise."""

WALL = 1.5
"""Upper limit on losses, as a multiple of the first losses; also replaces NaN."""

APART = 2.0
"""Ratio between seeds' bounds from which the bound is badly determined."""


@dataclass(frozen=True)
class Curve:
    """One range test: the rate and training loss of every update, for one seed."""

    seed: int
    rates: FloatArray
    losses: FloatArray
    """Training losses; NaN from the first loss that is not finite."""

    @property
    def diverged(self) -> float | None:
        """Rate at the first loss that is not finite; None if all are finite."""
        bad = np.flatnonzero(~np.isfinite(self.losses))
        return float(self.rates[bad[0]]) if bad.size else None

    @property
    def _edge(self) -> int:
        """Number of steps that count as the start."""
        return max(3, round(WINDOW * len(self.rates)))

    @cached_property
    def _cut(self) -> FloatArray:
        wall = WALL * float(np.nanmedian(self.losses[: self._edge]))
        return np.minimum(np.where(np.isfinite(self.losses), self.losses, wall), wall)

    @cached_property
    def smooth(self) -> FloatArray:
        """Smoothed loss."""
        return self._fits[0]

    @cached_property
    def slope(self) -> FloatArray:
        """Slope of the smoothed loss per step."""
        return self._fits[1]

    @cached_property
    def _fits(self) -> tuple[FloatArray, FloatArray]:
        losses, reach = self._cut, self._edge
        away = np.arange(-reach, reach + 1)
        near = np.arange(len(losses))[:, np.newaxis] + away
        inside = (near >= 0) & (near < len(losses))
        weights = _tricube(reach) * inside
        values = losses[near.clip(0, len(losses) - 1)]
        w, wx, wxx = (np.sum(weights * away**power, axis=1) for power in (0, 1, 2))
        wy, wxy = (np.sum(weights * away**power * values, axis=1) for power in (0, 1))
        spread = w * wxx - wx**2
        return (wxx * wy - wx * wxy) / spread, (w * wxy - wx * wy) / spread

    @property
    def _whole(self) -> slice:
        """Steps whose line is fitted on both sides; the others are much less certain."""
        return slice(self._edge, len(self.rates) - self._edge)

    @cached_property
    def place(self) -> int:
        """Step of the lowest smoothed loss."""
        return self._edge + int(np.argmin(self.smooth[self._whole]))

    @property
    def start(self) -> float:
        """Loss before it falls."""
        return float(self.smooth[self._edge])

    @property
    def error(self) -> float:
        """Standard error of the smoothed loss, from the residuals while it falls."""
        falling = slice(0, max(self.place, 2 * self._edge))
        weights = _tricube(self._edge)
        weights /= weights.sum()
        squares, own = float((weights**2).sum()), float(weights.max())
        spread = float(np.sqrt(np.mean((self._cut - self.smooth)[falling] ** 2)))
        return spread * math.sqrt(squares / (1 - 2 * own + squares))

    @property
    def fall(self) -> float:
        """Total fall of the smoothed loss."""
        return self.start - float(self.smooth[self.place])

    @property
    def falls(self) -> bool:
        """True if the loss falls by more than noise."""
        return self.fall > 2 * NOISE * self.error

    @property
    def clear(self) -> float:
        """Smallest change of the smoothed loss that counts."""
        return max(CLEAR * self.fall, NOISE * self.error)

    @property
    def falls_at_once(self) -> bool:
        """True if the loss falls already at the start."""
        return self.falls and float(self.smooth[0]) - self.start > self.clear

    @property
    def rises(self) -> bool:
        """True if the loss rises again, as clearly as it fell."""
        return bool(self.smooth[self.place :].max() > self.smooth[self.place] + self.clear)

    @property
    def lower(self) -> float | None:
        """First rate at which the loss is clearly below its start; None if it never falls."""
        if not self.falls:
            return None
        above = np.flatnonzero(self.smooth[: self.place + 1] > self.start - self.clear)
        return float(self.rates[above[-1] + 1 if above.size else 0])

    @property
    def steepest(self) -> float | None:
        """Rate at which the loss falls fastest; None if it never falls."""
        if not self.falls:
            return None
        return float(self.rates[int(np.argmin(self.slope[: self.place + 1]))])

    @property
    def turn(self) -> float | None:
        """Rate of the lowest smoothed loss; None if it never falls or does not rise again."""
        return float(self.rates[self.place]) if self.falls and self.rises else None


def _tricube(reach: int) -> FloatArray:
    """Return the tricube weights of some neighbours on each side."""
    away = np.abs(np.arange(-reach, reach + 1)) / (reach + 1)
    return np.asarray((1 - away**3) ** 3, dtype=np.float64)


def momentum_of(recipe: Recipe) -> float:
    """Return the momentum of a recipe's optimizer; for LAMB and AdamW, beta1."""
    optimizer = recipe.optimizer
    return optimizer.beta1 if isinstance(optimizer, LAMB | AdamW) else optimizer.momentum


def overshoot(momentum: float, *, nesterov: bool = False) -> float:
    """Return how far beyond the stability limit the loss of a range test may still fall.

    On a quadratic, gradient descent with momentum m at rate r multiplies a direction of
    curvature h in every step by the larger root of z^2 - (1 + m - r h) z + m = 0 (Polyak 1964);
    what shrank at rates below the limit has grown back at this multiple of the limit.

    >>> [round(overshoot(momentum), 1) for momentum in (0.0, 0.5, 0.9)]
    [6.3, 3.2, 1.6]
    """
    rates = np.geomspace(1e-5, 1e3, 200_001)
    limit = 2 * (1 + momentum) / (1 + 2 * momentum if nesterov else 1)
    shrink = 1 - rates if nesterov else np.ones_like(rates)
    middle = (1 + momentum) * shrink if nesterov else 1 + momentum - rates
    root = np.sqrt((middle**2 - 4 * momentum * shrink).astype(complex))
    largest = np.maximum(np.abs(middle + root), np.abs(middle - root)) / 2
    grown = np.cumsum(np.log(np.maximum(largest, 1e-12)))
    back = rates[(grown > 0) & (rates > limit)]
    return float(back[0] / limit)


@dataclass(frozen=True, slots=True)
class Bound:
    """A rate over several seeds: geometric mean, lowest and highest."""

    value: float
    low: float
    high: float

    @property
    def certain(self) -> bool:
        """True if the seeds agree."""
        return self.high <= APART * self.low

    def over(self, factor: float) -> "Bound":
        """Return the rate divided by a factor."""
        return Bound(self.value / factor, self.low / factor, self.high / factor)


def bound(rates: Sequence[float | None]) -> Bound | None:
    """Combine the rates of several seeds; None if one of them has none.

    >>> bound([1.0, 4.0]), bound([1.0, None])
    (Bound(value=2.0, low=1.0, high=4.0), None)
    """
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return None
    return Bound(math.exp(math.fsum(map(math.log, known)) / len(known)), min(known), max(known))


@dataclass(frozen=True)
class RangeTest:
    """Range test of a recipe over one or more seeds."""

    recipe: Recipe
    curves: tuple[Curve, ...]

    @cached_property
    def overshoot(self) -> float:
        """Largest ratio of the rate where the loss turns to the limit, by the momentum."""
        optimizer = self.recipe.optimizer
        nesterov = isinstance(optimizer, SGD) and optimizer.nesterov
        return overshoot(momentum_of(self.recipe), nesterov=nesterov)

    @property
    def low(self) -> float:
        """First rate."""
        return float(self.curves[0].rates[0])

    @property
    def high(self) -> float:
        """Last rate."""
        return float(self.curves[0].rates[-1])

    @property
    def lower(self) -> Bound | None:
        """Rate at which the loss starts to fall."""
        return bound([curve.lower for curve in self.curves])

    @property
    def steepest(self) -> Bound | None:
        """Rate at which the loss falls fastest."""
        return bound([curve.steepest for curve in self.curves])

    @property
    def turn(self) -> Bound | None:
        """Rate at which the loss is lowest and turns."""
        return bound([curve.turn for curve in self.curves])

    @property
    def upper(self) -> Bound | None:
        """Upper bound: the geometric mean of `turn` and `turn / overshoot`."""
        return None if self.turn is None else self.turn.over(math.sqrt(self.overshoot))

    @property
    def peak_is(self) -> Literal["below", "inside", "above"] | None:
        """Position of the recipe's peak_lr; None if the bound on its side is unknown."""
        peak, lower, upper = self.recipe.schedule.peak_lr, self.lower, self.upper
        if lower is not None and peak < lower.value:
            return "below"
        if upper is not None and peak > upper.value:
            return "above"
        return "inside" if lower is not None and upper is not None else None

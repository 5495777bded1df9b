"""The gradient noise scale B = tr(Sigma) / |G|^2 from squared gradient lengths at two batch sizes.

McCandlish et al. 2018, arXiv:1812.06162, section 2.2 and appendix A.1: G is the gradient of the
whole training loss, Sigma the covariance of one sample's. A mean gradient over b samples has the
expected squared length |G|^2 + tr(Sigma) / b, so two batch sizes tell the two terms apart, without
bias. Their ratio is that of means over updates, since single updates are far too noisy.

Where samples share BatchNorm statistics, Sigma is that of a span's mean gradient times the span.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

from largebatch.recipe.arithmetic.plan import Plan

CONFIDENCE = 0.95

NOISE_UPDATES = 100  # in the running mean of a run; single updates are far too noisy


class Squares(NamedTuple):
    """Squared lengths of one update's mean gradients, and their numbers of samples."""

    small: float
    big: float
    small_batch: int
    big_batch: int


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """Estimate over some updates, in samples."""

    value: float
    """tr(Sigma) / |G|^2: NaN if the estimate of |G|^2 is not above 0, 0 if that of tr(Sigma) is
    not."""

    low: float
    high: float
    """Ends of the 95 % interval; infinite if |G|^2 may be 0."""

    noise: float
    """tr(Sigma): the summed variances of one sample's gradient."""

    signal: float
    """|G|^2."""

    updates: int


def estimate(squares: Sequence[Squares]) -> NoiseScale:
    """Estimate the noise scale over updates.

    The interval is Fieller's for a ratio of means (J. R. Stat. Soc. B 16, 1954): exact for normal
    terms, and unbounded where the denominator does not differ from 0.

    Raises ValueError unless each big batch is above its small one, and for fewer than 2 updates.
    """
    if len(squares) < 2:
        raise ValueError(f"an interval needs 2 updates or more, got {len(squares)}")
    noise, signal = zip(*map(_split, squares), strict=True)
    low, high = fieller(noise, signal)
    return NoiseScale(
        value=ratio(squares),
        low=max(0.0, low),
        high=max(0.0, high),
        noise=math.fsum(noise) / len(noise),
        signal=math.fsum(signal) / len(signal),
        updates=len(squares),
    )


def ratio(squares: Iterable[Squares]) -> float:
    """Estimate the noise scale without its interval, which is cheap enough for every update."""
    noise, signal = map(math.fsum, zip(*map(_split, squares), strict=True))
    return max(0.0, noise / signal) if signal > 0 else math.nan


def _split(squares: Squares) -> tuple[float, float]:
    """Return unbiased estimates of tr(Sigma) and |G|^2 from one update (appendix A.1)."""
    # Two expectations, |G|^2 + tr(Sigma) / few and |G|^2 + tr(Sigma) / many, solved for the two
    # terms.
    small, big, few, many = squares
    if not 0 < few < many:
        raise ValueError(f"big_batch ({many}) must be above small_batch ({few}), and that above 0")
    return (small - big) / (1 / few - 1 / many), (many * big - few * small) / (many - few)


def fieller(tops: Sequence[float], bottoms: Sequence[float]) -> tuple[float, float]:
    """Return the interval of mean(tops) / mean(bottoms) for pairs; infinite if it is unbounded.

    It holds the ratios r for which mean(tops - r bottoms) does not differ from 0 by Student's t.
    """
    number = len(tops)
    top = math.fsum(tops) / number
    bottom = math.fsum(bottoms) / number
    scale = _student(number - 1) ** 2 / (number * (number - 1))
    across = math.fsum((a - top) * (b - bottom) for a, b in zip(tops, bottoms, strict=True))
    # The ends are the roots of a r^2 - 2 b r + c in the ratio r. Unless a > 0 the denominator may
    # be 0, and no ratio can be excluded at one end.
    a = bottom**2 - scale * math.fsum((value - bottom) ** 2 for value in bottoms)
    b = top * bottom - scale * across
    c = top**2 - scale * math.fsum((value - top) ** 2 for value in tops)
    if a <= 0 or bottom <= 0:
        return 0.0, math.inf
    root = math.sqrt(max(0.0, b * b - a * c))
    return (b - root) / a, (b + root) / a


def _student(freedom: int) -> float:
    """Return the half-width of the interval by Student's t, in standard errors.

    Abramowitz and Stegun 1964, 26.7.5: below 0.1 % off from 8 degrees of freedom on.
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


class RunningNoise:
    """The squared lengths of mean gradients, and the noise scale of the last updates."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._recent: deque[Squares] = deque(maxlen=NOISE_UPDATES)

    def add(self, step: int, first: float, whole: float, *, loss_scale: float) -> dict[str, Any]:
        """Return the noise fields of a step's record, from the squares of an update.

        `first` and `whole` are the reducers' measurements, summed over the workers, for gradients
        of loss_scale x loss / global_batch.
        """
        plan = self._plan
        global_batch = plan.batch_at(step)
        # The gradients are of a loss that is divided by the global batch: those of one device batch
        # are made means of its own samples.
        share = global_batch / plan.device_batch
        squares = Squares(
            small=first / plan.workers * (share / loss_scale) ** 2,
            big=whole / plan.workers / loss_scale**2,
            small_batch=plan.device_batch,
            big_batch=global_batch,
        )
        # An update that was skipped would make every mean after it NaN.
        if all(map(math.isfinite, squares)):
            self._recent.append(squares)
        value = ratio(self._recent) if len(self._recent) > 1 else math.nan
        fields = {"device_square": squares.small, "global_square": squares.big}
        return {**fields, "noise_scale": value}

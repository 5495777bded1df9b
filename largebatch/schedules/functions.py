"""Learning-rate schedules: pure functions from the step number to a rate.

A schedule holds no state: a run resumes from its step alone, and a schedule can be plotted, tested
and composed without an optimizer. Steps count optimizer updates
from 0; `rate(step)` is the rate used *for* that update.

>>> rate = warmup(polynomial(peak=8.0, steps=4, power=2.0), steps=2)
>>> [rate(step) for step in range(7)]
[0.0, 4.0, 8.0, 4.5, 2.0, 0.5, 0.0]

The policies of LRBench (Wu et al. 2019, arXiv:1908.06477) that fall once are here, and those that
rise again in `cycles`, each with the short name of the paper or its code in capitals. `peak` and
`low` are the larger and the smaller of its k0 and k1, `steps` is its l. `cosine`, a single fall,
`spline`, `warmup`, `skip` and `piecewise` are not from LRBench.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Sequence

from largebatch.schedules.bounds import (
    between,
    half_cosine,
    require_above_zero,
    require_fraction,
    require_increasing,
    require_not_negative,
    require_order,
    require_positive,
    require_rates,
)

Schedule = Callable[[int], float]
"""Function from the number of an update to its rate."""

Policy = Callable[[float], float]
"""A Schedule that is also defined between two updates: a batch schedule counts samples."""


def constant(*, peak: float) -> Policy:
    """Stay at `peak` (FIX).

    >>> constant(peak=0.1)(7)
    0.1
    """
    require_rates(peak=peak)
    return lambda _: peak


def step(*, peak: float, steps: int, gamma: float) -> Policy:
    """Start at `peak` and multiply the rate by `gamma` after every `steps` steps (STEP).

    >>> rate = step(peak=1.0, steps=3, gamma=0.5)
    >>> [rate(step) for step in (0, 2, 3, 4, 5, 6)]
    [1.0, 1.0, 0.5, 0.5, 0.5, 0.25]
    """
    require_rates(peak=peak)
    require_positive(steps)
    require_fraction(gamma)
    return lambda step: peak * gamma ** (step // steps)


def multistep(*, peak: float, boundaries: Sequence[int], gamma: float) -> Policy:
    """Start at `peak` and multiply the rate by `gamma` at every boundary, in steps (NSTEP).

    >>> rate = multistep(peak=1.0, boundaries=[2, 4], gamma=0.5)
    >>> [rate(step) for step in range(6)]
    [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    require_rates(peak=peak)
    require_increasing(boundaries)
    require_fraction(gamma)
    return lambda step: peak * gamma ** bisect.bisect_right(boundaries, step)


def exponential(*, peak: float, gamma: float) -> Policy:
    """Start at `peak` and multiply the rate by `gamma` at every step (EXP).

    >>> rate = exponential(peak=8.0, gamma=0.5)
    >>> [rate(step) for step in range(4)]
    [8.0, 4.0, 2.0, 1.0]
    """
    require_rates(peak=peak)
    require_fraction(gamma)
    return lambda step: peak * gamma**step


def exponential_rise(*, peak: float, gamma: float, steps: int) -> Policy:
    """Divide the rate by `gamma` at every step, up to `peak` at `steps`, and stay there.

    >>> rate = exponential_rise(peak=8.0, gamma=0.5, steps=3)
    >>> [rate(step) for step in range(5)]
    [1.0, 2.0, 4.0, 8.0, 8.0]
    """
    require_rates(peak=peak)
    require_fraction(gamma)
    require_not_negative(steps)
    return lambda step: peak * gamma ** max(0.0, steps - step)


def inverse(*, peak: float, gamma: float, power: float) -> Policy:
    """Fall from `peak` along (1 + gamma t)**-power (INV).

    >>> rate = inverse(peak=4.0, gamma=1.0, power=2.0)
    >>> [rate(step) for step in (0, 1, 3)]
    [4.0, 1.0, 0.25]
    """
    require_rates(peak=peak)
    require_above_zero(gamma=gamma, power=power)
    return lambda step: peak * (1.0 + gamma * step) ** -power


def polynomial(*, peak: float, steps: int, power: float, end: float = 0.0) -> Policy:
    """Fall from `peak` at step 0 to `end` at `steps` along (1 - t)**power, then stay there (POLY).

    >>> rate = polynomial(peak=8.0, steps=4, power=2.0)
    >>> [rate(step) for step in (0, 1, 3, 4, 5, 9)]
    [8.0, 4.5, 0.5, 0.0, 0.0, 0.0]
    """
    require_positive(steps)
    require_above_zero(power=power)
    require_order(end, peak)

    def rate(step: float) -> float:
        remaining = 1.0 - min(step, steps) / steps
        return between(end, peak, math.pow(remaining, power))

    return rate


def cosine(*, peak: float, steps: int, end: float = 0.0) -> Policy:
    """Fall from `peak` at step 0 to `end` at `steps` along half a cosine, then stay at `end`.

    Loshchilov and Hutter 2017 (arXiv:1608.03983, equation 5), without restarts.

    >>> rate = cosine(peak=2.0, steps=4)
    >>> [round(rate(step), 12) for step in (0, 2, 4, 9)]
    [2.0, 1.0, 0.0, 0.0]
    """
    require_positive(steps)
    require_order(end, peak)
    return lambda step: between(end, peak, half_cosine(min(step, steps) / steps))


def sigmoid(*, peak: float, steps: int, gamma: float) -> Policy:
    """Fall from almost `peak` along 1 / (1 + exp(gamma (t - l))): half of it at `steps` (SIG).

    Caffe and LRBench's code write the same with a negative gamma; with a positive one it rises.

    >>> rate = sigmoid(peak=8.0, steps=100, gamma=0.1)
    >>> [round(rate(step), 2) for step in (0, 50, 100, 150, 200)]
    [8.0, 7.95, 4.0, 0.05, 0.0]
    """
    require_rates(peak=peak)
    require_positive(steps)
    require_above_zero(gamma=gamma)

    def rate(step: float) -> float:
        height = math.exp(-gamma * abs(step - steps))  # at most 1: it cannot overflow
        return peak * (height if step > steps else 1.0) / (1.0 + height)

    return rate


def spline(
    *, peak: float, steps: int, points: Sequence[tuple[float, float]], end: float = 0.0
) -> Policy:
    """Fall from `peak` at step 0 through two points to `end` at `steps`, then stay there.

    A point is a share of the steps and a share of `peak`; between points the rate is the monotone
    cubic of Fritsch and Butland (SciPy's PchipInterpolator). This is the two-point spline of
    arXiv:2603.10301.

    >>> rate = spline(peak=8.0, steps=8, points=[(0.25, 0.75), (0.5, 0.25)])
    >>> [rate(step) for step in (0, 2, 4, 8, 9)]
    [8.0, 6.0, 2.0, 0.0, 0.0]
    """
    require_positive(steps)
    require_order(end, peak)
    places = [0.0, *(place * steps for place, _ in points), float(steps)]
    rates = [peak, *(share * peak for _, share in points), end]
    falls = all(later <= earlier for earlier, later in itertools.pairwise(rates))
    if not falls or not all(earlier < later for earlier, later in itertools.pairwise(places)):
        raise ValueError(
            f"points must be between 0 and 1, in increasing order, and fall from the peak to the "
            f"end, got {list(points)}"
        )
    curve = _pchip(places, rates)
    return lambda step: min(peak, max(end, curve(step))) if step < steps else end


def _pchip(xs: Sequence[float], ys: Sequence[float]) -> Policy:
    """Interpolate by cubics without overshoot (Fritsch and Butland 1984, doi 10.1137/0905021)."""
    widths = [b - a for a, b in itertools.pairwise(xs)]
    slopes = [(b - a) / width for (a, b), width in zip(itertools.pairwise(ys), widths, strict=True)]

    def at_end(width: float, following: float, slope: float, next_slope: float) -> float:
        found = ((2 * width + following) * slope - width * next_slope) / (width + following)
        if found * slope <= 0:
            return 0.0
        return 3 * slope if slope * next_slope <= 0 and abs(found) > 3 * abs(slope) else found

    if len(slopes) == 1:
        tangents = [slopes[0], slopes[0]]
    else:
        tangents = [at_end(*widths[:2], *slopes[:2])]
        for (before, after), (m, n) in zip(
            itertools.pairwise(widths), itertools.pairwise(slopes), strict=True
        ):
            first, second = 2 * after + before, after + 2 * before
            tangents.append((first + second) / (first / m + second / n) if m * n > 0 else 0.0)
        tangents.append(at_end(widths[-1], widths[-2], slopes[-1], slopes[-2]))

    def curve(x: float) -> float:
        k = min(max(bisect.bisect_right(xs, x) - 1, 0), len(widths) - 1)
        width, slope, past = widths[k], slopes[k], x - xs[k]
        first, last = tangents[k], tangents[k + 1]
        square, cube = (3 * slope - 2 * first - last) / width, (first + last - 2 * slope) / width**2
        return ys[k] + past * (first + past * (square + past * cube))

    return curve


def piecewise(pieces: Sequence[Policy], *, boundaries: Sequence[int]) -> Policy:
    """Follow the pieces in turn; each begins at a boundary and counts from there.

    >>> rate = piecewise([constant(peak=4.0), exponential(peak=2.0, gamma=0.5)], boundaries=[3])
    >>> [rate(step) for step in (0, 2, 3, 4)]
    [4.0, 4.0, 2.0, 1.0]
    """
    require_increasing(boundaries)
    if len(pieces) != len(boundaries) + 1:
        raise ValueError(
            f"{len(pieces)} pieces need {len(pieces) - 1} boundaries, got {list(boundaries)}"
        )
    starts = [0, *boundaries]

    def rate(step: float) -> float:
        place = bisect.bisect_right(boundaries, step)
        return pieces[place](step - starts[place])

    return rate


def warmup(after: Policy, *, steps: int, start: float = 0.0) -> Policy:
    """Rise linearly from `start` to `after(0)` over `steps` steps, then follow `after`.

    The gradual warm-up of Goyal et al. 2017 (arXiv:1706.02677, section 2.2). Step 0 of
    `after` is the first step after the warm-up. With no steps there is no warm-up.

    >>> rate = warmup(constant(peak=4.0), steps=2, start=1.0)
    >>> [rate(step) for step in range(4)]
    [1.0, 2.5, 4.0, 4.0]
    """
    require_not_negative(steps)
    require_rates(start=start)
    if steps and start > after(0):
        raise ValueError(
            f"start ({start:g}) must not exceed the rate that the warm-up rises to ({after(0):g})"
        )

    def rate(step: float) -> float:
        if step >= steps:
            return after(step - steps)
        return start + (after(0) - start) * step / steps

    return rate


def skip(schedule: Policy, *, steps: int) -> Policy:
    """Follow `schedule` from its step `steps` on: the first update uses `schedule(steps)`.

    MLPerf's reference counts its updates from 1, so its first rate is that of step 1.

    >>> rate = skip(warmup(constant(peak=4.0), steps=2), steps=1)
    >>> [rate(step) for step in range(3)]
    [2.0, 4.0, 4.0]
    """
    require_not_negative(steps)
    return lambda step: schedule(step + steps)

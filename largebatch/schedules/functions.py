"""Learning-rate schedules: pure functions from the step number to a rate.

Steps count optimizer updates from 0; `rate(step)` is the rate used *for* that update.

>>> rate = warmup(polynomial(peak=8.0, steps=4, power=2.0), steps=2)
>>> [rate(step) for step in range(7)]
[0.0, 4.0, 8.0, 4.5, 2.0, 0.5, 0.0]

The thirteen policies of LRBench (Wu et al. 2019, arXiv:1908.06477) have its short names in
capitals; `peak` and `low` are the larger and the smaller of its k0 and k1, `steps` is its l.
Functions raise ValueError for arguments that are not a rate, a length or a factor.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Sequence

Schedule = Callable[[int], float]
"""Function from the number of an update to its rate."""

Policy = Callable[[float], float]
"""A Schedule that is also defined between two updates: a batch schedule counts samples."""


def constant(*, peak: float) -> Policy:
    """Stay at `peak` (FIX).

    >>> constant(peak=0.1)(7)
    0.1
    """
    _require("rate", peak=peak)
    return lambda _: peak


def step(*, peak: float, steps: int, gamma: float) -> Policy:
    """Start at `peak` and multiply the rate by `gamma` after every `steps` steps (STEP).

    >>> rate = step(peak=1.0, steps=3, gamma=0.5)
    >>> [rate(step) for step in (0, 2, 3, 4, 5, 6)]
    [1.0, 1.0, 0.5, 0.5, 0.5, 0.25]
    """
    _require("rate", peak=peak)
    _require("length", steps=steps)
    _require("fraction", gamma=gamma)
    return lambda step: peak * gamma ** (step // steps)


def multistep(*, peak: float, boundaries: Sequence[int], gamma: float) -> Policy:
    """Start at `peak` and multiply the rate by `gamma` at every boundary, in steps (NSTEP).

    >>> rate = multistep(peak=1.0, boundaries=[2, 4], gamma=0.5)
    >>> [rate(step) for step in range(6)]
    [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    _require("rate", peak=peak)
    _require_increasing(boundaries)
    _require("fraction", gamma=gamma)
    return lambda step: peak * gamma ** bisect.bisect_right(boundaries, step)


def exponential(*, peak: float, gamma: float) -> Policy:
    """Start at `peak` and multiply the rate by `gamma` at every step (EXP).

    >>> rate = exponential(peak=8.0, gamma=0.5)
    >>> [rate(step) for step in range(4)]
    [8.0, 4.0, 2.0, 1.0]
    """
    _require("rate", peak=peak)
    _require("fraction", gamma=gamma)
    return lambda step: peak * gamma**step


def exponential_rise(*, peak: float, gamma: float, steps: int) -> Policy:
    """Divide the rate by `gamma` at every step, up to `peak` at `steps`, and stay there.

    >>> rate = exponential_rise(peak=8.0, gamma=0.5, steps=3)
    >>> [rate(step) for step in range(5)]
    [1.0, 2.0, 4.0, 8.0, 8.0]
    """
    _require("rate", peak=peak)
    _require("fraction", gamma=gamma)
    _require("count", steps=steps)
    return lambda step: peak * gamma ** max(0.0, steps - step)


def inverse(*, peak: float, gamma: float, power: float) -> Policy:
    """Fall from `peak` along (1 + gamma t)**-power (INV).

    >>> rate = inverse(peak=4.0, gamma=1.0, power=2.0)
    >>> [rate(step) for step in (0, 1, 3)]
    [4.0, 1.0, 0.25]
    """
    _require("rate", peak=peak)
    _require("positive", gamma=gamma, power=power)
    return lambda step: peak * (1.0 + gamma * step) ** -power


def polynomial(*, peak: float, steps: int, power: float, end: float = 0.0) -> Policy:
    """Fall from `peak` at step 0 to `end` at `steps` along (1 - t)**power, then stay there (POLY).

    >>> rate = polynomial(peak=8.0, steps=4, power=2.0)
    >>> [rate(step) for step in (0, 1, 3, 4, 5, 9)]
    [8.0, 4.5, 0.5, 0.0, 0.0, 0.0]
    """
    _require("length", steps=steps)
    _require("positive", power=power)
    _require_order(end, peak)

    def rate(step: float) -> float:
        remaining = 1.0 - min(step, steps) / steps
        return _between(end, peak, math.pow(remaining, power))

    return rate


def cosine(*, peak: float, steps: int, end: float = 0.0) -> Policy:
    """Fall from `peak` at step 0 to `end` at `steps` along half a cosine, then stay at `end`.

    Loshchilov and Hutter 2017 (arXiv:1608.03983, equation 5); `piecewise` gives its restarts.

    >>> rate = cosine(peak=2.0, steps=4)
    >>> [round(rate(step), 12) for step in (0, 2, 4, 9)]
    [2.0, 1.0, 0.0, 0.0]
    """
    _require("length", steps=steps)
    _require_order(end, peak)

    def rate(step: float) -> float:
        phase = min(step, steps) / steps
        return _between(end, peak, (1.0 + math.cos(math.pi * phase)) / 2.0)

    return rate


def triangular(
    *, peak: float, low: float, steps: int, factor: float = 1.0, gamma: float = 1.0
) -> Policy:
    """Rise from `low` to `peak` in `steps` steps and fall back in as many, repeatedly (TRI).

    The height above `low` is multiplied by `factor` in every new cycle (0.5: TRI2) and by `gamma`
    at every step (TRIEXP). The triangle is the paper's (2 / pi) |arcsin(sin(pi t / 2l))|, computed
    from the remainder of t by 2l, so it is exact at every multiple of l.

    >>> rate = triangular(peak=3.0, low=1.0, steps=4)
    >>> [rate(step) for step in (0, 1, 3, 4, 5, 7, 8, 9, 12)]
    [1.0, 1.5, 2.5, 3.0, 2.5, 1.5, 1.0, 1.5, 3.0]
    >>> rate = triangular(peak=5.0, low=1.0, steps=2, gamma=0.5)
    >>> [rate(step) for step in range(7)]
    [1.0, 2.0, 2.0, 1.25, 1.0, 1.0625, 1.0625]
    """
    _require("length", steps=steps)
    return _cycles(
        lambda phase: min(phase, 2.0 - phase),
        peak=peak, low=low, steps=steps, factor=factor, gamma=gamma,
    )  # fmt: skip


def sine(*, peak: float, low: float, steps: int, factor: float = 1.0, gamma: float = 1.0) -> Policy:
    """Rise and fall as `triangular` does, along |sin(pi t / 2l)| (SIN, SIN2, SINEXP).

    >>> rate = sine(peak=5.0, low=1.0, steps=3, factor=0.5)
    >>> [round(rate(step), 12) for step in (0, 1, 3, 5, 6, 7, 9, 12, 15)]
    [1.0, 3.0, 5.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0]
    """
    _require("length", steps=steps)
    return _cycles(
        lambda phase: math.sin(math.pi * phase / 2.0),
        peak=peak, low=low, steps=steps, factor=factor, gamma=gamma,
    )  # fmt: skip


def _cycles(
    shape: Callable[[float], float],
    *,
    peak: float,
    low: float,
    steps: float,
    factor: float = 1.0,
    gamma: float = 1.0,
) -> Policy:
    """Repeat `shape`, the height of the rate at a phase from 0 at `low` over 1 at the peak to 2."""
    _require("positive", steps=steps)
    _require_order(low, peak)
    _require("fraction", factor=factor, gamma=gamma)

    def rate(step: float) -> float:
        # By the remainder, not by a sine of a large step: exact at every multiple of `steps`.
        number, within = divmod(step, 2 * steps)
        return _between(low, peak, shape(within / steps) * factor**number * gamma**step)

    return rate


def cosine_cycles(*, peak: float, low: float, steps: int) -> Policy:
    """Fall from `peak` to `low` and rise again in `steps`: (1 + cos(2 pi t / l)) / 2 (COS).

    Here l is a whole cycle, as in the paper. The authors' code computes cos(pi t / l), where l is
    half a cycle: give twice its l.

    >>> rate = cosine_cycles(peak=3.0, low=1.0, steps=4)
    >>> [round(rate(step), 12) for step in (0, 1, 2, 3, 4, 5, 8)]
    [3.0, 2.0, 1.0, 2.0, 3.0, 2.0, 3.0]
    """
    _require("length", steps=steps)
    # A cycle of _cycles begins at `low`; this one begins at the peak, half a cycle later.
    half = steps / 2
    rise = _cycles(
        lambda phase: (1.0 - math.cos(math.pi * phase)) / 2.0, peak=peak, low=low, steps=half
    )
    return lambda step: rise(step + half)


def piecewise(pieces: Sequence[Policy], *, boundaries: Sequence[int]) -> Policy:
    """Follow the pieces in turn; each begins at a boundary and counts from there.

    >>> rate = piecewise([constant(peak=4.0), exponential(peak=2.0, gamma=0.5)], boundaries=[3])
    >>> [rate(step) for step in (0, 2, 3, 4)]
    [4.0, 4.0, 2.0, 1.0]
    """
    _require_increasing(boundaries)
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
    _require("count", steps=steps)
    _require("rate", start=start)
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
    _require("count", steps=steps)
    return lambda step: schedule(step + steps)


def _between(low: float, peak: float, share: float) -> float:
    """Return low + share (peak - low), but exact at both ends and never outside them."""
    # From the nearer end: low + 1.0 * (peak - low) is not always peak in floating point.
    if share < 0.5:
        return low + (peak - low) * share
    return peak - (peak - low) * (1.0 - share)


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "rate": (lambda it: 0.0 <= it < math.inf, "a rate, 0 or above and finite"),
    "length": (lambda it: 1 <= it < math.inf, "1 or more and finite"),
    "count": (lambda it: 0 <= it < math.inf, "0 or more and finite"),
    "fraction": (lambda it: 0.0 < it <= 1.0, "above 0 and at most 1"),
    "positive": (lambda it: 0.0 < it < math.inf, "above 0 and finite"),
}
"""Conditions on arguments, false for NaN, and how a message calls them."""


def _require(kind: str, **values: float) -> None:
    holds, words = _RANGES[kind]
    for name, value in values.items():
        if not holds(value):
            raise ValueError(f"{name} must be {words}, got {value:g}")


def _require_order(low: float, peak: float) -> None:
    _require("rate", low=low, peak=peak)
    if low > peak:
        raise ValueError(f"the lower rate ({low:g}) must not exceed the peak ({peak:g})")


def _require_increasing(boundaries: Sequence[int]) -> None:
    # Infinity last: NaN and infinite boundaries then fail the comparison too.
    steps = [0, *boundaries, math.inf]
    if not all(earlier < later for earlier, later in itertools.pairwise(steps)):
        raise ValueError(f"boundaries must be above 0 and increase, got {list(boundaries)}")

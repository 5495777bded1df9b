"""Learning-rate schedules: pure functions from the step number to a rate.

A schedule holds no state, so resuming a run means knowing the step and nothing else, and a
schedule can be plotted, tested or composed without an optimizer. Steps count optimizer updates
from 0; `rate(step)` is the rate used *for* that update.

>>> rate = warmup(polynomial(peak=8.0, steps=4, power=2.0), steps=2)
>>> [rate(step) for step in range(7)]
[0.0, 4.0, 8.0, 4.5, 2.0, 0.5, 0.0]

The thirteen policies of LRBench (Wu et al. 2019, arXiv:1908.06477) are here, each with the paper's
short name in capitals. `peak` and `low` are the larger and the smaller of its k0 and k1, `steps` is
its l. `cosine`, a single fall, `warmup`, `skip` and `piecewise` stand beside them.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Sequence

Schedule = Callable[[int], float]
"""From the number of an update to its rate."""

Policy = Callable[[float], float]
"""The same, also between two updates: a batch schedule counts samples."""


def constant(*, peak: float) -> Policy:
    """Stay at `peak` (FIX).

    >>> constant(peak=0.1)(7)
    0.1
    """
    _require_rates(peak=peak)
    return lambda _: peak


def step(*, peak: float, steps: int, gamma: float) -> Policy:
    """Start at `peak` and multiply the rate by `gamma` after every `steps` steps (STEP).

    >>> rate = step(peak=1.0, steps=3, gamma=0.5)
    >>> [rate(step) for step in (0, 2, 3, 4, 5, 6)]
    [1.0, 1.0, 0.5, 0.5, 0.5, 0.25]
    """
    _require_rates(peak=peak)
    _require_positive(steps)
    _require_fraction(gamma)
    return lambda step: peak * gamma ** (step // steps)


def multistep(*, peak: float, boundaries: Sequence[int], gamma: float) -> Policy:
    """Start at `peak` and multiply the rate by `gamma` at every boundary, in steps (NSTEP).

    >>> rate = multistep(peak=1.0, boundaries=[2, 4], gamma=0.5)
    >>> [rate(step) for step in range(6)]
    [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    _require_rates(peak=peak)
    _require_increasing(boundaries)
    _require_fraction(gamma)
    return lambda step: peak * gamma ** bisect.bisect_right(boundaries, step)


def exponential(*, peak: float, gamma: float) -> Policy:
    """Start at `peak` and multiply the rate by `gamma` at every step (EXP).

    >>> rate = exponential(peak=8.0, gamma=0.5)
    >>> [rate(step) for step in range(4)]
    [8.0, 4.0, 2.0, 1.0]
    """
    _require_rates(peak=peak)
    _require_fraction(gamma)
    return lambda step: peak * gamma**step


def inverse(*, peak: float, gamma: float, power: float) -> Policy:
    """Fall from `peak` along (1 + gamma t)**-power (INV).

    >>> rate = inverse(peak=4.0, gamma=1.0, power=2.0)
    >>> [rate(step) for step in (0, 1, 3)]
    [4.0, 1.0, 0.25]
    """
    _require_rates(peak=peak)
    _require_above_zero(gamma=gamma, power=power)
    return lambda step: peak * (1.0 + gamma * step) ** -power


def polynomial(*, peak: float, steps: int, power: float, end: float = 0.0) -> Policy:
    """Fall from `peak` at step 0 to `end` at `steps` along (1 - t)**power, then stay there (POLY).

    >>> rate = polynomial(peak=8.0, steps=4, power=2.0)
    >>> [rate(step) for step in (0, 1, 3, 4, 5, 9)]
    [8.0, 4.5, 0.5, 0.0, 0.0, 0.0]
    """
    _require_positive(steps)
    _require_above_zero(power=power)
    _require_order(end, peak)

    def rate(step: float) -> float:
        remaining = 1.0 - min(step, steps) / steps
        return _between(end, peak, math.pow(remaining, power))

    return rate


def cosine(*, peak: float, steps: int, end: float = 0.0) -> Policy:
    """Fall from `peak` at step 0 to `end` at `steps` along half a cosine, then stay at `end`.

    Loshchilov and Hutter 2017 (arXiv:1608.03983, equation 5), without restarts.

    >>> rate = cosine(peak=2.0, steps=4)
    >>> [round(rate(step), 12) for step in (0, 2, 4, 9)]
    [2.0, 1.0, 0.0, 0.0]
    """
    _require_positive(steps)
    _require_order(end, peak)
    return lambda step: _between(end, peak, _half_cosine(min(step, steps) / steps))


def triangular(*, peak: float, low: float, steps: int) -> Policy:
    """Rise from `low` to `peak` in `steps` steps, fall back in as many, again and again (TRI).

    The triangle is the paper's (2 / pi) |arcsin(sin(pi t / 2l))|, from the remainder of t by 2l:
    so it is exact at every multiple of l, however late.

    >>> rate = triangular(peak=3.0, low=1.0, steps=4)
    >>> [rate(step) for step in (0, 1, 3, 4, 5, 7, 8, 9, 12)]
    [1.0, 1.5, 2.5, 3.0, 2.5, 1.5, 1.0, 1.5, 3.0]
    """
    return _cycles(_triangle, peak=peak, low=low, steps=steps, fade=constant(peak=1.0))


def triangular2(*, peak: float, low: float, steps: int) -> Policy:
    """Cycle as `triangular` does, half as far above `low` in every new cycle (TRI2).

    >>> rate = triangular2(peak=5.0, low=1.0, steps=2)
    >>> [rate(step) for step in range(11)]
    [1.0, 3.0, 5.0, 3.0, 1.0, 2.0, 3.0, 2.0, 1.0, 1.5, 2.0]
    """
    return _cycles(_triangle, peak=peak, low=low, steps=steps, fade=_halving(steps))


def triangular_exp(*, peak: float, low: float, steps: int, gamma: float) -> Policy:
    """Cycle as `triangular` does, its height above `low` times `gamma` at every step (TRIEXP).

    >>> rate = triangular_exp(peak=5.0, low=1.0, steps=2, gamma=0.5)
    >>> [rate(step) for step in range(7)]
    [1.0, 2.0, 2.0, 1.25, 1.0, 1.0625, 1.0625]
    """
    fade = exponential(peak=1.0, gamma=gamma)
    return _cycles(_triangle, peak=peak, low=low, steps=steps, fade=fade)


def sine(*, peak: float, low: float, steps: int) -> Policy:
    """Rise from `low` to `peak` in `steps` steps and fall back along |sin(pi t / 2l)| (SIN).

    >>> rate = sine(peak=3.0, low=1.0, steps=3)
    >>> [round(rate(step), 12) for step in (0, 1, 3, 5, 6, 7, 9)]
    [1.0, 2.0, 3.0, 2.0, 1.0, 2.0, 3.0]
    """
    return _cycles(_half_sine, peak=peak, low=low, steps=steps, fade=constant(peak=1.0))


def sine2(*, peak: float, low: float, steps: int) -> Policy:
    """Cycle as `sine` does, half as far above `low` in every new cycle (SIN2).

    >>> rate = sine2(peak=5.0, low=1.0, steps=3)
    >>> [round(rate(step), 12) for step in (0, 1, 3, 5, 6, 7, 9, 12, 15)]
    [1.0, 3.0, 5.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0]
    """
    return _cycles(_half_sine, peak=peak, low=low, steps=steps, fade=_halving(steps))


def sine_exp(*, peak: float, low: float, steps: int, gamma: float) -> Policy:
    """Cycle as `sine` does, its height above `low` times `gamma` at every step (SINEXP).

    >>> rate = sine_exp(peak=5.0, low=1.0, steps=1, gamma=0.5)
    >>> [rate(step) for step in range(5)]
    [1.0, 3.0, 1.0, 1.5, 1.0]
    """
    fade = exponential(peak=1.0, gamma=gamma)
    return _cycles(_half_sine, peak=peak, low=low, steps=steps, fade=fade)


def cosine_cycles(*, peak: float, low: float, steps: int) -> Policy:
    """Fall from `peak` to `low` and rise again, once in `steps`: (1 + cos(2 pi t / l)) / 2 (COS).

    Here l is a whole cycle, as in the paper. The authors' code computes cos(pi t / l), where l is
    half a cycle: give twice its l.

    >>> rate = cosine_cycles(peak=3.0, low=1.0, steps=4)
    >>> [round(rate(step), 12) for step in (0, 1, 2, 3, 4, 5, 8)]
    [3.0, 2.0, 1.0, 2.0, 3.0, 2.0, 3.0]
    """
    _require_positive(steps)
    _require_order(low, peak)
    return lambda step: _between(low, peak, _half_cosine(2 * (step % steps) / steps))


def piecewise(pieces: Sequence[Policy], *, boundaries: Sequence[int]) -> Policy:
    """Follow the pieces one after the other; each begins at a boundary and counts from there.

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

    The gradual warm-up of Goyal et al. 2017 (arXiv:1706.02677, section 2.2). `after` sees its own
    clock: its step 0 is the first step after the warm-up. With no steps there is no warm-up.

    >>> rate = warmup(constant(peak=4.0), steps=2, start=1.0)
    >>> [rate(step) for step in range(4)]
    [1.0, 2.5, 4.0, 4.0]
    """
    _require_not_negative(steps)
    _require_rates(start=start)
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
    _require_not_negative(steps)
    return lambda step: schedule(step + steps)


def _cycles(
    shape: Callable[[float], float], *, peak: float, low: float, steps: int, fade: Policy
) -> Policy:
    """Repeat `shape`, the height of the learning rate at a phase from 0 to 2, times `fade`."""
    _require_positive(steps)
    _require_order(low, peak)
    return lambda step: _between(low, peak, shape(step % (2 * steps) / steps) * fade(step))


def _triangle(phase: float) -> float:
    return min(phase, 2.0 - phase)


def _half_sine(phase: float) -> float:
    return math.sin(math.pi * phase / 2.0)


def _half_cosine(phase: float) -> float:
    return (1.0 + math.cos(math.pi * phase)) / 2.0


def _halving(steps: int) -> Policy:
    return lambda step: 0.5 ** (step // (2 * steps))


def _between(low: float, peak: float, share: float) -> float:
    """Return low + share (peak - low), but exact at both ends and never outside them."""
    if share < 0.5:
        return low + (peak - low) * share
    return peak - (peak - low) * (1.0 - share)


def _require_positive(steps: int) -> None:
    if not 1 <= steps < math.inf:  # nor NaN
        raise ValueError(f"steps must be at least 1, got {steps}")


def _require_not_negative(steps: int) -> None:
    if not 0 <= steps < math.inf:
        raise ValueError(f"steps must be 0 or more, got {steps}")


def _require_rates(**rates: float) -> None:
    for name, rate in rates.items():
        if not 0.0 <= rate < math.inf:
            raise ValueError(f"{name} must be a rate, 0 or above and finite, got {rate:g}")


def _require_fraction(gamma: float) -> None:
    if not 0.0 < gamma <= 1.0:
        raise ValueError(f"gamma must be above 0 and at most 1, got {gamma:g}")


def _require_above_zero(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {value:g}")


def _require_order(low: float, peak: float) -> None:
    _require_rates(**{"the lower rate": low, "peak": peak})
    if low > peak:
        raise ValueError(f"the lower rate ({low:g}) must not exceed the peak ({peak:g})")


def _require_increasing(boundaries: Sequence[int]) -> None:
    steps = [0, *boundaries, math.inf]
    if not all(earlier < later for earlier, later in itertools.pairwise(steps)):
        raise ValueError(f"boundaries must be above 0 and increase, got {list(boundaries)}")

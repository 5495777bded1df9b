"""Learning-rate schedules: pure functions from the step number to a rate.

A schedule holds no state, so resuming a run means knowing the step and nothing else, and a
schedule can be plotted, tested or composed without an optimizer. Steps count optimizer updates
from 0; `rate(step)` is the rate used *for* that update.

>>> rate = warmup(polynomial(peak=8.0, steps=4, power=2.0), steps=2)
>>> [rate(step) for step in range(7)]
[0.0, 4.0, 8.0, 4.5, 2.0, 0.5, 0.0]
"""

import bisect
import itertools
import math
from collections.abc import Callable, Sequence

Schedule = Callable[[int], float]


def constant(*, peak: float) -> Schedule:
    """Stay at `peak`.

    >>> constant(peak=0.1)(7)
    0.1
    """
    return lambda _: peak


def polynomial(*, peak: float, steps: int, power: float, end: float = 0.0) -> Schedule:
    """Fall from `peak` at step 0 to `end` at `steps` along (1 - t)**power, then stay at `end`.

    >>> rate = polynomial(peak=8.0, steps=4, power=2.0)
    >>> [rate(step) for step in (0, 1, 4, 9)]
    [8.0, 4.5, 0.0, 0.0]
    """
    _require_positive(steps)

    def rate(step: int) -> float:
        remaining = 1.0 - min(step, steps) / steps
        return end + (peak - end) * math.pow(remaining, power)

    return rate


def cosine(*, peak: float, steps: int, end: float = 0.0) -> Schedule:
    """Fall from `peak` at step 0 to `end` at `steps` along half a cosine, then stay at `end`.

    Loshchilov and Hutter 2017 (arXiv:1608.03983, equation 5), without restarts.

    >>> rate = cosine(peak=2.0, steps=4)
    >>> [round(rate(step), 12) for step in (0, 2, 4, 9)]
    [2.0, 1.0, 0.0, 0.0]
    """
    _require_positive(steps)

    def rate(step: int) -> float:
        progress = min(step, steps) / steps
        return end + (peak - end) * (1.0 + math.cos(math.pi * progress)) / 2.0

    return rate


def multistep(*, peak: float, boundaries: Sequence[int], gamma: float) -> Schedule:
    """Start at `peak` and multiply the rate by `gamma` at every boundary, in steps.

    >>> rate = multistep(peak=1.0, boundaries=[2, 4], gamma=0.5)
    >>> [rate(step) for step in range(6)]
    [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    if any(later <= earlier for earlier, later in itertools.pairwise(boundaries)):
        raise ValueError(f"boundaries must increase, got {list(boundaries)}")
    return lambda step: peak * gamma ** bisect.bisect_right(boundaries, step)


def warmup(after: Schedule, *, steps: int, start: float = 0.0) -> Schedule:
    """Rise linearly from `start` to `after(0)` over `steps` steps, then follow `after`.

    The gradual warm-up of Goyal et al. 2017 (arXiv:1706.02677, section 2.2). `after` sees its own
    clock: its step 0 is the first step after the warm-up.

    >>> rate = warmup(constant(peak=4.0), steps=2, start=1.0)
    >>> [rate(step) for step in range(4)]
    [1.0, 2.5, 4.0, 4.0]
    """

    def rate(step: int) -> float:
        if step >= steps:
            return after(step - steps)
        return start + (after(0) - start) * step / steps

    return rate


def skip(schedule: Schedule, *, steps: int) -> Schedule:
    """Follow `schedule` from its step `steps` on: the first update uses `schedule(steps)`.

    MLPerf's reference counts its updates from 1, so its first rate is that of step 1.

    >>> rate = skip(warmup(constant(peak=4.0), steps=2), steps=1)
    >>> [rate(step) for step in range(3)]
    [2.0, 4.0, 4.0]
    """
    return lambda step: schedule(step + steps)


def _require_positive(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")

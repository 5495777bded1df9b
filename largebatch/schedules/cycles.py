"""Learning-rate schedules that rise again: cycles and restarts, pure functions as in `functions`.

These are LRBench's policies (Wu et al. 2019, arXiv:1908.06477), from the paper and its code, with
their short names in capitals. `peak` and `low` are the larger and the smaller of its k0 and k1. A
cycle begins at `low` or at `peak` and takes `steps` to the other one (its l), and as many back.
"""

import math
from collections.abc import Callable
from typing import Literal

from largebatch.schedules.bounds import (
    between,
    half_cosine,
    require_fraction,
    require_order,
    require_positive,
)
from largebatch.schedules.functions import Policy

End = Literal["low", "peak"]
Fall = Literal["linear", "sine", "cosine"]


def triangular(*, peak: float, low: float, steps: int, begin: End = "low") -> Policy:
    """Rise from `low` to `peak` in `steps` steps and fall back in as many (TRI, DTRI).

    The triangle is the paper's (2 / pi) |arcsin(sin(pi t / 2l))|, computed from the remainder of t
    by 2l, so it is exact at every multiple of l. DTRI begins at the peak.

    >>> rate = triangular(peak=3.0, low=1.0, steps=4)
    >>> [rate(step) for step in (0, 1, 3, 4, 5, 7, 8, 9, 12)]
    [1.0, 1.5, 2.5, 3.0, 2.5, 1.5, 1.0, 1.5, 3.0]
    >>> rate = triangular(peak=3.0, low=1.0, steps=4, begin="peak")
    >>> [rate(step) for step in (0, 1, 4, 8)]
    [3.0, 2.5, 1.0, 3.0]
    """
    return _cycles(_triangle, peak=peak, low=low, steps=steps, begin=begin)


def triangular2(*, peak: float, low: float, steps: int, begin: End = "low") -> Policy:
    """Cycle as `triangular` does, half as far above `low` in every new cycle (TRI2, DTRI2).

    >>> rate = triangular2(peak=5.0, low=1.0, steps=2)
    >>> [rate(step) for step in range(11)]
    [1.0, 3.0, 5.0, 3.0, 1.0, 2.0, 3.0, 2.0, 1.0, 1.5, 2.0]
    """
    return _cycles(_triangle, peak=peak, low=low, steps=steps, begin=begin, factor=0.5)


def triangular_exp(
    *, peak: float, low: float, steps: int, gamma: float, begin: End = "low"
) -> Policy:
    """Cycle as `triangular`, its height above `low` times `gamma` at every step (TRIEXP, DTRIEXP).

    >>> rate = triangular_exp(peak=5.0, low=1.0, steps=2, gamma=0.5)
    >>> [rate(step) for step in range(7)]
    [1.0, 2.0, 2.0, 1.25, 1.0, 1.0625, 1.0625]
    """
    return _cycles(_triangle, peak=peak, low=low, steps=steps, begin=begin, gamma=gamma)


def sine(*, peak: float, low: float, steps: int, begin: End = "low") -> Policy:
    """Rise from `low` to `peak` in `steps` steps and fall back along |sin(pi t / 2l)| (SIN, DSIN).

    >>> rate = sine(peak=3.0, low=1.0, steps=3)
    >>> [round(rate(step), 12) for step in (0, 1, 3, 5, 6, 7, 9)]
    [1.0, 2.0, 3.0, 2.0, 1.0, 2.0, 3.0]
    """
    return _cycles(_half_sine, peak=peak, low=low, steps=steps, begin=begin)


def sine2(*, peak: float, low: float, steps: int, begin: End = "low") -> Policy:
    """Cycle as `sine` does, half as far above `low` in every new cycle (SIN2, DSIN2).

    >>> rate = sine2(peak=5.0, low=1.0, steps=3)
    >>> [round(rate(step), 12) for step in (0, 1, 3, 5, 6, 7, 9, 12, 15)]
    [1.0, 3.0, 5.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0]
    """
    return _cycles(_half_sine, peak=peak, low=low, steps=steps, begin=begin, factor=0.5)


def sine_exp(*, peak: float, low: float, steps: int, gamma: float, begin: End = "low") -> Policy:
    """Cycle as `sine` does, its height above `low` times `gamma` at every step (SINEXP, DSINEXP).

    >>> rate = sine_exp(peak=5.0, low=1.0, steps=1, gamma=0.5)
    >>> [rate(step) for step in range(5)]
    [1.0, 3.0, 1.0, 1.5, 1.0]
    """
    return _cycles(_half_sine, peak=peak, low=low, steps=steps, begin=begin, gamma=gamma)


def cosine_cycles(*, peak: float, low: float, steps: int, begin: End = "peak") -> Policy:
    """Fall from `peak` to `low` and rise again in `steps`: (1 + cos(2 pi t / l)) / 2 (COS, UPCOS).

    Here l is a whole cycle, as in the paper. The authors' code computes cos(pi t / l), where l is
    half a cycle: give twice its l. UPCOS begins at the low rate.

    >>> rate = cosine_cycles(peak=3.0, low=1.0, steps=4)
    >>> [round(rate(step), 12) for step in (0, 1, 2, 3, 4, 5, 8)]
    [3.0, 2.0, 1.0, 2.0, 3.0, 2.0, 3.0]
    """
    return _cycles(_whole_cosine, peak=peak, low=low, steps=steps, halves=2, begin=begin)


def cosine_cycles2(*, peak: float, low: float, steps: int, begin: End = "peak") -> Policy:
    """Cycle as `cosine_cycles`, half as far above `low` after each time there (COS2, UPCOS2).

    >>> rate = cosine_cycles2(peak=5.0, low=1.0, steps=4)
    >>> [round(rate(step), 12) for step in (0, 1, 2, 4, 6, 8)]
    [5.0, 3.0, 1.0, 3.0, 1.0, 2.0]
    """
    return _cycles(
        _whole_cosine, peak=peak, low=low, steps=steps, halves=2, begin=begin, factor=0.5
    )


def cosine_cycles_exp(
    *, peak: float, low: float, steps: int, gamma: float, begin: End = "peak"
) -> Policy:
    """Cycle as `cosine_cycles`, its height times `gamma` at every step (COSEXP, UPCOSEXP).

    >>> rate = cosine_cycles_exp(peak=5.0, low=1.0, steps=4, gamma=0.5)
    >>> [round(rate(step), 12) for step in (0, 2, 4)]
    [5.0, 1.0, 1.25]
    """
    return _cycles(
        _whole_cosine, peak=peak, low=low, steps=steps, halves=2, begin=begin, gamma=gamma
    )


def restarts(  # noqa: PLR0913 -- the two rates, a fall, and what changes from one to the next
    *,
    peak: float,
    low: float,
    steps: int,
    fall: Fall = "cosine",
    lengthen: float = 1.0,
    factor: float = 1.0,
    gamma: float = 1.0,
) -> Policy:
    """Fall from `peak` to `low` in `steps` steps and restart at the peak.

    Each fall is `lengthen` times as long as the one before, and its height above `low` is
    multiplied by `factor` at every restart and by `gamma` at every step. With `cosine` and
    `lengthen` this is SGDR (Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5, T_mult). The
    falls `linear`, `sine` and `cosine` are LRBench's RSW, SINRSW and COSRSW; with a factor of 0.5
    those that end in 2, with a gamma those that end in EXP. At a restart its code returns `low`,
    and this function the peak.

    >>> rate = restarts(peak=5.0, low=1.0, steps=2, fall="linear", lengthen=2.0, factor=0.5)
    >>> [rate(step) for step in range(7)]
    [5.0, 3.0, 3.0, 2.5, 2.0, 1.5, 2.0]
    """
    require_positive(steps)
    require_order(low, peak)
    require_fraction(factor)
    require_fraction(gamma)
    if not 1.0 <= lengthen < math.inf:  # nor NaN
        raise ValueError(f"lengthen must be 1 or more and finite, got {lengthen:g}")
    shape = _FALLS[fall]

    def rate(step: float) -> float:
        number, phase = _restart(step / steps, lengthen)
        return between(low, peak, shape(phase) * factor**number * gamma**step)

    return rate


def _restart(time: float, lengthen: float) -> tuple[int, float]:
    """Return the number of completed falls, and the share of the current one, below 1.

    `time` counts first falls; fall n begins at 1 + m + ... + m^(n-1) = (m^n - 1) / (m - 1).
    """
    if lengthen == 1.0:
        return int(time), time % 1.0
    number = int(math.log1p(time * (lengthen - 1.0)) / math.log(lengthen))
    while _begin(number + 1, lengthen) <= time:  # the logarithm may be an ulp too small
        number += 1
    while _begin(number, lengthen) > time:
        number -= 1
    return number, (time - _begin(number, lengthen)) / lengthen**number


def _begin(number: int, lengthen: float) -> float:
    return (lengthen**number - 1.0) / (lengthen - 1.0)


def _cycles(  # noqa: PLR0913 -- the two rates, a shape, and what changes from one to the next
    shape: Callable[[float], float],
    *,
    peak: float,
    low: float,
    steps: int,
    begin: End,
    halves: int = 1,
    factor: float = 1.0,
    gamma: float = 1.0,
) -> Policy:
    """Repeat `shape`, the height of the rate at a phase from 0 at `low` over 1 at the peak to 2.

    `steps` are one or two halves of a cycle. The height is multiplied by `factor` in each new
    cycle, which begins at `low`, and by `gamma` at every step.
    """
    require_positive(steps)
    require_order(low, peak)
    require_fraction(gamma)
    half = steps / halves
    before = half if begin == "peak" else 0

    def rate(step: float) -> float:
        number, within = divmod(step + before, 2 * half)
        return between(low, peak, shape(within / half) * factor**number * gamma**step)

    return rate


def _triangle(phase: float) -> float:
    return min(phase, 2.0 - phase)


def _half_sine(phase: float) -> float:
    return math.sin(math.pi * phase / 2.0)


def _whole_cosine(phase: float) -> float:
    return (1.0 - math.cos(math.pi * phase)) / 2.0


_FALLS: dict[Fall, Callable[[float], float]] = {
    "linear": lambda phase: 1.0 - phase,
    "sine": lambda phase: math.sin(math.pi * (1.0 - phase) / 2.0),
    "cosine": half_cosine,
}

"""Checks of the arguments of a schedule, and rates between two bounds."""

import itertools
import math
from collections.abc import Sequence


def between(low: float, peak: float, share: float) -> float:
    """Return low + share (peak - low), but exact at both ends and never outside them."""
    if share < 0.5:
        return low + (peak - low) * share
    return peak - (peak - low) * (1.0 - share)


def half_cosine(phase: float) -> float:
    """Return the height of a cosine that falls from 1 at phase 0 to 0 at phase 1."""
    return (1.0 + math.cos(math.pi * phase)) / 2.0


def require_positive(steps: int) -> None:
    """Raise ValueError unless a number of steps is 1 or more and finite."""
    if not 1 <= steps < math.inf:  # nor NaN
        raise ValueError(f"steps must be at least 1, got {steps}")


def require_not_negative(steps: int) -> None:
    """Raise ValueError unless a number of steps is 0 or more and finite."""
    if not 0 <= steps < math.inf:
        raise ValueError(f"steps must be 0 or more, got {steps}")


def require_rates(**rates: float) -> None:
    """Raise ValueError unless all are 0 or above and finite."""
    for name, rate in rates.items():
        if not 0.0 <= rate < math.inf:
            raise ValueError(f"{name} must be a rate, 0 or above and finite, got {rate:g}")


def require_fraction(gamma: float) -> None:
    """Raise ValueError unless a factor is above 0 and at most 1."""
    if not 0.0 < gamma <= 1.0:
        raise ValueError(f"gamma must be above 0 and at most 1, got {gamma:g}")


def require_above_zero(**values: float) -> None:
    """Raise ValueError unless all are above 0 and finite."""
    for name, value in values.items():
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {value:g}")


def require_order(low: float, peak: float) -> None:
    """Raise ValueError unless both are rates and the lower one is not above the peak."""
    require_rates(**{"the lower rate": low, "peak": peak})
    if low > peak:
        raise ValueError(f"the lower rate ({low:g}) must not exceed the peak ({peak:g})")


def require_increasing(boundaries: Sequence[int]) -> None:
    """Raise ValueError unless boundaries are above 0 and each above the one before."""
    steps = [0, *boundaries, math.inf]
    if not all(earlier < later for earlier, later in itertools.pairwise(steps)):
        raise ValueError(f"boundaries must be above 0 and increase, got {list(boundaries)}")

"""Means over seeds with their intervals by Student's t, for comparisons of runs; without SciPy."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

CONFIDENCE = 0.95


class Mean(NamedTuple):
    """A mean with its two-sided interval."""

    mean: float
    low: float
    high: float
    """Infinite ends for one value, which has no spread."""

    number: int
    """Number of values, or of pairs."""

    paired: bool = False
    """True for the mean of differences of pairs."""

    @property
    def excludes_zero(self) -> bool:
        """True if the interval is on one side of 0."""
        return self.low > 0 or self.high < 0


def mean_of(values: Sequence[float], *, together: int = 1) -> Mean:
    """Return the mean of independent values, such as those of seeds.

    So many intervals `together` hold the true means with CONFIDENCE (Bonferroni).

    >>> [round(value, 3) for value in mean_of([0.90, 0.92, 0.91])[:3]]
    [0.91, 0.885, 0.935]
    """
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Mean(mean, -math.inf, math.inf, 1)
    reach = student(len(values) - 1, together=together)
    reach *= statistics.stdev(values) / math.sqrt(len(values))
    return Mean(mean, mean - reach, mean + reach, len(values))


def difference(
    values: Mapping[int, float], others: Mapping[int, float], *, together: int = 1
) -> Mean:
    """Return the mean of `values` minus that of `others`, both by seed.

    Pairs of equal seeds share weights at the start and the order of the samples, so their
    differences vary less. Without two of them both means have a spread of their own (Welch 1947,
    with whole degrees of freedom).

    >>> paired = difference({1: 91.0, 2: 92.0, 3: 93.5}, {1: 90.0, 2: 91.5, 3: 92.0})
    >>> [round(value, 2) for value in paired[:3]]
    [1.0, -0.24, 2.24]
    """
    pairs = [values[seed] - others[seed] for seed in values.keys() & others.keys()]
    if len(pairs) > 1:
        return mean_of(pairs, together=together)._replace(paired=True)
    groups = [list(group.values()) for group in (values, others)]
    mean = statistics.fmean(groups[0]) - statistics.fmean(groups[1])
    if min(map(len, groups)) == 1:
        return Mean(mean, -math.inf, math.inf, 1)
    squares = [statistics.variance(group) / len(group) for group in groups]
    error = math.fsum(squares)
    parts = [square**2 / (len(group) - 1) for square, group in zip(squares, groups, strict=True)]
    freedom = math.floor(error**2 / math.fsum(parts)) if error else 1
    reach = student(max(1, freedom), together=together) * math.sqrt(error)
    return Mean(mean, mean - reach, mean + reach, min(map(len, groups)))


def student(freedom: int, *, together: int = 1) -> float:
    """Return the half-width of an interval by Student's t, in standard errors.

    >>> round(student(1), 3), round(student(8), 3)
    (12.706, 2.306)
    """
    confidence = 1 - (1 - CONFIDENCE) / together
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if _within(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return high


def _within(t: float, freedom: int) -> float:
    """Return the probability of values from -t to t.

    Abramowitz and Stegun 1964, 26.7.3 for odd degrees of freedom and 26.7.4 for even ones.
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    is_odd = freedom % 2 == 1
    term = cosine if is_odd else 1.0
    factor = 3 if is_odd else 2
    total = 0.0
    for _ in range(freedom // 2):
        total += term
        term *= cosine**2 * (factor - 1) / factor
        factor += 2
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total

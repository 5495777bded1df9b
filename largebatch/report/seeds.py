"""Means over seeds, their intervals by Student's t, and which variant is the best; without SciPy.

Every comparison of this package, of run folders and of studies, rests on these.
"""

import math
import statistics
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

CONFIDENCE = 0.95

ENOUGH_SEEDS = 3
"""Fewer give no interval, or one that is mostly wider than any difference of policies."""


class Interval(NamedTuple):
    """A mean with its two-sided interval at CONFIDENCE, by Student's t."""

    mean: float
    low: float
    high: float
    """Infinite ends for one value, which has no spread."""

    number: int
    """Number of values."""

    def scaled(self, factor: float) -> "Interval":
        """Return the interval in another unit, such as percent with a factor of 100."""
        return Interval(factor * self.mean, factor * self.low, factor * self.high, self.number)

    @property
    def reach(self) -> float | None:
        """Half the width; None for fewer values than ENOUGH_SEEDS."""
        return self.high - self.mean if self.number >= ENOUGH_SEEDS else None

    def with_ends(self, form: str, unit: str = "") -> str:
        """Return the mean with its unit, and the ends.

        >>> Interval(1.5, 1.2, 1.875, 3).with_ends(".2f", " times")
        '1.50 times (1.20 to 1.88)'
        """
        ends = f"{self.low:{form}} to {self.high:{form}}" if self.number > 1 else "no interval"
        return f"{self.mean:{form}}{unit} ({ends})"


def interval(values: Iterable[float], *, together: int = 1) -> Interval:
    """Return the mean of values that were drawn independently, such as those of seeds.

    So many intervals `together` hold the true means with CONFIDENCE (Bonferroni). Raises ValueError
    without a value.

    >>> interval([0.90, 0.92, 0.91]).with_ends(".3f")
    '0.910 (0.885 to 0.935)'
    """
    sample = list(values)
    if not sample:
        raise ValueError("expected one value or more")
    mean = statistics.fmean(sample)
    if len(sample) == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    reach = student(len(sample) - 1, together=together)
    reach *= statistics.stdev(sample) / math.sqrt(len(sample))
    return Interval(mean, mean - reach, mean + reach, len(sample))


def difference(
    one: Mapping[int, float], other: Mapping[int, float], *, together: int = 1
) -> Interval | None:
    """Return the mean of `one` minus `other`, both by seed, over the seeds of both; None without.

    `together` as in interval.

    Runs of one seed share the weights at the start and the order of the samples, so the differences
    of such pairs vary less than the values.

    >>> difference({1: 91.0, 2: 92.0, 3: 93.5}, {1: 90.0, 2: 91.5, 3: 92.0}).with_ends(".2f")
    '1.00 (-0.24 to 2.24)'
    """
    pairs = [one[seed] - other[seed] for seed in one.keys() & other.keys()]
    return interval(pairs, together=together) if pairs else None


def ratio(
    one: Mapping[int, float], other: Mapping[int, float], *, together: int = 1
) -> Interval | None:
    """Return the geometric mean of the ratios of costs, over the seeds of both; None without.

    Its ends are those of the mean logarithm; `together` as in interval. None too for a cost of 0,
    which has no ratio.

    >>> ratio({1: 100.0, 2: 110.0}, {1: 50.0, 2: 55.0}).with_ends(".2f", " times")
    '2.00 times (2.00 to 2.00)'
    """
    seeds = one.keys() & other.keys()
    if any(min(one[seed], other[seed]) <= 0 for seed in seeds):
        return None
    logs = [{seed: math.log(costs[seed]) for seed in seeds} for costs in (one, other)]
    gap = difference(*logs, together=together)
    if gap is None:
        return None
    end = math.exp(gap.high) if gap.high < math.log(sys.float_info.max) else math.inf
    return Interval(math.exp(gap.mean), math.exp(gap.low), end, gap.number)


def unpaired_difference(
    one: Mapping[int, float], other: Mapping[int, float], *, together: int = 1
) -> Interval:
    """Return the mean of `one` minus that of `other`, each with a spread of its own.

    Welch 1947, with whole degrees of freedom; `together` as in interval.
    """
    groups = [list(group.values()) for group in (one, other)]
    mean = statistics.fmean(groups[0]) - statistics.fmean(groups[1])
    number = min(map(len, groups))
    if number == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    squares = [statistics.variance(group) / len(group) for group in groups]
    error = math.fsum(squares)
    parts = [square**2 / (len(group) - 1) for square, group in zip(squares, groups, strict=True)]
    # Rounded down: the interval becomes wider, never narrower.
    freedom = math.floor(error**2 / math.fsum(parts)) if error else 1
    reach = student(max(1, freedom), together=together) * math.sqrt(error)
    return Interval(mean, mean - reach, mean + reach, number)


class Lead(NamedTuple):
    """How much better the best variant is than another one."""

    over: str
    """Name of the other one."""

    gap: Interval | None
    """Points of accuracy, or the ratio of the other one's cost to the best one's; None if no seed
    has both."""

    equality: float
    """The gap of equal variants: 0 points, or a ratio of 1."""

    @property
    def is_sure(self) -> bool:
        """True if the interval excludes equality; else the other one is within the noise."""
        return self.gap is not None and self.gap.low > self.equality


def leads(
    best: Mapping[int, float],
    others: Mapping[str, Mapping[int, float]],
    *,
    of_costs: bool = False,
    unpaired: bool = False,
) -> list[Lead]:
    """Return the lead of the best variant over each of the others, all given by seed.

    The intervals hold together, because the best one was chosen among all of them. `of_costs`: the
    lowest value is the best. `unpaired`: accuracies without two equal seeds are compared by the
    spread of each variant; else they have no gap.
    """
    together = len(others)
    results = []
    for name, other in others.items():
        gap: Interval | None
        if of_costs:
            gap = ratio(other, best, together=together)
        elif unpaired and len(best.keys() & other.keys()) < 2:
            gap = unpaired_difference(best, other, together=together)
        else:
            gap = difference(best, other, together=together)
        results.append(Lead(name, gap, 1.0 if of_costs else 0.0))
    return results


def student(freedom: int, *, together: int = 1) -> float:
    """Return the half-width of an interval by Student's t, in standard errors.

    >>> round(student(1), 3), round(student(8), 3)
    (12.706, 2.306)
    """
    confidence = 1 - (1 - CONFIDENCE) / together
    low, high = 0.0, 1.0
    # The quantile by bisection; 60 halvings are more than a float64 has digits.
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

"""What LRBench measures of runs (arXiv:1908.06477): utility, cost and robustness.

Accuracy is measured at evaluations and nowhere between, so a target is reached at the first
evaluation that has it, and nothing is interpolated. A run that diverged is a result, as good as
chance. Seeds are compared in pairs, for the same seed has the same weights at the start and the
same order of samples whatever the policy.
"""

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from largebatch.optional import require_scipy
from largebatch.report.course import evaluations_of
from largebatch.report.pages import Chart, Line, Panel, Series, line_chart
from largebatch.report.run import Run
from largebatch.tracking.events import Measured

CONFIDENCE = 0.95

ENOUGH_SEEDS = 3
"""Fewer give no interval, or one that is mostly wider than any difference of policies."""


def has_diverged(run: Run) -> bool:
    """Return True if training stopped at a number that is not finite, or ends with such a loss.

    A stage of polishing that diverges alone is rolled back and does not count.
    """
    if run.summary is None or run.summary.status != "finished":
        return run.diverged
    return run.result is not None and not math.isfinite(run.result.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """An evaluation in a stage that was kept, and the cost of the run up to its end."""

    step: Annotated[int, Field(ge=1, le=2**53)]
    seconds: Measured
    """Seconds of these updates, and of all evaluations and stages without updates up to this
    evaluation, as in report.course."""

    top1: float


def measurements(run: Run) -> list[Measurement]:
    """Return the evaluations of kept stages in order; the time of other stages counts too.

    >>> measurements(read_run(Path("runs/digits")))[-1]  # doctest: +SKIP
    Measurement(step=285, seconds=21.4, top1=0.9722)
    """
    return [
        Measurement(step=one.step, seconds=float(seconds), top1=one.top1)
        for one, seconds in zip(run.kept_evaluations, evaluations_of(run).seconds, strict=True)
    ]


def cost(found: Sequence[Measurement], target: float) -> Measurement | None:
    """Return the first evaluation at or above a top-1 accuracy, a fraction; None without one.

    Its `step` and `seconds` are what the run had cost by then.

    >>> steps = (300, 600, 900)
    >>> cost([Measurement(step=it, seconds=it / 10, top1=it / 1000) for it in steps], 0.5)
    Measurement(step=600, seconds=60.0, top1=0.6)
    """
    return next((one for one in found if one.top1 >= target), None)


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
    found = list(values)
    if not found:
        raise ValueError("expected one value or more")
    mean = statistics.fmean(found)
    if len(found) == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    level = 1 - (1 - CONFIDENCE) / together / 2
    reach = float(require_scipy("scipy.stats").t.ppf(level, len(found) - 1))
    reach *= statistics.stdev(found) / math.sqrt(len(found))
    return Interval(mean, mean - reach, mean + reach, len(found))


def difference(
    one: Mapping[int, float], other: Mapping[int, float], *, together: int = 1
) -> Interval | None:
    """Return the mean of `one` minus `other`, both by seed, over the seeds of both; None without.

    `together` as in interval.

    >>> difference({1: 91.0, 2: 92.0, 3: 93.5}, {1: 90.0, 2: 91.5, 3: 92.0}).with_ends(".2f")
    '1.00 (-0.24 to 2.24)'
    """
    pairs = [one[seed] - other[seed] for seed in one.keys() & other.keys()]
    return interval(pairs, together=together) if pairs else None


def ratio(
    one: Mapping[int, float], other: Mapping[int, float], *, together: int = 1
) -> Interval | None:
    """Return the geometric mean of the ratios of costs, over the seeds of both; None without.

    Its ends are those of the mean logarithm; `together` as in interval. Raises ValueError for a
    cost that is not above 0.

    >>> ratio({1: 100.0, 2: 110.0}, {1: 50.0, 2: 55.0}).with_ends(".2f", " times")
    '2.00 times (2.00 to 2.00)'
    """
    seeds = one.keys() & other.keys()
    logs = [{seed: math.log(found[seed]) for seed in seeds} for found in (one, other)]
    found = difference(*logs, together=together)
    if found is None:
        return None
    end = math.exp(found.high) if found.high < math.log(sys.float_info.max) else math.inf
    return Interval(math.exp(found.mean), math.exp(found.low), end, found.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Robustness:
    """How much top-1 depends on the base rate; fractions."""

    by_scale: dict[float, Interval]
    """Top-1 by multiple of the rate, the mean over seeds."""

    areas: dict[int, float]
    """By seed, the area under top-1 over the logarithm of the multiple, by trapezoids, divided by
    its length: the average top-1 of a rate that is wrong by a factor drawn from the range of the
    multiples on a logarithmic scale."""

    @property
    def worst_drop(self) -> float:
        """The mean at the rate itself minus the lowest one: 0 where that is the lowest."""
        return self.by_scale[1.0].mean - min(found.mean for found in self.by_scale.values())


def robustness(top1: Iterable[tuple[int, float, float]]) -> Robustness | None:
    """Summarise accuracies given as (seed, multiple, top-1), chance for runs that diverged.

    Only seeds that were run at every multiple count; None if there are none, or only multiple 1.

    >>> found = robustness([(1, 0.5, 0.8), (1, 1.0, 0.9), (1, 2.0, 0.7)])
    >>> round(found.worst_drop, 3), round(found.areas[1], 3)
    (0.2, 0.825)
    """
    by_seed: dict[int, dict[float, float]] = {}
    for seed, scale, value in top1:
        by_seed.setdefault(seed, {})[scale] = value
    scales = sorted({1.0, *(scale for values in by_seed.values() for scale in values)})
    whole = {
        seed: [values[scale] for scale in scales]
        for seed, values in by_seed.items()
        if values.keys() == set(scales)
    }
    if not whole or len(scales) < 2:
        return None
    places = np.log(scales)
    return Robustness(
        by_scale={
            scale: interval(values[place] for values in whole.values())
            for place, scale in enumerate(scales)
        },
        areas={
            seed: float(np.average(_between(values), weights=np.diff(places)))
            for seed, values in whole.items()
        },
    )


def _between(values: Sequence[float]) -> list[float]:
    return [(one + other) / 2 for one, other in pairwise(values)]


def ends_of(means: Iterable[Interval]) -> tuple[list[float], list[float]]:
    """Return the low and the high ends of intervals, as a chart draws them: NaN if not known."""
    ends = [mean[1:3] if mean.reach is not None else (math.nan, math.nan) for mean in means]
    return [low for low, _ in ends], [high for _, high in ends]


def interval_line(
    look: Series, x: Sequence[Any], means: Sequence[Interval], *, line: bool = True
) -> Line:
    """Return a line with points at the means, each with its interval if it is known."""
    low, high = ends_of(means)
    return Line(series=look, x=x, y=[mean.mean for mean in means], low=low, high=high, line=line)


def point_with_intervals(look: Series, cost: Interval, top1: Interval) -> Line:
    """Return a point of an accuracy over a cost, with the intervals of both.

    An axis of logarithms cannot show an end at 0 or below, which is drawn at a tenth of the cost.
    """
    left, right = ends_of([cost])
    line = interval_line(look, [cost.mean], [top1], line=False)
    shown = [cost.mean / 10 if end <= 0 else end for end in left]
    return replace(line, left=shown, right=right)


def trade_off(
    name: str, cost: str, points: Iterable[tuple[Series, Interval, Interval]], title: str = ""
) -> Chart:
    """Return a chart of top-1 accuracies in percent over costs, with the intervals of both."""
    lines = [point_with_intervals(look, spent, top1) for look, spent, top1 in points]
    return line_chart(name, Panel(lines=lines, x=cost, y="Top-1, %", log="x"), title=title)

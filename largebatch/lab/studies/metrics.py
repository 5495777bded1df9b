"""What LRBench measures of runs (arXiv:1908.06477): utility, cost and robustness.

Accuracy is measured at evaluations and nowhere between, so a target is reached at the first
evaluation that has it, and nothing is interpolated. A run that diverged is a result, as good as
chance.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from largebatch.report.course import evaluations_of
from largebatch.report.pages import Chart, Line, Panel, Series, line_chart
from largebatch.report.run import Run
from largebatch.report.seeds import Interval, interval
from largebatch.tracking.events import Measured


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
        Measurement(step=evaluation.step, seconds=float(seconds), top1=evaluation.top1)
        for evaluation, seconds in zip(
            run.kept_evaluations, evaluations_of(run).seconds, strict=True
        )
    ]


def cost(evaluations: Sequence[Measurement], target: float) -> Measurement | None:
    """Return the first evaluation at or above a top-1 accuracy, a fraction; None without one.

    Its `step` and `seconds` are what the run had cost by then.

    >>> steps = (300, 600, 900)
    >>> cost([Measurement(step=it, seconds=it / 10, top1=it / 1000) for it in steps], 0.5)
    Measurement(step=600, seconds=60.0, top1=0.6)
    """
    return next((evaluation for evaluation in evaluations if evaluation.top1 >= target), None)


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
        return self.by_scale[1.0].mean - min(top1.mean for top1 in self.by_scale.values())


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
    # Robustness is to factors of the rate: 2 and 1/2 are equally far from 1.
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

"""The course of a run over steps, epochs, images and seconds.

Time is the sum over updates, evaluations and stages without updates, each counted once. Starting,
saving and repeated work of a resumed run are excluded, so that interrupted runs can be compared
with others.
"""

import math
from typing import NamedTuple

import numpy as np

from largebatch.report.run import FloatArray, Run, median, values_of

POINTS = 500  # more updates cannot be told apart in a chart


class RunCourse(NamedTuple):
    """What a run had reached, by evaluations of what was kept, or by updates. One row each."""

    epoch: FloatArray
    seconds: FloatArray
    """NaN in a run without updates, whose model was trained in another."""

    loss: FloatArray
    """On validation images at an evaluation; of updates the running median of the training loss."""

    top1: FloatArray
    """In percent; empty for updates."""


def _clock(run: Run) -> tuple[FloatArray, FloatArray]:
    """Return the seconds from the run's begin to each update's end, and to each evaluation's.

    How long a stage without updates took is in the summary; without one its evaluation is counted.
    What is only monitored at its end is not.
    """
    step = values_of(run.steps, "step")
    lengths = _finite(values_of(run.steps, "step_seconds"))
    ends = np.concatenate(([0.0], np.cumsum(lengths)))
    # A stage without updates has no step to take its time from.
    alone = [stage for stage in run.stages if stage.name not in run.by_stage]
    whole = {stage.name: stage.result.seconds for stage in alone if stage.result}
    for gap in run.gaps:
        if gap.stage in whole:
            whole[gap.stage] -= float(_finite(gap.seconds))
    pauses = [
        whole.pop(evaluation.stage, float(_finite(evaluation.seconds)))
        for evaluation in run.evaluations
    ]
    places = np.searchsorted(step, values_of(run.evaluations, "step"))
    # The pauses before each update, so that its end has all earlier evaluations in it.
    before = np.bincount(places, pauses, minlength=len(ends)).cumsum()
    return ends[1:] + before[:-1], ends[places] + np.cumsum(pauses)


def _finite(seconds: float | FloatArray) -> FloatArray:
    return np.nan_to_num(seconds, posinf=0.0)


def evaluations_of(run: Run) -> RunCourse:
    """Return every evaluation of what was kept; times are NaN where a checkpoint was polished."""
    evaluations = run.kept_evaluations
    seconds = _clock(run)[1]
    if not run.steps:
        seconds[:] = math.nan
    stages = [stage.name for stage in run.stages if stage.kept]
    return RunCourse(
        epoch=values_of(evaluations, "epoch"),
        seconds=seconds[np.isin([evaluation.stage for evaluation in run.evaluations], stages)],
        loss=values_of(evaluations, "loss"),
        top1=100 * values_of(evaluations, "top1"),
    )


def updates_of(run: Run) -> RunCourse:
    """Return as many updates as a chart shows, with the running median over all of them."""
    step = values_of(run.steps, "step")
    loss = thin(step, values_of(run.steps, "loss"))
    return RunCourse(
        epoch=np.array([run.plan.epoch(int(number) + 1) for number in loss.step]),
        seconds=_clock(run)[0][np.searchsorted(step, loss.step)],
        loss=loss.trend,
        top1=np.empty(0),
    )


class Thinned(NamedTuple):
    """A series in at most POINTS bins of neighbouring steps."""

    step: FloatArray
    low: FloatArray
    high: FloatArray
    trend: FloatArray
    """Running median over a twenty-fifth of the bins; NaN where a bin has no finite number."""


def thin(step: FloatArray, values: FloatArray) -> Thinned:
    """Keep the extremes of every bin, so that no spike is lost; pass over what is not finite."""
    if not values.size:
        return Thinned(*[np.empty(0)] * 4)
    values = np.where(np.isfinite(values), values, math.nan)
    starts = np.linspace(0, len(values), min(len(values), POINTS), endpoint=False).astype(int)
    middle = np.array([median(part) for part in np.split(values, starts[1:])])
    reach = len(middle) // 50
    trend = [median(middle[max(0, i - reach) : i + reach + 1]) for i in range(len(middle))]
    return Thinned(
        step=step[starts],
        low=np.fmin.reduceat(values, starts),
        high=np.fmax.reduceat(values, starts),
        trend=np.where(np.isnan(middle), math.nan, trend),
    )


def ceiling(values: FloatArray) -> float:
    """Return where an axis from 0 may end, without the first value and rare peaks."""
    settled = values[1:] if len(values) > 1 else values
    finite = settled[np.isfinite(settled)]
    return float(np.quantile(finite, 0.99)) * 1.25 if finite.size else 1.0


def needs_log_scale(losses: FloatArray) -> bool:
    """Return True if a linear axis would press most of these losses together at its bottom."""
    shown = losses[np.isfinite(losses) & (losses > 0)]
    return bool(shown.size and shown.max() > min(100 * shown.min(), 10 * median(shown)))

"""The course of a run over steps, epochs, images and seconds.

Time is the sum over updates, evaluations and stages without updates, each counted once. Starting,
saving and repeated work of a resumed run are excluded, so that interrupted runs can be compared
with others.
"""

import math
from dataclasses import dataclass

import numpy as np

from largebatch.report.run import FloatArray, Run, median

POINTS = 500  # more updates cannot be told apart in a chart


@dataclass(frozen=True, slots=True)
class Course:
    """What a run had reached, by evaluations of what was kept, or by updates. One row each."""

    step: FloatArray
    """Updates made."""

    epoch: FloatArray
    images: FloatArray
    seconds: FloatArray
    """NaN in a run without updates, whose model was trained in another."""

    loss: FloatArray
    """On validation images at an evaluation; of updates the running median of the training loss."""

    top1: FloatArray
    """In percent; empty for updates."""

    stages: tuple[str, ...]

    def first_at(self, target: float) -> int | None:
        """Return the row of the first evaluation with this top-1 in percent; None without one.

        What a part of 1 loses when it is multiplied by 100 does not miss a target.
        """
        reached = np.flatnonzero(self.top1 >= target - 1e-9)
        return int(reached[0]) if reached.size else None


def _clock(run: Run) -> tuple[FloatArray, FloatArray]:
    """Return the seconds from the run's begin to each update's end, and to each evaluation's.

    How long a stage without updates took is in the summary; without one its evaluation is counted.
    What is only monitored at its end is not.
    """
    lengths = np.array([_seconds(run, place) for place in range(len(run.steps))])
    ends = np.concatenate(([0.0], np.cumsum(lengths)))
    steps = np.array([step.step for step in run.steps])
    logged = {step.stage for step in run.steps}
    whole = {stage.name: stage.result.seconds for stage in run.stages if stage.result}
    for gap in run.gaps:
        if gap.stage in whole:
            whole[gap.stage] -= _finite(gap.seconds)
    others, evaluations = 0.0, []
    pauses = np.zeros(len(run.steps))
    for found in run.evaluations:
        alone = found.stage not in logged and found.stage in whole
        pause = whole.pop(found.stage) if alone else _finite(found.seconds)
        others += pause
        place = int(np.searchsorted(steps, found.step))
        pauses[place:] += pause
        evaluations.append(float(ends[place]) + others)
    return ends[1:] + pauses, np.array(evaluations)


def _seconds(run: Run, place: int) -> float:
    step = run.steps[place]
    if math.isfinite(step.step_seconds):
        return step.step_seconds
    rate = step.images_per_second
    return _finite(run.plan.batch_at(step.step) / rate) if rate > 0 else 0.0


def _finite(seconds: float) -> float:
    return seconds if math.isfinite(seconds) else 0.0


def evaluations_of(run: Run) -> Course:
    """Return every evaluation of what was kept; times are NaN where a checkpoint was polished."""
    undone = {stage.name for stage in run.stages if not stage.kept}
    every = zip(run.evaluations, _clock(run)[1], strict=True)
    kept = [(found, seconds) for found, seconds in every if found.stage not in undone]
    return Course(
        step=np.array([found.step for found, _ in kept], dtype=np.float64),
        epoch=np.array([found.epoch for found, _ in kept], dtype=np.float64),
        images=np.array([run.plan.position(found.step) for found, _ in kept], dtype=np.float64),
        seconds=np.array([seconds if run.steps else math.nan for _, seconds in kept]),
        loss=np.array([found.loss for found, _ in kept], dtype=np.float64),
        top1=np.array([100 * found.top1 for found, _ in kept], dtype=np.float64),
        stages=tuple(found.stage for found, _ in kept),
    )


def updates_of(run: Run) -> Course:
    """Return as many updates as a chart shows, with the running median over all of them."""
    step = np.array([each.step for each in run.steps], dtype=np.float64)
    loss = thin(step, np.array([each.loss for each in run.steps], dtype=np.float64))
    places = np.searchsorted(step, loss.step)
    made = [run.steps[place].step + 1 for place in places]
    return Course(
        step=np.array(made, dtype=np.float64),
        epoch=np.array([run.plan.epoch(count) for count in made]),
        images=np.array([run.plan.position(count) for count in made], dtype=np.float64),
        seconds=_clock(run)[0][places],
        loss=loss.trend,
        top1=np.empty(0),
        stages=tuple(run.steps[place].stage for place in places),
    )


@dataclass(frozen=True, slots=True)
class Thinned:
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

"""What a run looks like: loss, accuracy and training speed; and a recipe, its learning rate.

Each drawing fits any figure or part of one, so that the page, the PNG files and the overview show
the same at their own sizes. A stage has one colour and one marker everywhere. As many numbers as a
run has steps become as many as a chart can show (`thin`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from largebatch.formatting import percent, points
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.report.run import (
    FloatArray,
    Run,
    Stage,
    Trace,
    images_per_second,
    median,
)
from largebatch.report.style import (
    COLOURS,
    INK,
    MARKERS,
    MUTED,
    is_wide,
    name_axes,
    name_line,
    write_chart,
    write_title,
)
from largebatch.schedules.build import Course

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Canvas, Figure

POINTS = 500
"""More do not fit side by side in a chart."""


def draw_loss(figure: "Canvas", run: Run) -> None:
    """Draw the losses by step, and the learning rate below them on the same axis."""
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for trace in run.traces:
        draw_series(top, trace, trace.loss)
        bottom.plot(trace.step, trace.lr, color=COLOURS[trace.stage], marker=_lonely(trace.step))
    losses = [*(step.loss for step in run.steps), *(found.loss for found in run.evaluations)]
    if needs_log_scale(np.array(losses)):
        top.set_yscale("log")
        top.minorticks_off()
        top.yaxis.set_major_formatter("{x:g}")
    peak = max(step.lr for step in run.steps)
    bottom.set_yticks(sorted({0, peak}))
    bottom.yaxis.set_major_formatter("{x:.3g}")
    bottom.grid(visible=False)
    mark_stages(top, run)
    title = name_axes(top, y="Loss")
    title = name_line(top, "training", COLOURS[run.traces[0].stage], after=title)
    if run.evaluations:
        top.plot(
            [evaluation.step for evaluation in run.evaluations],
            [evaluation.loss for evaluation in run.evaluations],
            color=INK, lw=0.8, marker="o", ms=5.5, clip_on=False,
        )  # fmt: skip
        name_line(top, "validation", INK, after=title)
    name_axes(bottom, y="Learning rate", x="Step")


def needs_log_scale(losses: FloatArray) -> bool:
    """Return True if a linear axis would press most of these losses together at its bottom.

    >>> [needs_log_scale(np.array([first, 0.6, 0.5, 0.6])) for first in (2.3, 114.0)]
    [False, True]
    """
    shown = losses[np.isfinite(losses) & (losses > 0)]
    return bool(shown.size and shown.max() > min(100 * shown.min(), 10 * median(shown)))


def draw_accuracy(figure: "Canvas", run: Run) -> None:
    """Draw top-1 over the run, and how the stages changed it."""
    if len(run.stages) == 1:
        return _draw_curve(figure.subplots(), run)
    if len({evaluation.step for evaluation in run.evaluations}) == 1:
        return _draw_slopes(figure.subplots(), run)
    if is_wide(figure):
        during, after = figure.subplots(1, 2, width_ratios=[6, len(run.stages)])
    else:
        during, after = figure.subplots(2, 1, height_ratios=[1.2, 1])
    _draw_curve(during, run)
    return _draw_slopes(after, run)


def _draw_curve(axes: "Axes", run: Run) -> None:
    """Draw top-1 over the whole run; name its last value where no other chart does."""
    kept = run.kept_evaluations
    epochs = [evaluation.epoch for evaluation in kept]
    top1 = [100 * evaluation.top1 for evaluation in kept]
    axes.plot(epochs, top1, color=MUTED, lw=1)
    for stage in run.stages:
        found = [evaluation for evaluation in run.evaluations if evaluation.stage == stage.name]
        _draw_points(
            axes,
            [evaluation.epoch for evaluation in found],
            [100 * evaluation.top1 for evaluation in found],
            stage,
            size=6,
        )
    if len(run.stages) == 1:
        axes.annotate(
            percent(run.evaluations[-1].top1), (epochs[-1], top1[-1]), (0, 9), ha="right",
            textcoords="offset points", color=COLOURS[run.stages[0].name], weight="bold",
        )  # fmt: skip
    axes.xaxis.set_major_formatter("{x:,g}")
    name_axes(axes, y="Top-1, %", x="Epoch")


def draw_metric(figure: "Canvas", run: Run) -> None:
    """Draw the metric of the task over the run, and name its last value."""
    axes, metric = figure.subplots(), run.task.metric
    epochs = [found.epoch for found in run.evaluations]
    values = [metric.shown(found) for found in run.evaluations]
    stage = run.stages[0]
    axes.plot(epochs, values, color=MUTED, lw=1)
    _draw_points(axes, epochs, values, stage, size=6)
    axes.annotate(
        f"{values[-1]:.2f}", (epochs[-1], values[-1]), (-9, -1), ha="right", va="center",
        textcoords="offset points", color=COLOURS[stage.name], weight="bold",
    )  # fmt: skip
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_formatter("{x:,g}")
    better = "lower" if metric.lower_is_better else "higher"
    unit = f", {metric.unit}" if metric.unit else ""
    name_axes(axes, y=f"{metric.title}{unit}, {better} is better", x="Epoch")


def _draw_slopes(axes: "Axes", run: Run) -> None:
    """Draw top-1 after each stage on a scale of its own, every point with its value."""
    values = [100 * stage.after.top1 for stage in run.stages]
    kept = [place for place, stage in enumerate(run.stages) if stage.kept]
    axes.plot(kept, [values[place] for place in kept], color=MUTED, lw=1)
    for place, (stage, value) in enumerate(zip(run.stages, values, strict=True)):
        colour = COLOURS[stage.name]
        _draw_points(axes, [place], [value], stage, size=8)
        x, y = _label_offset(values, place)
        axes.annotate(
            percent(stage.after.top1), (place, value), (x, y), textcoords="offset points",
            ha={-9: "right", 0: "center", 9: "left"}[x], va="bottom" if y > 0 else "top",
            color=colour, weight="bold",
        )  # fmt: skip
    span = max(np.ptp(values), 0.2)
    axes.set_ylim(min(values) - 0.4 * span, max(values) + 0.4 * span)
    axes.set_xlim(-0.5, len(values) - 0.5)
    size = (9.5 if len(run.stages) < 6 else 8) if run.decisions else 11
    for place, stage in enumerate(run.stages):
        for row, line in enumerate(_stage_lines(stage)):
            axes.annotate(
                line, (place, 0), (0, -1.3 * size * row), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", va="top", size=size,
                color=COLOURS[stage.name],
            )  # fmt: skip
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines["bottom"].set_visible(False)
    name_axes(axes, y="Top-1 after each stage, %")


def _draw_points(
    axes: "Axes", x: Sequence[float], y: Sequence[float], stage: Stage, *, size: float
) -> None:
    """Draw the markers of a stage, hollow if it was discarded."""
    colour = COLOURS[stage.name]
    (markers,) = axes.plot(
        x, y, color=colour, marker=MARKERS[stage.name], ms=size, lw=0, clip_on=False
    )
    if not stage.kept:
        markers.set(markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1.5)


def _stage_lines(stage: Stage) -> Iterator[str]:
    """Yield what stands below a stage: its name, what it changed, and what came of that."""
    yield stage.name
    if stage.before is not None:
        yield points(stage.before.top1, stage.after.top1)
    if stage.decision is not None:
        yield "held out"
        yield points(stage.decision.before, stage.decision.after)
        yield "kept" if stage.kept else "discarded"


def _label_offset(values: Sequence[float], place: int) -> tuple[int, int]:
    """Return where, in points, a label lies clear of the lines to the point's neighbours."""
    neighbours = [*values[max(0, place - 1) : place], *values[place + 1 : place + 2]]
    if min(neighbours) < values[place] < max(neighbours):
        return (-9 if neighbours[0] < neighbours[1] else 9), 2
    return 0, 9 if values[place] >= max(neighbours) else -9


def draw_throughput(figure: "Canvas", run: Run) -> None:
    """Draw training images per second by step, from 0 on."""
    axes = figure.subplots()
    for trace in run.traces:
        draw_series(axes, trace, trace.images_per_second)
    axes.set_ylim(0, ceiling(np.array([step.images_per_second for step in run.steps])))
    rate = images_per_second(run)
    if rate is not None:
        axes.axhline(rate, color=INK, lw=0.8, ls=(0, (5, 4)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    mark_stages(axes, run)
    name_axes(axes, y=f"{run.task.samples.capitalize()} per second", x="Step")


def draw_series(axes: "Axes", trace: Trace, values: FloatArray) -> None:
    """Draw every step faint and the running median over it."""
    thinned = thin(trace.step, values)
    colour = COLOURS[trace.stage]
    extremes = np.column_stack((thinned.low, thinned.high)).ravel()
    axes.plot(np.repeat(thinned.step, 2), extremes, color=colour, lw=0.8, alpha=0.3)
    axes.plot(thinned.step, thinned.trend, color=colour, marker=_lonely(thinned.step))


def _lonely(steps: FloatArray) -> str:
    """Return the marker of a line: one where a single step would not show as a line."""
    return "o" if len(steps) == 1 else ""


def mark_stages(axes: "Axes", run: Run) -> None:
    """Shade every stage but the first, and name them where that one ends."""
    first, end = run.steps[0].step, run.steps[-1].step + 1
    axes.set_xlim(first - 0.5, end)
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _mark_changes(axes, run.plan, first=first, end=end)
    if len(run.traces) < 2:
        return
    ends = [trace.step[0] for trace in run.traces[2:]] + [end]
    for trace, stop in zip(run.traces[1:], ends, strict=True):
        axes.axvspan(trace.step[0], stop, color=COLOURS[trace.stage], alpha=0.08, lw=0)
    border = max(run.traces[1].step[0], first + 0.75 * (end - first))  # the title has the left
    for trace, offset, side in zip(run.traces, (-6, 0), ("right", "left"), strict=False):
        text = axes.annotate(
            trace.stage, (border, 1), (offset, 8), xycoords=axes.get_xaxis_transform(),
            textcoords="offset points", ha=side, color=COLOURS[trace.stage],
        )  # fmt: skip
    for trace in run.traces[2:]:
        text = axes.annotate(
            trace.stage, (1, 1), (6, 8), xycoords=(text, "axes fraction"),
            textcoords="offset points", color=COLOURS[trace.stage],
        )  # fmt: skip


def _mark_changes(axes: "Axes", plan: Plan, *, first: int, end: int) -> None:
    """Draw a line where the global batch or the image size changes, with what it becomes."""
    later = zip(plan.sizes, plan.sizes[1:], strict=False)
    sizes = [(before.end, f"{piece.image_size} px") for before, piece in later]
    batches = [(piece.step, f"batch {piece.global_batch:,}") for piece in plan.batch_changes]
    for changes, down in ((batches, -3), (sizes, -13)):
        for step, text in changes:
            if first <= step < end:
                axes.axvline(step, color=MUTED, lw=0.8, ls=(0, (1, 2)))
                axes.annotate(
                    text, (step, 1), (3, down), xycoords=axes.get_xaxis_transform(),
                    textcoords="offset points", va="top", color=MUTED, size=8,
                )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Thinned:
    """A series in at most POINTS bins of neighbouring steps."""

    step: FloatArray
    low: FloatArray
    high: FloatArray
    trend: FloatArray
    """Running median over a twenty-fifth of the bins; NaN where a bin has no finite number."""


def thin(step: FloatArray, values: FloatArray) -> Thinned:
    """Keep the extremes of every bin, so that no spike is lost; pass over what is not finite.

    >>> thin(np.arange(3.0), np.array([1.0, math.nan, 2.0])).trend
    array([ 1., nan,  2.])
    """
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
    """Return where an axis from 0 may end: the first value, which warms up, and rare peaks aside.

    >>> ceiling(np.array([1e6, 10.0, 10.0, 10.0]))
    12.5
    """
    settled = values[1:] if len(values) > 1 else values
    finite = settled[np.isfinite(settled)]
    return float(np.quantile(finite, 0.99)) * 1.25 if finite.size else 1.0


def write_rates(path: Path, course: Course, *, name: str) -> None:
    """Draw the rate of every step, by epoch, into a PNG file.

    Raises as write_chart.
    """
    write_chart(path, lambda figure: draw_rates(figure, course, name=name), size=(960, 320))


def draw_rates(figure: "Figure", course: Course, *, name: str) -> None:
    """Draw the warm-up, the training and the clean part, each in its colour."""
    write_title(figure, name)
    axes = figure.subplots()
    end = len(course.rates)
    parts = {
        "warm-up": (0, course.begin, MUTED),
        "train": (course.begin, course.clean, COLOURS["train"]),
        "clean": (max(course.begin, course.clean), end, COLOURS["clean"]),
    }
    title = name_axes(axes, y="Learning rate", x="Epoch")
    for part, (first, last, colour) in parts.items():
        if first < last:
            _draw_part(axes, course, first, last, colour)
            title = name_line(axes, part, colour, after=title)
    axes.axvspan(
        course.epoch(course.clean), course.epoch(end),
        color=COLOURS["clean"], alpha=0.08, lw=0,
    )  # fmt: skip
    axes.set_xlim(0, course.epoch(end))
    axes.set_ylim(0, 1.1 * course.rates[course.peak])
    axes.locator_params(axis="y", nbins=5)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_formatter("{x:g}")
    _name_rates(axes, course)


def _draw_part(axes: "Axes", course: Course, first: int, last: int, colour: str) -> None:
    """Draw the steps from `first` up to `last`, each rate as long as its step lasts."""
    rates = [*course.rates[first : last + 1], course.rates[-1]][: last - first + 1]
    epochs = [course.epoch(step) for step in range(first, last + 1)]
    axes.plot(epochs, rates, color=colour, drawstyle="steps-post", clip_on=False)


def _name_rates(axes: "Axes", course: Course) -> None:
    """Write every rate on its stretch where these are few, else the peak and the last rate."""
    for step in course.stretches or (course.peak,):
        place = course.epoch(step), course.rates[step]
        _write(axes, f"{course.rates[step]:.3g}", place, offset=(4, 5))
    if not course.stretches:
        place = course.epoch(len(course.rates)), course.rates[-1]
        _write(axes, f"{course.rates[-1]:.3g}", place, offset=(6, 0))


def _write(
    axes: "Axes", text: str, place: tuple[float, float], *, offset: tuple[float, float]
) -> None:
    axes.annotate(
        text, place, offset, textcoords="offset points", va="bottom" if offset[1] else "center",
        annotation_clip=False,
    )  # fmt: skip

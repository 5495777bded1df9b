"""The charts of one run: loss, accuracy, speed and noise scale.

Each drawing fits any figure or part of one, so that the page and the overview show the same at
their own sizes. A stage has one colour and one marker everywhere. A run's many updates become as
many points as a chart can show (`course.thin`).
"""

from collections.abc import Sized
from typing import TYPE_CHECKING

import numpy as np

from largebatch.report.course import ceiling, needs_log_scale, thin
from largebatch.report.noise import course
from largebatch.report.run import Run, images_per_second, values_of
from largebatch.report.style import COLOURS, INK, MUTED, looks_of, name_axes, name_line

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Canvas


def draw_loss(figure: "Canvas", run: Run) -> None:
    """Draw the losses by step, and the learning rate below them on the same axis."""
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    draw_updates(top, run, "loss")
    looks = looks_of(run.stage_names)
    for stage, steps in run.by_stage.items():
        x = values_of(steps, "step")
        bottom.plot(x, values_of(steps, "lr"), color=looks[stage].colour, marker=_lonely(x))
    if needs_log_scale(values_of([*run.steps, *run.evaluations], "loss")):
        top.set_yscale("log")
        top.minorticks_off()
        top.yaxis.set_major_formatter("{x:g}")
    peak = max(step.lr for step in run.steps)
    bottom.set_yticks(sorted({0, peak}))
    bottom.yaxis.set_major_formatter("{x:.3g}")
    bottom.grid(visible=False)
    mark_stages(top, run)
    title = name_axes(top, y="Loss")
    training = "training (mixed images)" if run.steps[0].mixed else "training"
    title = name_line(top, training, looks[run.steps[0].stage].colour, after=title)
    if run.evaluations:
        x, losses = values_of(run.evaluations, "step"), values_of(run.evaluations, "loss")
        top.plot(x, losses, color=INK, lw=0.8, marker="o", ms=5.5, clip_on=False)
        name_line(top, "validation", INK, after=title)
    name_axes(bottom, y="Learning rate", x="Step")


def draw_accuracy(figure: "Canvas", run: Run) -> None:
    """Draw top-1 by epoch, with a mark for each evaluation in the look of its stage."""
    axes = figure.subplots()
    evaluations = run.kept_evaluations
    # A grey line connects the marks, which stages draw over it.
    axes.plot(
        values_of(evaluations, "epoch"), 100 * values_of(evaluations, "top1"), color=MUTED, lw=1
    )
    looks = looks_of(run.stage_names)
    by_stage = [
        [evaluation for evaluation in run.evaluations if evaluation.stage == stage.name]
        for stage in run.stages
    ]
    for number, (stage, of_stage) in enumerate(zip(run.stages, by_stage, strict=True)):
        # A stage without updates ends where the one before it does: its mark is within that one's.
        later = [evaluation.epoch for those in by_stage[number + 1 :] for evaluation in those]
        size = 6 + 3 * later.count(of_stage[-1].epoch) if of_stage else 6
        axes.plot(
            values_of(of_stage, "epoch"), 100 * values_of(of_stage, "top1"),
            color=looks[stage.name].colour, marker=looks[stage.name].marker, ms=size, lw=0,
            clip_on=False, markerfacecolor=None if stage.kept else "none", label=stage.name,
        )  # fmt: skip
    if run.stages[1:]:
        axes.legend(loc="lower right", frameon=False)
    axes.xaxis.set_major_formatter("{x:,g}")
    name_axes(axes, y="Top-1, %", x="Epoch")


def draw_throughput(figure: "Canvas", run: Run) -> None:
    """Draw training images per second by step, from 0 on."""
    axes = figure.subplots()
    draw_updates(axes, run, "images_per_second")
    axes.set_ylim(0, ceiling(values_of(run.steps, "images_per_second")))
    rate = images_per_second(run)
    if rate is not None:
        axes.axhline(rate, color=INK, lw=0.8, ls=(0, (5, 4)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    mark_stages(axes, run)
    name_axes(axes, y="Images per second", x="Step")


def draw_updates(axes: "Axes", run: Run, name: str) -> None:
    """Draw a value of every update faint, and the running median over it."""
    looks = looks_of(run.stage_names)
    for stage, steps in run.by_stage.items():
        colour = looks[stage].colour
        thinned = thin(values_of(steps, "step"), values_of(steps, name))
        extremes = np.column_stack((thinned.low, thinned.high)).ravel()
        axes.plot(np.repeat(thinned.step, 2), extremes, color=colour, lw=0.8, alpha=0.3)
        axes.plot(thinned.step, thinned.trend, color=colour, marker=_lonely(thinned.step))


def _lonely(steps: Sized) -> str:
    """Return the marker of a line: one where a single step would not show as a line."""
    return "o" if len(steps) == 1 else ""


def mark_stages(axes: "Axes", run: Run) -> None:
    """Shade every stage but the first; mark where stages, batches and image sizes change."""
    first, end = run.steps[0].step, run.steps[-1].step + 1
    axes.set_xlim(first - 0.5, end)
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    starts = [(steps[0].step, stage) for stage, steps in run.by_stage.items()][1:]
    ends = [*(start for start, _ in starts[1:]), end]
    looks = looks_of(run.stage_names)
    for (start, stage), stop in zip(starts, ends, strict=False):
        axes.axvspan(start, stop, color=looks[stage].colour, alpha=0.08, lw=0)
    sizes = zip(run.plan.sizes, run.plan.sizes[1:], strict=False)
    marks = [(before.end, f"{after.image_size} px", MUTED) for before, after in sizes]
    marks += [
        (change.step, f"batch {change.global_batch:,}", MUTED) for change in run.plan.batch_changes
    ]
    if 0 < run.plan.mix_steps < run.plan.train_steps:
        marks.append((run.plan.mix_steps, "not mixed", MUTED))
    marks += [(start, stage, looks[stage].colour) for start, stage in starts]
    visible_marks = [mark for mark in sorted(marks) if first <= mark[0] < end]
    for row, (step, text, colour) in enumerate(visible_marks):
        axes.axvline(step, color=colour, lw=0.8, ls=(0, (1, 2)))
        axes.annotate(
            text, (step, 1), (-3, -3 - 11 * (row % 3)), xycoords=axes.get_xaxis_transform(),
            textcoords="offset points", ha="right", va="top", color=colour, size=9,
        )  # fmt: skip


def draw_monitors(figure: "Canvas", run: Run) -> None:
    """Draw the numbers of the monitors of other packages by step, each on axes of its own."""
    names = run.measured
    every = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(every, names, strict=True):
        steps = [step for step in run.steps if name in step.measured]
        thinned = thin(values_of(steps, "step"), np.array([it.measured[name] for it in steps]))
        axes.plot(thinned.step, thinned.trend, color=COLOURS["train"], marker=_lonely(steps))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        name_axes(axes, y=name, x="Step" if axes is every[-1] else None)


def draw_noise(figure: "Canvas", run: Run) -> None:
    """Draw the noise scale with its intervals by step, and the global batch."""
    axes = figure.subplots()
    parts = course(run)
    positive = [part for part in parts if part.scale.value > 0]
    middle = [(part.first + part.last) / 2 for part in positive]
    estimates = [part.scale for part in positive]
    values, low, high = (values_of(estimates, name) for name in ("value", "low", "high"))
    top = 2 * max([*values, *high[np.isfinite(high)]], default=1.0)
    below = values - np.maximum(low, min(values, default=1.0) / 10)
    above = np.minimum(high, top) - values
    bars = np.clip((below, above), 0, None)  # rounding of an interval without width
    axes.errorbar(middle, values, bars, color=COLOURS["train"], marker="o", ms=5, elinewidth=1)
    batches = [run.plan.batch_at(part.first) for part in (*parts, parts[-1])]
    x = [*(part.first for part in parts), parts[-1].last]
    axes.step(x, batches, where="post", color=INK, lw=0.8)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    title = name_axes(axes, y="Samples", x="Step")
    title = name_line(axes, "noise scale", COLOURS["train"], after=title)
    name_line(axes, "global batch", INK, after=title)

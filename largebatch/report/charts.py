"""The charts of one run: loss, accuracy, speed, noise scale and trust ratios.

Each drawing fits any figure or part of one, so that the page and the overview show the same at
their own sizes. A stage has one colour and one marker everywhere. A run's many updates become as
many points as a chart can show (`course.thin`).
"""

import math
from collections.abc import Callable, Sized
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from largebatch.report.course import ceiling, needs_log_scale, thin
from largebatch.report.noise import course
from largebatch.report.run import Run, images_per_second, median
from largebatch.report.style import (
    COLOURS,
    INK,
    MARKERS,
    MUTED,
    RULE,
    name_axes,
    name_line,
)
from largebatch.tracking.events import Step

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Canvas

_RATIO_BINS = 200  # more columns cannot be told apart in a chart


def draw_loss(figure: "Canvas", run: Run) -> None:
    """Draw the losses by step, and the learning rate below them on the same axis."""
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    draw_updates(top, run, attrgetter("loss"))
    for stage, steps in run.by_stage.items():
        x, rates = [step.step for step in steps], [step.lr for step in steps]
        bottom.plot(x, rates, color=COLOURS[stage], marker=_lonely(x))
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
    title = name_line(top, "training", COLOURS[run.steps[0].stage], after=title)
    if run.evaluations:
        top.plot(
            [evaluation.step for evaluation in run.evaluations],
            [evaluation.loss for evaluation in run.evaluations],
            color=INK, lw=0.8, marker="o", ms=5.5, clip_on=False,
        )  # fmt: skip
        name_line(top, "validation", INK, after=title)
    name_axes(bottom, y="Learning rate", x="Step")


def draw_accuracy(figure: "Canvas", run: Run) -> None:
    """Draw top-1 by epoch, with a mark for each evaluation in the look of its stage."""
    axes, kept = figure.subplots(), run.kept_evaluations
    axes.plot(
        [found.epoch for found in kept], [100 * found.top1 for found in kept], color=MUTED, lw=1
    )
    by_stage = [[each for each in run.evaluations if each.stage == it.name] for it in run.stages]
    for place, (stage, found) in enumerate(zip(run.stages, by_stage, strict=True)):
        # A stage without updates ends where the one before it does: its mark is within that one's.
        later = [each.epoch for those in by_stage[place + 1 :] for each in those]
        size = 6 + 3 * later.count(found[-1].epoch) if found else 6
        axes.plot(
            [each.epoch for each in found], [100 * each.top1 for each in found],
            color=COLOURS[stage.name], marker=MARKERS[stage.name], ms=size, lw=0, clip_on=False,
            markerfacecolor=None if stage.kept else "none", label=stage.name,
        )  # fmt: skip
    if run.stages[1:]:
        axes.legend(loc="lower right", frameon=False)
    axes.xaxis.set_major_formatter("{x:,g}")
    name_axes(axes, y="Top-1, %", x="Epoch")


def draw_throughput(figure: "Canvas", run: Run) -> None:
    """Draw training images per second by step, from 0 on."""
    axes = figure.subplots()
    draw_updates(axes, run, attrgetter("images_per_second"))
    axes.set_ylim(0, ceiling(np.array([step.images_per_second for step in run.steps])))
    rate = images_per_second(run)
    if rate is not None:
        axes.axhline(rate, color=INK, lw=0.8, ls=(0, (5, 4)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    mark_stages(axes, run)
    name_axes(axes, y="Images per second", x="Step")


def draw_updates(axes: "Axes", run: Run, value: Callable[[Step], float]) -> None:
    """Draw a value of every update faint, and the running median over it."""
    for stage, steps in run.by_stage.items():
        thinned = thin(
            np.array([step.step for step in steps], dtype=np.float64),
            np.array([value(step) for step in steps]),
        )
        extremes = np.column_stack((thinned.low, thinned.high)).ravel()
        axes.plot(np.repeat(thinned.step, 2), extremes, color=COLOURS[stage], lw=0.8, alpha=0.3)
        axes.plot(thinned.step, thinned.trend, color=COLOURS[stage], marker=_lonely(thinned.step))


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
    for (start, stage), stop in zip(starts, ends, strict=False):
        axes.axvspan(start, stop, color=COLOURS[stage], alpha=0.08, lw=0)
    sizes = zip(run.plan.sizes, run.plan.sizes[1:], strict=False)
    marks = [(before.end, f"{after.image_size} px", MUTED) for before, after in sizes]
    marks += [(one.step, f"batch {one.global_batch:,}", MUTED) for one in run.plan.batch_changes]
    marks += [(start, stage, COLOURS[stage]) for start, stage in starts]
    shown = [mark for mark in sorted(marks) if first <= mark[0] < end]
    for row, (step, text, colour) in enumerate(shown):
        axes.axvline(step, color=colour, lw=0.8, ls=(0, (1, 2)))
        axes.annotate(
            text, (step, 1), (-3, -3 - 11 * (row % 3)), xycoords=axes.get_xaxis_transform(),
            textcoords="offset points", ha="right", va="top", color=colour, size=9,
        )  # fmt: skip


def draw_noise(figure: "Canvas", run: Run) -> None:
    """Draw the noise scale with its intervals by step, and the global batch."""
    axes = figure.subplots()
    parts = course(run)
    known = [part for part in parts if part.found.value > 0]
    middle = [(part.first + part.last) / 2 for part in known]
    values = [part.found.value for part in known]
    ends = [value for part in known for value in (part.found.low, part.found.high)]
    top = 2 * max([value for value in ends if math.isfinite(value)] + values, default=1.0)
    bottom = min(values, default=1.0) / 10
    for x, part in zip(middle, known, strict=True):
        bar = [max(part.found.low, bottom), min(part.found.high, top)]
        axes.plot([x, x], bar, color=COLOURS["train"], lw=1)
    axes.plot(middle, values, color=COLOURS["train"], marker="o", ms=5)
    batches = [run.plan.batch_at(part.first) for part in parts]
    axes.step(
        [*(part.first for part in parts), parts[-1].last], [*batches, batches[-1]],
        where="post", color=INK, lw=0.8,
    )  # fmt: skip
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    title = name_axes(axes, y="Samples", x="Step")
    title = name_line(axes, "noise scale", COLOURS["train"], after=title)
    name_line(axes, "global batch", INK, after=title)


def layers(run: Run) -> tuple[str, ...]:
    """Return the names of the layers whose trust ratios a run recorded; none if it did not."""
    named = [start.layers for start in run.starts if start.layers]
    adapted = any(step.trust_ratios for step in run.steps)
    return named[-1] if named and adapted else ()


def draw_ratios(figure: "Canvas", run: Run) -> None:
    """Draw the trust ratios as a heat map: a row for each layer, from the input at the top.

    One scale from dark blue to yellow, which colour-blind people see as everyone does, and which
    becomes lighter all the way, so that it prints in grey.
    """
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    names = layers(run)
    steps = [step for step in run.steps if len(step.trust_ratios) == len(names)]
    table = np.array([step.trust_ratios for step in steps], dtype=np.float64)
    starts = np.linspace(0, len(steps), min(len(steps), _RATIO_BINS), endpoint=False).astype(int)
    parts = np.split(table, starts[1:])
    cells = np.array([[median(column) for column in part.T] for part in parts]).T
    found = cells[np.isfinite(cells) & (cells > 0)]
    axes = figure.subplots()
    edges = [*(steps[start].step for start in starts), steps[-1].step + 1]
    image = axes.pcolormesh(
        edges,
        np.arange(len(names) + 1),
        np.ma.masked_invalid(cells),
        cmap=colormaps["cividis"].with_extremes(bad=RULE, under=RULE),
        norm=LogNorm(found.min(initial=1.0), found.max(initial=found.min(initial=1.0) * 1.01)),
        rasterized=True,
    )
    points = 72 / figure.dpi
    bar = figure.colorbar(
        image, ax=axes, location="top", aspect=figure.bbox.width * points / 24, format="{x:g}",
        pad=6 / points / figure.bbox.height,
    )  # fmt: skip
    bar.minorticks_off()
    bar.outline.set_visible(False)
    bar.ax.set_title("Trust ratio")
    room = max(1, int((figure.bbox.height * points - 120) / 13))
    every = -(-len(names) // room)  # names as many layers as there is room for
    shown = [name.removesuffix(".weight")[-22:] for name in names[::every]]
    axes.set_yticks(np.arange(len(names))[::every] + 0.5, shown)
    axes.tick_params(length=0)
    axes.tick_params(axis="y", labelsize=9)
    axes.set_ylim(len(names), 0)
    axes.grid(visible=False)
    axes.set_xlabel("Step →", loc="right")
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")

"""The charts of one run: loss, accuracy, speed, waits, noise scale, drift, monitors, mistakes.

Each drawing fits any figure or part of one, so that the page, the PNG files and the overview show
the same at their own sizes. A stage has one colour and one marker everywhere. A run's many updates
become as many points as a chart can show (`course.thin`).
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

from largebatch.formatting import percent, points
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.report.course import ceiling, needs_log_scale, thin
from largebatch.report.mistakes import confusion
from largebatch.report.noise import course
from largebatch.report.run import FloatArray, Run, Stage, Trace, images_per_second, median
from largebatch.report.style import (
    COLOURS,
    HIGH,
    INK,
    LOW,
    MARKERS,
    MUTED,
    PAPER,
    RULE,
    is_wide,
    name_axes,
    name_line,
)
from largebatch.tracking.events import Drift

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Canvas

_WAIT_BINS, _RATIO_BINS = 100, 200  # more columns cannot be told apart in a chart

_LEAST = 0.01
"""The least end of a scale of drift, so that small changes are pale."""

_SHADES = 15  # on either side of the middle


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


def _draw_slopes(axes: "Axes", run: Run) -> None:
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
    colour = COLOURS[stage.name]
    (markers,) = axes.plot(
        x, y, color=colour, marker=MARKERS[stage.name], ms=size, lw=0, clip_on=False
    )
    if not stage.kept:
        markers.set(markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1.5)


def _stage_lines(stage: Stage) -> Iterator[str]:
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
    name_axes(axes, y="Images per second", x="Step")


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


def draw_waits(figure: "Canvas", run: Run) -> None:
    """Draw the shares by step, one above the other up to all of the time."""
    axes = figure.subplots()
    steps = run.timed
    table = np.array(
        [
            (step.step, step.data_seconds, step.reduction_seconds, step.step_seconds)
            for step in steps
        ]
    )
    starts = np.linspace(0, len(table), min(len(table), _WAIT_BINS), endpoint=False).astype(int)
    _, data, reduction, whole = np.add.reduceat(table, starts).T
    reduction *= run.plan.workers > 1  # else nothing is sent, and the call itself is computing
    edges = [*table[starts, 0], table[-1, 0] + 1]
    parts = [100 * data / whole, 100 * reduction / whole]
    parts.append(100 - parts[0] - parts[1])
    axes.stackplot(
        edges, *([*part, part[-1]] for part in parts), colors=[HIGH, LOW, RULE], step="post", lw=0
    )  # fmt: skip
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 100)
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    title = name_axes(axes, y="Time, %", x="Step")
    title = name_line(axes, "images", HIGH, after=title)
    if run.plan.workers > 1:
        title = name_line(axes, "gradients", LOW, after=title)
    name_line(axes, "computing", MUTED, after=title)


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
    title = name_line(axes, "global batch", INK, after=title)
    name_line(axes, "bars: 95 %", MUTED, after=title)


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
    bar = figure.colorbar(
        image, ax=axes, location="top", aspect=figure.bbox.width * 72 / figure.dpi / 12,
        pad=6 * figure.dpi / 72 / figure.bbox.height, format="{x:g}",
    )  # fmt: skip
    bar.minorticks_off()
    bar.outline.set_visible(False)
    bar.ax.set_title("Trust ratio")
    roomy = figure.bbox.height * 72 / figure.dpi >= 120 + 13 * len(names)
    name_rows([axes], [name.removesuffix(".weight") for name in names], each=roomy)
    axes.set_xlabel("Step →", loc="right")
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=False)


def draw_norm(figure: "Canvas", run: Run) -> None:
    """Draw the length of the gradient by step, from 0 on unless it changes a hundredfold."""
    axes = figure.subplots()
    for trace in run.traces:
        norms = [step.gradient_norm for step in run.steps if step.stage == trace.stage]
        draw_series(axes, trace, np.array(norms))
    every = np.array([step.gradient_norm for step in run.steps])
    known = every[np.isfinite(every) & (every > 0)]
    if known.size and known.max() > 100 * known.min():
        axes.set_yscale("log")
        axes.minorticks_off()
    else:
        axes.set_ylim(0, ceiling(every))
    axes.yaxis.set_major_formatter("{x:g}")
    mark_stages(axes, run)
    name_axes(axes, y="Length of the gradient", x="Step")


def draw_system(figure: "Canvas", run: Run) -> None:
    """Draw what the workers used of processors, memory and GPUs: the median and the extremes."""
    panels = {
        "Processor, % of a core": _column(run, "cpu_percent"),
        "Memory, GiB": _column(run, "memory_bytes") / 2**30,
        "GPU, % of the time": _column(run, "gpu_percent"),
        "GPU memory, GiB": _column(run, "gpu_memory_bytes") / 2**30,
    }
    measured = {name: table for name, table in panels.items() if np.isfinite(table).any()}
    shape = (-(-len(measured) // 2), 2) if is_wide(figure) else (len(measured), 1)
    grid = figure.subplots(*shape, squeeze=False)
    steps = [record.step for record in run.system]
    for axes, (name, table) in zip(grid.flat, measured.items(), strict=False):
        _draw_workers(axes, steps, table, name=name)
    for axes in grid.flat[len(measured) :]:
        axes.set_axis_off()


def _column(run: Run, name: str) -> FloatArray:
    most = max(len(record.memory_bytes) for record in run.system)
    rows = [getattr(record, name) for record in run.system]  # a resumed run may have other workers
    padded = [[*row, *[np.nan] * (most - len(row))] for row in rows]
    return np.array(padded, dtype=np.float64)


def _draw_workers(axes: "Axes", steps: list[int], table: FloatArray, *, name: str) -> None:
    low, high = np.nanmin(table, axis=1), np.nanmax(table, axis=1)
    colour = COLOURS["train"]
    axes.fill_between(steps, low, high, color=colour, alpha=0.25, lw=0)
    axes.plot(steps, np.nanmedian(table, axis=1), color=colour, marker="o" * (len(steps) == 1))
    axes.set_ylim(0, 1.15 * float(np.nanmax(high)) or 1)
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    title = name_axes(axes, y=name, x="Step")
    if table.shape[1] > 1:
        name_line(axes, "least to most", MUTED, after=title)


def draw_drift(figure: "Canvas", run: Run) -> None:
    """Draw by how much the statistics stage moved the mean and the variance of every channel."""
    drift = run.drift
    assert drift is not None
    wide = is_wide(figure)
    roomy = figure.bbox.height * 72 / figure.dpi >= 120 + 13 * len(drift.layers)
    panels = figure.subplots(1, 2, sharey=True, gridspec_kw={"wspace": 0.08})
    shifts = [layer.shift_quantiles for layer in drift.layers]
    title = "Mean: (polished − running) / running σ" if wide else "Mean shift, σ"
    _draw_cells(figure, panels[0], np.array(shifts, dtype=np.float64), title=title, gaps=roomy)
    ratios = [layer.ratio_quantiles for layer in drift.layers]
    title = "Variance: ln(polished / running)" if wide else "ln(variance ratio)"
    _draw_cells(figure, panels[1], np.array(ratios, dtype=np.float64), title=title, gaps=roomy)
    for axes in panels:
        _name_columns(axes, drift, every=1 if wide else 2)
    name_rows(panels, [layer.name for layer in drift.layers], each=roomy)
    if not run.drift_kept:
        figure.supxlabel(
            "Discarded: rolled back to the running statistics.", size=11.5, weight="bold"
        )


def _draw_cells(
    figure: "Canvas", axes: "Axes", table: FloatArray, *, title: str, gaps: bool
) -> None:
    from matplotlib.colors import ListedColormap, to_rgba

    shades = np.linspace(1, 0, _SHADES, endpoint=False)
    colours = [to_rgba(LOW, shade) for shade in shades] + [to_rgba(PAPER, 0)]
    colours += [to_rgba(HIGH, shade) for shade in shades[::-1]]
    end = scale_end(table)
    cells = axes.pcolormesh(
        np.ma.masked_invalid(table),
        cmap=ListedColormap(colours).with_extremes(bad=RULE),
        vmin=-end, vmax=end, edgecolors=PAPER, linewidth=0.8 if gaps else 0,
    )  # fmt: skip
    for row, column in np.argwhere(~np.isfinite(table)):
        axes.text(column + 0.5, row + 0.5, "–", color=MUTED, ha="center", va="center")
    beyond = bool((np.abs(table[np.isfinite(table)]) > end).any())
    bar = figure.colorbar(
        cells, ax=axes, location="top", aspect=figure.bbox.width * 72 / figure.dpi / 24,
        pad=6 * figure.dpi / 72 / figure.bbox.height, extend="both" if beyond else "neither",
    )  # fmt: skip
    bar.set_ticks([-end, 0, end], labels=[f"−{end:g}", "0", f"+{end:g}"])
    low, _, high = bar.ax.get_xticklabels()
    low.set_horizontalalignment("left")
    high.set_horizontalalignment("right")
    bar.outline.set_visible(False)
    bar.ax.set_title(title)


def scale_end(table: FloatArray) -> float:
    """Return where the scale of a table ends, in two digits: at its largest change as a rule.

    Few that are far larger than the rest do not take the colour from it.

    >>> scale_end(np.array([-0.1234, 0.05]))
    0.13
    >>> scale_end(np.array([0.2] * 99 + [50.0]))
    0.6
    """
    sizes = np.abs(table[np.isfinite(table)])
    if not sizes.size:
        return _LEAST
    end = float(max(min(sizes.max(), 3 * np.quantile(sizes, 0.9)), _LEAST))
    digits = 1 - math.floor(math.log10(end))
    return round(math.ceil(round(end * 10.0**digits, 6)) / 10.0**digits, max(digits, 0))


def _name_columns(axes: "Axes", drift: Drift, *, every: int) -> None:
    names = ["median" if part == 0.5 else f"{100 * part:g} %" for part in drift.quantiles]
    axes.set_xticks(np.arange(len(names))[::every] + 0.5, names[::every])
    axes.set_xlabel("channels, sorted by change →" if every == 1 else "channels →", loc="right")
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)
    axes.grid(visible=False)


def name_rows(panels: "list[Axes]", names: list[str], *, each: bool) -> None:
    """Name each layer, or each group of layers, and divide the groups."""
    groups = [list(rows) for _, rows in groupby(range(len(names)), lambda row: _group(names[row]))]
    for before, _ in pairwise(groups):
        for axes in panels:
            axes.axhline(before[-1] + 1, color=MUTED, lw=0.6)
    if each:
        panels[0].set_yticks(np.arange(len(names)) + 0.5, map(_shorten, names))
        panels[0].tick_params(axis="y", labelsize=9)
    else:
        middles = [(rows[0] + rows[-1] + 1) / 2 for rows in groups]
        panels[0].set_yticks(middles, [_group(names[rows[0]]) for rows in groups])
    panels[0].set_ylim(len(names), 0)


def _group(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def _shorten(name: str) -> str:
    return name if len(name) <= 22 else f"…{name[-21:]}"


def draw_confusion(figure: "Canvas", run: Run) -> None:
    """Draw the matrix: what is right in grey on the diagonal, what is wrong the redder the more."""
    found = run.final_mistakes
    assert found is not None
    matrix = confusion(found)
    number = len(matrix)
    wrong = np.where(np.eye(number, dtype=bool), 0, matrix)
    axes = figure.subplots()
    most = wrong.max()
    for row, column in np.argwhere(matrix):
        is_right = row == column
        share = 1.0 if is_right else 0.15 + 0.45 * matrix[row, column] / most
        axes.axvspan(
            column - 0.5, column + 0.5, (number - 1 - row) / number, (number - row) / number,
            color=RULE if is_right else HIGH, alpha=share, lw=0,
        )  # fmt: skip
    if number <= 20:
        for row, column in np.argwhere(matrix):
            axes.text(column, row, f"{matrix[row, column]:,}", ha="center", va="center", size=10)
    names = [name if len(name) <= 16 else f"{name[:15]}…" for name in found.classes]
    points = figure.bbox.width * 72 / figure.dpi
    short = max(map(len, names)) * number < points / 12
    axes.set_xticks(range(number), names)
    if not short:  # anchored at their ends: a browser's font may be wider
        for label in axes.get_xticklabels():
            label.set(rotation=90, rotation_mode="anchor", ha="right", va="center")
    axes.set_yticks(range(number), names)
    axes.tick_params(length=0, labelsize=11 if number <= 20 else 9)
    axes.set_xlim(-0.5, number - 0.5)
    axes.set_ylim(number - 0.5, -0.5)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_title("↓ Class")
    axes.set_xlabel("Taken for →", loc="right", color=MUTED)

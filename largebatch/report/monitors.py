"""What a recipe monitors: LARS's trust ratios by layer, the gradient norm, what the workers use."""

from typing import TYPE_CHECKING

import numpy as np

from largebatch.report.drift import name_rows
from largebatch.report.figures import ceiling, draw_series, mark_stages
from largebatch.report.run import FloatArray, Run, median
from largebatch.report.style import COLOURS, MUTED, RULE, is_wide, name_axes, name_line

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Canvas

_BINS = 200
"""More columns do not show apart in a chart."""


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
    starts = np.linspace(0, len(steps), min(len(steps), _BINS), endpoint=False).astype(int)
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
    """Return one number of all workers: a row for each record."""
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

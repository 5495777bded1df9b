"""What polishing changed in BatchNorm, as a heat map: a row per layer, from the input at the top.

Channels of one layer move both ways, so the scale has a middle, where nothing changed and the page
shows through. A cell has one of two colours, as opaque as its change is large, which does on light
and on dark pages alike.
"""

import math
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

from largebatch.report.run import FloatArray, Run
from largebatch.report.style import HIGH, LOW, MUTED, PAPER, RULE, is_wide
from largebatch.tracking.events import Drift

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Canvas

_LEAST = 0.01
"""The least end of a scale, so that what hardly changed has hardly a colour."""

_SHADES = 15
"""On either side of the middle."""


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
    """Draw a table of layers by channels, and above it what its colours mean."""
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
    """Label the columns by their quantile over the channels; only some if the chart is narrow."""
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
    """Return the end of a layer's name, which differs from its neighbours'."""
    return name if len(name) <= 22 else f"…{name[-21:]}"

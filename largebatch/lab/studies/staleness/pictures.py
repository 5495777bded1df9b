"""The pictures of a staleness study: accuracy against time, and how late gradients were."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.lab.studies.staleness.run import Row
from largebatch.lab.studies.staleness.speed_up import SpeedUp, lines_of
from largebatch.report.style import COLOURS, INK, MUTED, name_axes, write_chart

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Figure

TRADE_OFF, HISTOGRAMS, SPEED_UP = "trade_off.png", "staleness.png", "speed_up.png"
COLUMNS = 3
"""Panels side by side."""


def write_pictures(rows: Sequence[Row], out: Path) -> list[Path]:
    """Draw the cells that have records; return the files, the second only with late gradients."""
    size = (960, 110 + 300 * math.ceil(len(panels(rows)) / COLUMNS))
    write_chart(out / TRADE_OFF, lambda figure: draw_trade_off(figure, rows), size=size)
    late = [row for row in rows if len(row.counts) > 1]
    if not late:
        return [out / TRADE_OFF]
    size = (960, 40 + 190 * math.ceil(len(late) / COLUMNS))
    write_chart(out / HISTOGRAMS, lambda figure: draw_histograms(figure, late), size=size)
    return [out / TRADE_OFF, out / HISTOGRAMS]


def draw_trade_off(figure: "Figure", rows: Sequence[Row]) -> None:
    """Draw the error by simulated time; a line joins cells of a protocol with equal mu x lambda.

    Rudra's rule (arXiv:1509.04210) is that such a line is level.
    """
    found = panels(rows)
    columns = min(COLUMNS, len(found))
    grid = figure.subplots(
        math.ceil(len(found) / columns), columns, sharex=True, sharey=True, squeeze=False
    )
    protocols = list(dict.fromkeys(row.cell.protocol for row in rows))
    colours = dict(zip(protocols, [*COLOURS.values(), INK] * len(protocols), strict=False))
    for axes, (name, inside) in zip(grid.ravel(), found.items(), strict=False):
        _draw_panel(axes, inside, colours)
        name_axes(axes, y=f"Error: {name}")
    for axes in grid.ravel()[len(found) :]:
        axes.set_axis_off()
    grid[-1, 0].set_xlabel("Simulated seconds →", loc="left")
    marks = [
        grid[0, 0].plot([], [], color=colour, marker="o", ms=6, lw=0.8, label=protocol)[0]
        for protocol, colour in colours.items()
    ]
    figure.legend(
        handles=marks, loc="outside lower left", frameon=False, ncols=min(3, len(marks)),
        borderpad=0, title="mu x lambda; a line joins those of equal product", alignment="left",
    )  # fmt: skip


def _draw_panel(axes: "Axes", rows: Sequence[Row], colours: Mapping[str, str]) -> None:
    axes.set_xscale("log")
    ticks = axes.xaxis.get_major_locator()
    ticks.set_params(subs=(1.0, 2.0, 5.0))  # type: ignore[call-arg]  # it is a LogLocator
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:.4g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for row in rows:
        cell = row.cell
        axes.errorbar(
            row.seconds, row.error.mean, yerr=_reach(row), color=colours[cell.protocol],
            marker="o", ms=6, lw=0, elinewidth=1,
        )  # fmt: skip
        below = list(colours).index(cell.protocol) % 2  # for those of two protocols often coincide
        axes.annotate(
            f"{cell.mu} x {cell.learners}", (row.seconds, row.error.mean), (5, -11 if below else 4),
            textcoords="offset points", color=MUTED, size=8,
        )  # fmt: skip
    for (protocol, _), joined in diagonals(rows).items():
        line = sorted((row.seconds, row.error.mean) for row in joined)
        axes.plot(*zip(*line, strict=True), color=colours[protocol], lw=0.8)


def draw_histograms(figure: "Figure", rows: Sequence[Row]) -> None:
    """Draw what share of the gradients was how many updates late, and where 2 sigma is."""
    lines = math.ceil(len(rows) / COLUMNS)
    charts = figure.subplots(lines, COLUMNS, squeeze=False).ravel()
    for axes, row in zip(charts, rows, strict=False):
        shares = row.staleness
        axes.bar(range(len(shares)), shares, width=1.0, color=COLOURS["train"])
        axes.axvline(2 * row.cell.sigma, color=INK, lw=0.8)
        axes.set_title(row.cell.name, size=7)
        axes.xaxis.get_major_locator().set_params(integer=True)
    charts[0].set_ylabel("Share of gradients")
    charts[len(rows) - 1].set_xlabel("Updates late; the line is at 2 sigma →", loc="right", size=9)
    for axes in charts[len(rows) :]:
        axes.set_axis_off()


def write_speed_up(found: Sequence[SpeedUp], path: Path) -> Path:
    """Draw the speed-up by learners; return the file."""
    size = (960, 70 + 300 * math.ceil(len(lines_of(found)) / 2))
    write_chart(path, lambda figure: draw_speed_up(figure, found), size=size)
    return path


def draw_speed_up(figure: "Figure", found: Sequence[SpeedUp]) -> None:
    """Draw the speed-up by learners, a panel for each mini-batch under the same times."""
    groups = lines_of(found)
    columns = min(2, len(groups))
    lines = math.ceil(len(groups) / columns)
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    most = max(one.cell.learners for one in found)
    for axes, (name, group) in zip(grid.ravel(), groups.items(), strict=False):
        ideal = axes.plot([1, most], [1, most], color=MUTED, lw=0.8, ls=":", label="ideal")
        marks = [
            axes.errorbar(
                [one.cell.learners for one in line], [one.over_alone.mean for one in line],
                yerr=[one.over_alone.reach or 0.0 for one in line], color=colour,
                marker="o", ms=5, elinewidth=1, label=protocol,
            )
            for (protocol, line), colour in zip(group.items(), COLOURS.values(), strict=False)
        ]  # fmt: skip
        axes.set_xticks(sorted({one.cell.learners for line in group.values() for one in line}))
        axes.set_ylim(bottom=0)
        name_axes(axes, y=f"Speed-up: {name}")
    for axes in grid.ravel()[len(groups) :]:
        axes.set_axis_off()
    grid[-1, 0].set_xlabel("Learners →", loc="left")
    figure.legend(
        handles=[*ideal, *marks], loc="outside lower left", frameon=False, ncols=4, borderpad=0
    )


def panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the cells by what is not to be compared with each other: recipe and times."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[f"{row.cell.configuration}, {row.cell.times}"].append(row)
    return found


def diagonals(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Return the cells of a panel by protocol and mu x lambda.

    One learner that waits for nobody is asynchronous and every softsync at once.
    """
    free = dict.fromkeys(row.cell.protocol for row in rows if row.cell.sigma)
    found: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        cell = row.cell
        is_all = cell.sigma and cell.learners == 1
        for protocol in free if is_all else (cell.protocol,):
            found[protocol, cell.samples].append(row)
    return found


def _reach(row: Row) -> float:
    """Return half of the interval; none of one seed."""
    reach = row.error.high - row.error.mean
    return reach if math.isfinite(reach) else 0.0

"""The page of a study of servers: speed by workers, and what crossed each link by formula.

Words and layout stand in servers.html. A layout has one colour in all charts; of several recipes
one is shown at a time, for their throughputs lie far apart.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.report.interactive import (
    Series,
    add_hover,
    add_line,
    add_points,
    make_interactive_page,
    new_chart,
    new_source,
    series,
)
from largebatch.report.style import INK
from largebatch.report.table import Column, new_table
from largebatch.storage import write_html
from largebatch.studies.metrics import Interval
from largebatch.studies.servers.rows import NEAR, Row, describe, findings
from largebatch.studies.servers.study import ALONE, ServersStudy

if TYPE_CHECKING:
    from largebatch.report.interactive import Chart, Model
    from largebatch.report.table import Table

_MEGABYTE = 1e-6


def write_page(study: ServersStudy, rows: Sequence[Row], path: Path) -> Path:
    """Write the page of a study; return its path.

    Raises LargebatchError where it cannot be written, MissingPackageError without Bokeh.
    """
    return write_html(path, make_page(study, rows))


def make_page(study: ServersStudy, rows: Sequence[Row]) -> str:
    """Return the HTML of the page. Raises MissingPackageError without Bokeh."""
    layouts = list(dict.fromkeys(row.cell.layout for row in rows if row.cell.layout != ALONE))
    recipes = list(dict.fromkeys(row.cell.configuration for row in rows))
    looks = [series(place, name) for place, name in enumerate(layouts)]
    models: dict[str, Model] = {
        "cells": _cells(rows, looks),
        "links": _links(rows, looks),
        "throughput": _draw(rows, looks, "Mini-batches a second", lambda row: row.throughput),
        "efficiency": _draw(rows, looks, "Efficiency, %", _efficiency),
        "traffic": _draw_traffic(rows, looks),
    }
    tags = {f"recipe {name}": name for name in recipes}
    return make_interactive_page(
        Path(__file__).with_name("servers.html"),
        models,
        hidden=list(tags)[1:],
        title=study.name,
        subtitle=", ".join(
            f"{name} over links of {one.megabits or study.megabits:,g} Mbit/s"
            for name, one in study.recipes.items()
        ),
        sentences=list(findings(rows)),
        good=all(row.deviation <= NEAR for row in rows),
        legend_of=looks,
        recipes=tags,
    )


def _efficiency(row: Row) -> Interval | None:
    found, workers = row.speed_up, row.cell.workers
    if found is None:
        return None
    mean, low, high = (100 * each / workers for each in (found.mean, found.low, found.high))
    return Interval(mean, low, high, found.number)


def _draw(
    rows: Sequence[Row],
    looks: Sequence[Series],
    title: str,
    value: Callable[[Row], Interval | None],
) -> "Chart":
    """Draw a metric of every layout by its workers, from that of one worker alone on."""
    chart = new_chart(x="Workers", y=title, from_zero=True)
    marks = []
    for look, line in _lines(rows, looks):
        found = [(row, value(row)) for row in line]
        shown = [(row, each) for row, each in found if each is not None]
        source = new_source(
            {
                "workers": [row.cell.workers for row, _ in shown],
                "value": [each.mean for _, each in shown],
                "text": [describe(each) for _, each in shown],
                "cell": [row.cell.name for row, _ in shown],
            }
        )
        add_line(chart, look, source, "workers", "value")
        for row, each in shown:
            if math.isfinite(each.low):
                ends = {"workers": [row.cell.workers] * 2, "value": [each.low, each.high]}
                add_line(chart, look, new_source(ends), "workers", "value")
        marks.append(add_points(chart, look, source, "workers", "value"))
    add_hover(chart, marks, [("cell", "@cell"), (title.lower(), "@text")])
    chart.xaxis.ticker = _ticks(rows)
    return chart


def _draw_traffic(rows: Sequence[Row], looks: Sequence[Series]) -> "Chart":
    """Draw what the busiest link carries in an update: points are counters, lines the formula."""
    chart = new_chart(x="Workers", y="Busiest link, MB an update", from_zero=True)
    marks = []
    for look, line in _lines(rows, looks):
        measured = [_MEGABYTE * sum(row.measured[row.busiest]) for row in line]
        source = new_source(
            {
                "workers": [row.cell.workers for row in line],
                "measured": [0.0 if row.cell.workers == 1 else each
                             for row, each in zip(line, measured, strict=True)],
                "formula": [_MEGABYTE * sum(row.expected[row.busiest]) for row in line],
                "cell": [row.cell.name for row in line],
            }
        )  # fmt: skip
        add_line(chart, look, source, "workers", "formula")
        marks.append(add_points(chart, look, source, "workers", "measured"))
    rows_shown = [("cell", "@cell"), ("counters", "@measured{0,0.000} MB"),
                  ("formula", "@formula{0,0.000} MB")]  # fmt: skip
    add_hover(chart, marks, rows_shown)
    chart.xaxis.ticker = _ticks(rows)
    return chart


def _ticks(rows: Sequence[Row]) -> list[int]:
    return sorted({row.cell.workers for row in rows})


def _lines(rows: Sequence[Row], looks: Sequence[Series]) -> Iterator[tuple[Series, list[Row]]]:
    """Yield the rows of every recipe with every layout by their workers, one alone first."""
    for recipe in dict.fromkeys(row.cell.configuration for row in rows):
        for look in looks:
            line = [
                row
                for row in rows
                if row.cell.configuration == recipe and row.cell.layout in {ALONE, look.label}
            ]
            tagged = series(look.place, look.label, tags=(f"recipe {recipe}",))
            yield tagged, sorted(line, key=lambda row: row.cell.workers)


def _cells(rows: Sequence[Row], looks: Sequence[Series]) -> "Table":
    """Return a row for each cell."""
    speed_ups = [row.speed_up for row in rows]
    sends = [row.cell.workers > 1 for row in rows]

    def traffic(value: Callable[[Row], float]) -> list[float | None]:
        return [value(row) if any_ else None for row, any_ in zip(rows, sends, strict=True)]

    return new_table(
        [
            Column("Cell", [row.cell.name for row in rows]),
            Column("Model, MB", [_MEGABYTE * row.model_bytes for row in rows], "0,0.00"),
            Column("Workers", [row.cell.workers for row in rows], "0"),
            Column("Hosts", [len(row.cell.placement.workers_per_host) for row in rows], "0"),
            Column("Batches/s", [row.throughput.mean for row in rows], "0,0.000"),
            Column("±", [_reach(row.throughput) for row in rows], "0,0.000"),
            Column("Speed-up", [one and one.mean for one in speed_ups], "0.00"),
            Column("± speed-up", [_reach(one) for one in speed_ups], "0.00"),
            Column("Efficiency, %", [_percent(row) for row in rows], "0"),
            Column(
                "Busiest link, MB",
                traffic(lambda row: _MEGABYTE * sum(row.measured[row.busiest])), "0,0.000",
            ),
            Column(
                "Formula, MB",
                traffic(lambda row: _MEGABYTE * sum(row.expected[row.busiest])), "0,0.000",
            ),
            Column("Largest deviation, %", traffic(lambda row: 100 * row.deviation), "0.00"),
            Column("Late gradients, %", [100 * row.late for row in rows], "0.0"),
            Column("Starts", [len(row.found) for row in rows], "0"),
        ],
        colours=_colours(rows, looks),
        tags=_row_tags(rows, looks),
    )  # fmt: skip


def _links(rows: Sequence[Row], looks: Sequence[Series]) -> "Table":
    """Return a row for the link of each host of each cell."""
    places = [
        (row, place) for row in rows for place in range(len(row.expected)) if row.cell.workers > 1
    ]
    of = [row for row, _ in places]
    pairs = [(row.measured[place], row.expected[place]) for row, place in places]
    received = [(one.received, by.received) for one, by in pairs]
    sent = [(one.sent, by.sent) for one, by in pairs]
    return new_table(
        [
            Column("Cell", [row.cell.name for row in of]),
            Column("Host", [place + 1 for _, place in places], "0"),
            Column("Received, MB", [_MEGABYTE * one for one, _ in received], "0,0.0000"),
            Column("Formula, MB", [_MEGABYTE * by for _, by in received], "0,0.0000"),
            Column("Off, %", [100 * (one / by - 1) for one, by in received], "0.00"),
            Column("Sent, MB", [_MEGABYTE * one for one, _ in sent], "0,0.0000"),
            Column("Formula, MB", [_MEGABYTE * by for _, by in sent], "0,0.0000"),
            Column("Off, %", [100 * (one / by - 1) for one, by in sent], "0.00"),
        ],
        colours=_colours(of, looks),
        tags=_row_tags(of, looks),
    )


def _colours(rows: Sequence[Row], looks: Sequence[Series]) -> list[str]:
    own = {look.label: look.colour for look in looks}
    return [own.get(row.cell.layout, INK) for row in rows]


def _row_tags(rows: Sequence[Row], looks: Sequence[Series]) -> list[tuple[str, ...]]:
    """Return what hides each row: its recipe and, unless it is of one worker alone, its layout."""
    own = {look.label: (f"series {look.place}",) for look in looks}
    return [(f"recipe {row.cell.configuration}", *own.get(row.cell.layout, ())) for row in rows]


def _percent(row: Row) -> float | None:
    found = _efficiency(row)
    return None if found is None else found.mean


def _reach(found: Interval | None) -> float | None:
    """Return half the width of an interval; None of one value."""
    return None if found is None or found.number == 1 else found.high - found.mean

"""The page of a study of scaling: tables against the ideal, and the planner beside the measurement.

Words and layout stand in scaling.html. A place has one colour in all charts; the ideal is a line of
its own, and so is what the planner predicts.
"""

from collections.abc import Callable, Sequence
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
from largebatch.report.table import Column, new_table
from largebatch.storage import write_html
from largebatch.studies.scaling.rows import Row, findings, unequal_rates
from largebatch.studies.scaling.study import PLACES, SCALINGS, ScalingStudy

if TYPE_CHECKING:
    from largebatch.report.interactive import Chart, Model
    from largebatch.report.table import Table

_IDEAL, _PLANNER = "ideal", "planner"


def write_page(study: ScalingStudy, rows: Sequence[Row], path: Path) -> Path:
    """Write the page of a study; return its path.

    Raises LargebatchError where it cannot be written, MissingPackageError without Bokeh.
    """
    return write_html(path, make_page(study, rows))


def make_page(study: ScalingStudy, rows: Sequence[Row]) -> str:
    """Return the HTML of the page. Raises MissingPackageError without Bokeh."""
    looks = [series(place, name) for place, name in enumerate([*PLACES, _IDEAL, _PLANNER])]
    recipes = list(dict.fromkeys(row.cell.configuration for row in rows))
    models: dict[str, Model] = {"cells": _table(rows, looks)}
    models["efficiency"] = _draw(
        rows, "Efficiency, %", lambda row: 100 * (row.efficiency or 0.0), lambda _: 100.0,
        _predicted_efficiency,
    )  # fmt: skip
    models["seconds"] = _draw(
        rows, "Seconds of an update", lambda row: row.seconds.mean, None,
        lambda row: row.predicted,
    )  # fmt: skip
    kinds = {f"scaling {name}": name for name in SCALINGS}
    tags = {f"recipe {name}": name for name in recipes}
    unequal = any(unequal_rates(found) for row in rows for found in row.found.values())
    return make_interactive_page(
        Path(__file__).with_name("scaling.html"),
        models,
        hidden=[*list(kinds)[1:], *list(tags)[1:]],
        title=study.name,
        subtitle=f"{', '.join(recipes)}; links of {study.megabits:,g} Mbit/s",
        sentences=list(findings(rows)),
        good=not unequal,
        legend_of=looks,
        recipes=tags,
        scalings=kinds,
    )


def _predicted_efficiency(row: Row) -> float | None:
    """Return the efficiency that the planner's time makes, in percent."""
    if row.predicted is None or row.efficiency is None:
        return None
    return 100 * row.efficiency * row.seconds.mean / row.predicted


def _draw(
    rows: Sequence[Row],
    title: str,
    value: Callable[[Row], float],
    ideal: Callable[[Row], float] | None,
    predicted: Callable[[Row], float | None],
) -> "Chart":
    """Draw a metric by workers: a line with points for each place, the planner's dashed."""
    chart = new_chart(x="Workers", y=title, from_zero=True)
    marks = []
    for place, lines in _lines(rows).items():
        scaling, recipe, where = place
        tags = (f"scaling {scaling}", f"recipe {recipe}")
        own = series(PLACES.index(where), where, tags=tags)
        planned = Series(3, _PLANNER, own.colour, (2, 3), tags=tags)
        source = new_source(
            {
                "workers": [row.cell.workers for row in lines],
                "value": [value(row) for row in lines],
                "predicted": [predicted(row) or 0.0 for row in lines],
                "ideal": [ideal(row) if ideal else 0.0 for row in lines],
                "cell": [row.cell.name for row in lines],
            }
        )
        if ideal is not None:
            add_line(chart, series(2, _IDEAL, tags=tags), source, "workers", "ideal")
        add_line(chart, planned, source, "workers", "predicted")
        add_line(chart, own, source, "workers", "value")
        marks.append(add_points(chart, own, source, "workers", "value"))
    add_hover(
        chart, marks,
        [("cell", "@cell"), ("measured", "@value{0,0.0000}"), ("planner", "@predicted{0,0.0000}")],
    )  # fmt: skip
    chart.xaxis.ticker = sorted({row.cell.workers for row in rows})
    return chart


def _lines(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Return the rows of each scaling, recipe and place, from one worker alone on."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        for place in PLACES if row.cell.workers == 1 else [row.cell.place]:
            found.setdefault((row.scaling, row.cell.configuration, place), []).append(row)
    return {key: sorted(each, key=lambda row: row.cell.workers) for key, each in found.items()}


def _table(rows: Sequence[Row], looks: Sequence[Series]) -> "Table":
    speed_ups = [row.speed_up for row in rows]
    return new_table(
        [
            Column("Cell", [row.cell.name for row in rows]),
            Column("Scaling", [row.scaling for row in rows]),
            Column("Workers", [row.cell.workers for row in rows], "0"),
            Column("Samples/s", [row.throughput.mean for row in rows], "0,0.0"),
            Column("Ideal", [row.ideal for row in rows], "0,0.0"),
            Column("Speed-up", [one and one.mean for one in speed_ups], "0.00"),
            Column(
                "±", [one.high - one.mean if one and one.number > 1 else None for one in speed_ups],
                "0.00",
            ),
            Column("Efficiency, %", [100 * (row.efficiency or 0.0) for row in rows], "0"),
            Column("An update, s", [row.seconds.mean for row in rows], "0.0000"),
            Column("The planner, s", [row.predicted for row in rows], "0.0000"),
            Column("Samples each", [row.cell.samples for row in rows], "0"),
            Column("Learning rates", [_rates(row) for row in rows]),
            Column("Starts", [len(row.found) for row in rows], "0"),
        ],
        colours=[looks[PLACES.index(row.cell.place)].colour for row in rows],
        tags=[
            (
                f"scaling {row.scaling}",
                f"recipe {row.cell.configuration}",
                f"series {PLACES.index(row.cell.place)}",
            )
            for row in rows
        ],
    )  # fmt: skip


def _rates(row: Row) -> str:
    """Return whether all workers applied the same rates."""
    return next(filter(None, map(unequal_rates, row.found.values())), "equal, bit for bit")

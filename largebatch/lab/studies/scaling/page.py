"""The page of a study of scaling: against the ideal, and the planner beside the measurement.

A place has one colour in all charts; the ideal is a line of its own, and so is what the planner
predicts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from largebatch.lab.studies.hosts.starts import chart_by_workers
from largebatch.lab.studies.scaling.rows import Row, findings, unequal_rates
from largebatch.lab.studies.scaling.study import PLACES, SCALINGS, ScalingStudy
from largebatch.report.interactive import Filter, Page, Section, Table, columns_over
from largebatch.report.interactive_charts import Chart, Curve, Series, by_column, series

_LOOKS = {name: series(place, name) for place, name in enumerate([*PLACES, "ideal", "planner"])}

_NOTE = (
    "Workers in one host, or each on a host of its own, which is a network namespace of one "
    "machine with a shaped link. Gradients take a time that is set and slept. Means over starts "
    "with Student's interval of 95 %."
)
_TABLE = (
    "The ideal is as many times one worker as there are workers; in "
    "weak scaling each has the same mini-batch, in strong scaling all share one batch. Learning "
    "rates are those that each worker's optimizer applied, compared in hexadecimal."
)
_HOVER = ("cell", "@cell"), ("measured", "@value{0,0.0000}"), ("planner", "@predicted{0,0.0000}")


def make_page(study: ScalingStudy, rows: Sequence[Row]) -> Page:
    """Return the page of a study."""
    recipes = list(dict.fromkeys(row.cell.configuration for row in rows))
    return Page(
        title=study.name,
        subtitle=f"{', '.join(recipes)}; links of {study.megabits:,g} Mbit/s",
        findings=list(findings(rows)),
        is_sound=not any(unequal_rates(found) for row in rows for found in row.found.values()),
        note=_NOTE,
        legend=("Places", list(_LOOKS.values())),
        filters=[
            Filter("Scaling", {f"scaling {name}": name for name in SCALINGS}),
            Filter("Model", {f"recipe {name}": name for name in recipes}),
        ],
        sections=[
            Section(title="Against the ideal", parts=[_table(rows)], notes=[_TABLE]),
            Section(title="By workers", parts=list(_charts(rows))),
        ],
        source="the records of a study",
    )


class _Point(NamedTuple):
    """What a chart shows of a row."""

    value: float
    predicted: float
    ideal: float | None = None


def _charts(rows: Sequence[Row]) -> Iterator[Chart]:
    def efficiency(row: Row) -> _Point:
        found = row.efficiency.mean if row.efficiency else 0.0
        predicted = found * row.seconds.mean / row.predicted if row.predicted else 0.0
        return _Point(found, predicted, 100.0)

    def seconds(row: Row) -> _Point:
        return _Point(row.seconds.mean, row.predicted or 0.0)

    yield _chart(
        rows, "efficiency", "Efficiency, %", efficiency,
        caption="Points are measured; dotted is what the planner makes of one worker alone and the "
        "link.",
    )  # fmt: skip
    yield _chart(rows, "seconds", "Seconds of an update", seconds, caption="The time of an update.")


def _chart(
    rows: Sequence[Row], name: str, title: str, value: Callable[[Row], _Point], *, caption: str
) -> Chart:
    """Return a metric by workers: a line with points for each place, the planner's dotted."""
    curves = []
    for (scaling, recipe, place), line in _lines(rows).items():
        tags = (f"scaling {scaling}", f"recipe {recipe}")
        own, best, planner = (
            replace(_LOOKS[each], tags=tags) for each in (place, "ideal", "planner")
        )
        points = by_column([
            {"workers": row.cell.workers, "cell": row.cell.name, **value(row)._asdict()}
            for row in line
        ])  # fmt: skip
        planned = replace(planner, colour=own.colour, dash=(2, 3))
        for look, column in ((best, "ideal"), (planned, "predicted")):
            if points[column][0] is not None:
                curves.append(Curve(series=look, data=points, points=False, y=column))
        curves.append(Curve(series=own, data=points, hover=_HOVER))
    return chart_by_workers(rows, curves, name=name, y_title=title, caption=caption)


def _lines(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Return the rows of each scaling, recipe and place, from one worker alone on."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.cell.workers):
        for place in PLACES if row.cell.workers == 1 else [row.cell.place]:
            found.setdefault((row.scaling, row.cell.configuration, place), []).append(row)
    return found


def _table(rows: Sequence[Row]) -> Table:
    column = columns_over(rows)
    columns = [
        column("Cell", lambda row: row.cell.name, None),
        column("Scaling", lambda row: row.scaling, None),
        column("Workers", lambda row: row.cell.workers, "d"),
        column("Samples/s", lambda row: row.throughput.mean, ",.1f"),
        column("Ideal", lambda row: row.ideal, ",.1f"),
        column("Speed-up", lambda row: row.speed_up and row.speed_up.mean, ".2f"),
        column("±", lambda row: row.speed_up and row.speed_up.reach, ".2f"),
        column("Efficiency, %", lambda row: row.efficiency and row.efficiency.mean, ".0f"),
        column("An update, s", lambda row: row.seconds.mean, ".4f"),
        column("The planner, s", lambda row: row.predicted, ".4f"),
        column("Samples each", lambda row: row.cell.samples, "d"),
        column("Learning rates", _rates, None),
        column("Starts", lambda row: len(row.found), "d"),
    ]
    return Table(name="cells", columns=columns, series=[_look(row) for row in rows])


def _look(row: Row) -> Series:
    tags = (f"scaling {row.scaling}", f"recipe {row.cell.configuration}")
    return replace(_LOOKS[row.cell.place], tags=tags)


def _rates(row: Row) -> str:
    """Return whether all workers applied the same rates."""
    return next(filter(None, map(unequal_rates, row.found.values())), "equal, bit for bit")

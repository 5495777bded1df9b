"""The page of a study of servers: speed by workers, and what crossed each link by formula.

A layout has one colour in all charts; of several recipes one is shown at a time, for their
throughputs lie far apart.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from largebatch.lab.studies.hosts.starts import chart_by_workers
from largebatch.lab.studies.metrics import Interval
from largebatch.lab.studies.servers import simulated as simulator
from largebatch.lab.studies.servers.rows import NEAR, Row, findings, slower
from largebatch.lab.studies.servers.simulated import UNITS, Sweep, value_of
from largebatch.lab.studies.servers.study import ALONE, ServersStudy
from largebatch.report.interactive import Column, Filter, Page, Section, Table, columns_over
from largebatch.report.interactive_charts import Chart, Curve, Series, by_column, series
from largebatch.report.style import INK

_MEGABYTE = 1e-6

_NOTE = (
    "Every layout makes the same update of the same mini-batches; only where the weights are "
    "differs. Hosts are network namespaces of one machine with a shaped link each. Means over "
    "starts with Student's interval of 95 %."
)
_PRINTED = (
    *("Cell", "Batches/s", "±", "Speed-up", "± speed-up", "Efficiency, %"),
    *("Busiest link, MB", "Formula, MB", "Largest deviation, %"),
)
"""Columns of the table in a terminal."""

_SPEED = (
    "A batch is the mini-batch of one worker. Speed-up is against one "
    "worker alone, which sends nothing, and efficiency is that over the workers: servers on hosts "
    "of their own are not counted. The busiest link carries the most by the formulas, in both "
    "directions together."
)
_BYTES = (
    "Bytes of payload in an update over each host's link, one direction each, by the counters of "
    "its interface without the 66 bytes of headers of each packet. Formulas: a central server with "
    "M bytes of λ workers receives and sends λ M; a worker of a ring 2 M (λ − 1) / λ; a worker "
    "beside a server with Mₖ of the M bytes M − Mₖ + (λ − 1) Mₖ."
)
_SIMULATED = (
    "Simulated from the bytes of the formulas, the times of gradients, and what an update of one "
    "worker alone takes besides its gradient; messages share links at fair rates. Servers update "
    "in no time. Links and mini-batches are changed at the most workers that are started."
)


def make_page(
    study: ServersStudy, rows: Sequence[Row], simulated: Mapping[Sweep, Sequence[Row]]
) -> Page:
    """Return the page of a study; `simulated` has the rows of each sweep."""
    both = [*rows, *simulated["workers"]]
    layouts = dict.fromkeys(row.cell.layout for row in both if row.cell.layout != ALONE)
    looks = [series(place, name) for place, name in enumerate(layouts)]
    recipes = dict.fromkeys(row.cell.configuration for row in both)
    return Page(
        title=study.name,
        subtitle=", ".join(
            f"{name} over links of {one.megabits or study.megabits:,g} Mbit/s"
            for name, one in study.recipes.items()
        ),
        findings=[
            *slower(rows, "measured"),
            *slower(simulated["workers"], "simulated"),
            *findings(rows),
            *simulator.findings(simulated, rows),
            *_without_starts(rows, simulated["workers"]),
        ],
        is_sound=all(row.deviation <= NEAR for row in rows),
        note=_NOTE,
        legend=("Layouts", looks),
        filters=[Filter("Model", {f"recipe {name}": name for name in recipes})],
        sections=list(_sections(rows, simulated, looks)),
        source="the records of a study",
    )


def _without_starts(rows: Sequence[Row], simulated: Sequence[Row]) -> Iterator[str]:
    """Yield whose simulations lack the time that only a start of one worker alone shows."""
    started = {row.cell.configuration for row in rows if row.cell.layout == ALONE}
    lacking = dict.fromkeys(row.cell.configuration for row in simulated)
    if names := ", ".join(name for name in lacking if name not in started):
        yield (
            f"No start of one worker alone is recorded for {names}: what an update takes besides "
            "its gradient counts as nothing there, and the simulated speed-ups are too low."
        )


def _sections(
    rows: Sequence[Row], simulated: Mapping[Sweep, Sequence[Row]], looks: Sequence[Series]
) -> Iterator[Section]:
    """Yield the sections for which there are starts or simulations."""
    points = [row for sweep in UNITS for row in simulated[sweep]]
    if rows:
        yield Section(title="Speed", parts=[_cells(rows, looks)], notes=[_SPEED])
    tables = [_by_workers(simulated["workers"], looks)] if points else []
    charts = _speed_charts(rows, simulated["workers"], looks)
    yield Section(title="Speed by workers", parts=[*tables, *charts])
    if points:
        yield Section(
            title="Other links and mini-batches, simulated",
            parts=[*_sweep_charts(simulated, looks), _points(points, looks)],
            notes=[_SIMULATED],
        )
    if rows:
        yield Section(
            title="Bytes",
            parts=[_traffic_chart(rows, looks), _links(rows, looks)],
            notes=[_BYTES],
        )


def _link(row: Row) -> tuple[float | None, float | None]:
    """Return the megabytes of the busiest link, counted and by formula; None without a link."""
    if row.cell.workers == 1:
        return None, None
    counted, formula = row.measured[row.busiest], row.expected[row.busiest]
    return _MEGABYTE * sum(counted), _MEGABYTE * sum(formula)


def _speed_charts(
    rows: Sequence[Row], simulated: Sequence[Row], looks: Sequence[Series]
) -> Iterator[Chart]:
    drawn = "Points are measured, lines simulated." if simulated else "Means over the starts."
    for name, title, value, caption in (
        ("throughput", "Mini-batches a second", lambda row: row.throughput,
         f"{drawn} All workers together, each with its interval, which may leave the chart."),
        ("speed-up", "Speed-up", lambda row: row.speed_up,
         f"{drawn} Below 1 the workers are together slower than one alone."),
        ("efficiency", "Efficiency, %", lambda row: row.efficiency,
         f"{drawn} 100 % is as many times one worker alone as there are workers."),
    ):  # fmt: skip
        curves = [
            *_curves(simulated, looks, title, value, points=False),
            *_curves(rows, looks, title, value, line=not simulated),
        ]
        both = [*rows, *simulated]
        yield chart_by_workers(both, curves, name=name, y_title=title, caption=caption)


def _sweep_charts(
    simulated: Mapping[Sweep, Sequence[Row]], looks: Sequence[Series]
) -> Iterator[Chart]:
    titles: dict[Sweep, str] = {
        "megabits": "Mbit/s of every link", "mini_batch": "Samples of a mini-batch"
    }  # fmt: skip
    for sweep, x_title in titles.items():
        rows = [row for row in simulated[sweep] if row.cell.layout != ALONE]
        if rows:
            yield Chart(
                name=sweep, x=sweep, y="value", x_title=x_title, y_title="Speed-up", log="x",
                caption="Simulated. Below 1 the workers are together slower than one alone.",
                from_zero=True, curves=_curves(rows, looks, "Speed-up", lambda row: row.speed_up),
            )  # fmt: skip


def _curves(
    rows: Sequence[Row], looks: Sequence[Series], title: str,
    value: Callable[[Row], Interval | None], *, line: bool = True, points: bool = True,
) -> list[Curve]:  # fmt: skip
    """Return a metric of every layout by all that may change, from one worker alone on."""
    curves = []
    for look, each in _lines(rows, looks):
        data = [
            {"value": found.mean, **found.ends, "text": found.text(".4g"), "cell": row.cell.name,
             **{sweep: value_of(row, sweep) for sweep in UNITS}}
            for row in each
            if (found := value(row)) is not None
        ]  # fmt: skip
        hover = ("cell", "@cell"), (title.lower(), "@text")
        own = Curve(series=look, data=by_column(data), hover=hover, line=line, points=points)
        curves.append(own)
    return curves


def _traffic_chart(rows: Sequence[Row], looks: Sequence[Series]) -> Chart:
    """Return what the busiest link carries in an update."""
    hover = (
        ("cell", "@cell"),
        ("counters", "@value{0,0.000} MB"),
        ("formula", "@formula{0,0.000} MB"),
    )
    curves = []
    for look, line in _lines(rows, looks):
        points = by_column([
            {"workers": row.cell.workers, "cell": row.cell.name,
             "value": _link(row)[0] or 0.0, "formula": _link(row)[1] or 0.0}
            for row in line
        ])  # fmt: skip
        curves.append(Curve(series=look, data=points, points=False, y="formula"))
        curves.append(Curve(series=look, data=points, line=False, hover=hover))
    return chart_by_workers(
        rows, curves, name="traffic", y_title="Busiest link, MB an update",
        caption="Points are the counters of the busiest link, lines the formula.",
    )  # fmt: skip


def _lines(rows: Sequence[Row], looks: Sequence[Series]) -> Iterator[tuple[Series, list[Row]]]:
    """Yield the rows of every recipe with every layout by their workers, one alone first."""
    for recipe in dict.fromkeys(row.cell.configuration for row in rows):
        for look in looks:
            own = [row for row in rows if row.cell.configuration == recipe]
            line = [row for row in own if row.cell.layout == look.label]
            if all(row.cell.workers > 1 for row in line):  # central servers may have one worker
                line += [row for row in own if row.cell.layout == ALONE]
            yield _tagged(look, recipe), sorted(line, key=_changed)


def _changed(row: Row) -> tuple[float, ...]:
    return tuple(value_of(row, sweep) for sweep in UNITS)


def _tagged(look: Series, recipe: str) -> Series:
    return replace(look, tags=(f"recipe {recipe}",))


def _series(rows: Sequence[Row], looks: Sequence[Series]) -> list[Series]:
    """Return how each row looks; a worker alone has no button of the legend."""
    own = {look.label: look for look in looks}
    alone = Series(-1, ALONE, INK, ())
    return [_tagged(own.get(row.cell.layout, alone), row.cell.configuration) for row in rows]


def _cells(rows: Sequence[Row], looks: Sequence[Series]) -> Table:
    """Return a row for each cell."""
    column = columns_over(rows)
    columns = [
        column("Cell", lambda row: row.cell.name, None),
        column("Model, MB", lambda row: _MEGABYTE * row.model_bytes, ",.2f"),
        column("Workers", lambda row: row.cell.workers, "d"),
        column("Hosts", lambda row: len(row.cell.placement.workers_per_host), "d"),
        column("Batches/s", lambda row: row.throughput.mean, ",.3f"),
        column("±", lambda row: row.throughput.reach, ",.3f"),
        column("Speed-up", lambda row: row.speed_up and row.speed_up.mean, ".2f"),
        column("± speed-up", lambda row: row.speed_up and row.speed_up.reach, ".2f"),
        column("Efficiency, %", lambda row: row.efficiency and row.efficiency.mean, ".0f"),
        column("Busiest link, MB", lambda row: _link(row)[0], ",.3f"),
        column("Formula, MB", lambda row: _link(row)[1], ",.3f"),
        column(
            "Largest deviation, %",
            lambda row: 100 * row.deviation if row.cell.workers > 1 else None,
            ".2f",
        ),
        column("Late gradients, %", lambda row: 100 * row.late, ".1f"),
        column("Starts", lambda row: len(row.found), "d"),
    ]
    return Table(name="cells", columns=columns, series=_series(rows, looks), printed=_PRINTED)


def _by_workers(rows: Sequence[Row], looks: Sequence[Series]) -> Table:
    """Return the simulated speed-up of each recipe and layout, a column for each number."""
    found = {
        (row.cell.configuration, row.cell.layout, row.cell.workers): row.speed_up for row in rows
    }
    lines = [row for row in rows if row.cell.layout != ALONE]
    firsts = {(row.cell.configuration, row.cell.layout): row for row in reversed(lines)}
    columns = [Column("Simulated speed-up", [" ".join(key) for key in reversed(firsts)])]
    for number in sorted({row.cell.workers for row in lines}):
        own = [found.get((*key, number)) for key in reversed(firsts)]
        columns.append(
            Column(
                f"{number} worker{'s' if number > 1 else ''}",
                [one and one.mean for one in own],
                ".2f",
                details=[f"± {one.reach:.2f}" if one and one.reach else "" for one in own],
            )
        )
    series = _series(list(reversed(firsts.values())), looks)
    return Table(name="by-workers", columns=columns, series=series)


def _points(rows: Sequence[Row], looks: Sequence[Series]) -> Table:
    """Return a row for each simulated point."""
    column = columns_over(rows)
    columns = [
        column("Simulated cell", lambda row: row.cell.name, None),
        column("Workers", lambda row: row.cell.workers, "d"),
        column("Link, Mbit/s", lambda row: row.cell.placement.megabits, ",g"),
        column("Mini-batch", lambda row: row.cell.samples, "d"),
        column("An update, s", lambda row: row.seconds.mean, ",.4f"),
        column("Batches/s", lambda row: row.throughput.mean, ",.3f"),
        column("Speed-up", lambda row: row.speed_up and row.speed_up.mean, ".2f"),
        column("± speed-up", lambda row: row.speed_up and row.speed_up.reach, ".2f"),
        column("Efficiency, %", lambda row: row.efficiency and row.efficiency.mean, ".0f"),
        column("Simulations", lambda row: len(row.found), "d"),
    ]
    return Table(name="points", columns=columns, series=_series(rows, looks))


def _links(rows: Sequence[Row], looks: Sequence[Series]) -> Table:
    """Return a row for the link of each host of each cell."""
    places = [
        (row, place) for row in rows for place in range(len(row.expected)) if row.cell.workers > 1
    ]
    columns = [
        Column("Cell", [row.cell.name for row, _ in places]),
        Column("Host", [place + 1 for _, place in places], "d"),
    ]
    for title, direction in (("Received, MB", 0), ("Sent, MB", 1)):
        counted = [row.measured[place][direction] for row, place in places]
        formula = [row.expected[place][direction] for row, place in places]
        off = [100 * (one / by - 1) for one, by in zip(counted, formula, strict=True)]
        columns += [
            Column(title, [_MEGABYTE * one for one in counted], ",.4f"),
            Column("Formula, MB", [_MEGABYTE * by for by in formula], ",.4f"),
            Column("Off, %", off, ".2f"),
        ]
    return Table(name="links", columns=columns, series=_series([row for row, _ in places], looks))

"""The page of a staleness study: its table, accuracy against time, and how late gradients were.

Words and layout stand in page.html. A protocol has one colour in all charts, and a button that
hides it; filters choose the recipe with its times, and the samples of an update of all learners.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from largebatch.errors import StudyError
from largebatch.recipe.protocols import Hardsync, Softsync
from largebatch.report.interactive import (
    Series,
    add_hover,
    add_line,
    add_points,
    make_interactive_page,
    new_chart,
    new_source,
    only_at,
    series,
)
from largebatch.report.table import Column, new_table
from largebatch.storage import write_html
from largebatch.studies.staleness.pictures import diagonals, panels
from largebatch.studies.staleness.run import Row

if TYPE_CHECKING:
    from largebatch.report.interactive import Chart, Model
    from largebatch.report.table import Table

PAGE = "study.html"
"""What the page is called in the folder of a study."""

AXES = {
    "seconds": "Simulated seconds of a run",
    "product": "mu x lambda, samples",
    "learners": "lambda, learners",
    "mu": "mu, samples of a gradient",
}
"""What accuracy can be drawn against: columns of the chart's data by their titles."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A cell, and how it looks in all charts."""

    look: Series
    row: Row

    @property
    def product(self) -> int:
        """Samples that all learners compute on at a time, mu lambda."""
        return self.row.cell.mu * self.row.cell.learners

    @property
    def name(self) -> str:
        """The cell within its protocol, in words."""
        return f"mu {self.row.cell.mu}, lambda {self.row.cell.learners}"


def write_staleness_page(rows: Sequence[Row], path: Path, *, title: str) -> Path:
    """Write the page of the cells that have records; return its path.

    Raises StudyError where there are none, LargebatchError where the page cannot be written,
    MissingPackageError without Bokeh.
    """
    if not rows:
        raise StudyError("no run of the study has ended: there is nothing to show yet")
    return write_html(path, make_page(rows, title=title))


def make_page(rows: Sequence[Row], *, title: str) -> str:
    """Return the HTML of the page. Raises MissingPackageError without Bokeh."""
    found = panels(rows)
    protocols = list(dict.fromkeys(row.cell.protocol for row in rows))
    drawn = [
        _Drawn(series(protocols.index(row.cell.protocol), row.cell.protocol, tags=tags), row)
        for place, inside in enumerate(found.values())
        for row in inside
        for tags in [(f"panel {place}", f"product {row.cell.mu * row.cell.learners}")]
    ]
    late = [one for one in drawn if one.row.cell.sigma]
    models: dict[str, Model] = {"cells": _table(drawn), "trade_off": _draw_trade_off(drawn)}
    if late:
        models["staleness"] = _draw_staleness(late)
    names = {f"panel {place}": name for place, name in enumerate(found)}
    products = sorted({one.product for one in drawn})
    return make_interactive_page(
        Path(__file__).with_name("page.html"),
        models,
        hidden=[*list(names)[1:], *map(only_at, list(AXES)[1:])],
        title=title,
        subtitle="; ".join(found),
        sentences=[
            sentence for name, inside in found.items() for sentence in describe(name, inside)
        ],
        good=not any(row.diverged for row in rows),
        legend_of=[series(place, name) for place, name in enumerate(protocols)],
        panels=names,
        products={f"product {product}": f"{product:,}" for product in products},
        axes=AXES,
    )


def describe(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """Yield in sentences which cells are the best and the quickest of a recipe with its times.

    The quickest is compared with hardsync of the same mu and lambda, where the study has it.
    """
    best = min(rows, key=lambda row: row.error.mean)
    yield (
        f"{name}: the highest top-1 is {_accuracy(best)}, of {_where(best)}, in "
        f"{best.seconds:,.4g} s of the simulated cluster."
    )
    quickest = min(rows, key=lambda row: row.seconds)
    same = [
        row
        for row in rows
        if not row.cell.sigma
        and (row.cell.mu, row.cell.learners) == (quickest.cell.mu, quickest.cell.learners)
    ]
    if same and same[0] is not quickest:
        points = 100 * (same[0].error.mean - quickest.error.mean)
        yield (
            f"The quickest, {_where(quickest)}, takes {quickest.seconds / same[0].seconds:.2f} "
            f"times as long as hardsync, with {abs(points):.2f} points "
            f"{'more' if points > 0 else 'less'}: {_accuracy(quickest)}."
        )
    if diverged := [row for row in rows if row.diverged]:
        names = "; ".join(_where(row) for row in diverged)
        yield f"Runs diverged, which counts as chance, of {names}."


def _where(row: Row) -> str:
    return f"{row.cell.protocol} (mu {row.cell.mu}, lambda {row.cell.learners})"


def _accuracy(row: Row) -> str:
    reach = row.error.high - row.error.mean
    return f"{1 - row.error.mean:.2%}" + (f" ± {100 * reach:.2f}" if math.isfinite(reach) else "")


def _table(drawn: Sequence[_Drawn]) -> "Table":
    """Return a row for each cell."""

    def column(title: str, value: Callable[[Row], object], form: str | None) -> Column:
        return Column(title, [value(one.row) for one in drawn], form)

    several = len(panels([one.row for one in drawn])) > 1
    where = (
        column("Recipe", lambda row: row.cell.configuration, None),
        column("Times", lambda row: row.cell.times, None),
    )
    return new_table(
        [
            column("Protocol", lambda row: row.cell.protocol.partition(",")[0], None),
            column("Modulation", _modulation, None),
            *(where if several else ()),
            column("sigma", lambda row: row.cell.sigma, "0"),
            column("mu", lambda row: row.cell.mu, "0,0"),
            column("lambda", lambda row: row.cell.learners, "0,0"),
            column("mu x lambda", lambda row: row.cell.mu * row.cell.learners, "0,0"),
            column("Top-1, %", lambda row: 100 * (1 - row.error.mean), "0.00"),
            column("±", lambda row: 100 * (row.error.high - row.error.mean), "0.00"),
            column("Seconds", lambda row: row.seconds, "0,0.00"),
            column("Mean tau", lambda row: row.tau, "0.00"),
            column("tau > 2 sigma, %", lambda row: 100 * row.late / sum(row.counts), "0.0000"),
            column("Highest tau", lambda row: len(row.staleness) - 1, "0,0"),
            column("Updates", lambda row: row.found[0]["updates"], "0,0"),
            column("Seeds", lambda row: len(row.found), "0"),
            column("Diverged", lambda row: row.diverged, "0"),
        ],
        colours=[one.look.colour for one in drawn],
        tags=[(f"series {one.look.place}", *one.look.tags) for one in drawn],
    )


def _modulation(row: Row) -> str:
    protocol = row.cell.recipe.protocol
    assert isinstance(protocol, Hardsync | Softsync)  # the grids have no other
    return protocol.modulation


def _draw_trade_off(drawn: Sequence[_Drawn]) -> "Chart":
    """Draw the error of every cell with its interval, and the lines of equal mu x lambda.

    Rudra's rule (arXiv:1509.04210) is that such a line is level.
    """
    chart = new_chart(x=AXES["seconds"], y="Error, %", height=460, log="x")
    marks = []
    for one in drawn:
        row, error = one.row, one.row.error
        at = {
            "seconds": row.seconds,
            "product": one.product,
            "learners": row.cell.learners,
            "mu": row.cell.mu,
        }
        if math.isfinite(error.low):
            ends = {key: [value] * 2 for key, value in at.items()}
            source = new_source({**ends, "error": [100 * error.low, 100 * error.high]})
            add_line(chart, one.look, source, "seconds", "error", moves=True)
        data: dict[str, list[Any]] = {key: [value] for key, value in at.items()}
        data |= {"error": [100 * error.mean], "size": [10], "cell": [one.name]}
        data |= {"text": [_accuracy(row)], "tau": [f"{row.tau:.2f}"]}
        marks.append(add_points(chart, one.look, new_source(data), "seconds", "error", moves=True))
    for look, joined in _lines(drawn):
        ordered = sorted((row.seconds, 100 * row.error.mean) for row in joined)
        ends = {
            "seconds": [place for place, _ in ordered],
            "error": [error for _, error in ordered],
        }
        dotted = replace(look, dash=(2, 4), tags=(*look.tags, only_at("seconds")))
        add_line(chart, dotted, new_source(ends), "seconds", "error")
    chart.y_range.update(renderers=marks)
    rows = [("cell", "@cell"), ("top-1", "@text"), ("seconds", "@seconds{0,0.00}")]
    add_hover(chart, marks, [*rows, ("mean tau", "@tau")])
    return chart


def _lines(drawn: Sequence[_Drawn]) -> Iterator[tuple[Series, list[Row]]]:
    """Yield the cells that a line joins, and how it looks."""
    looks = {one.row.cell.protocol: one.look for one in drawn}
    tags = {one.row.cell.name: one.look.tags for one in drawn}
    for inside in panels([one.row for one in drawn]).values():
        for (protocol, _), joined in diagonals(inside).items():
            yield replace(looks[protocol], tags=tags[joined[0].cell.name]), joined


def _draw_staleness(drawn: Sequence[_Drawn]) -> "Chart":
    """Draw what share of the gradients was how many updates late, and where 2 sigma is."""
    chart = new_chart(x="tau, updates", y="Gradients, %", height=380, from_zero=True)
    marks = []
    for one in drawn:
        shares = [100 * share for share in one.row.staleness]
        number, end = len(shares), 2 * one.row.cell.sigma
        data = {"tau": list(range(number)), "share": shares, "cell": [one.name] * number}
        source = new_source({**data, "size": [5] * number})
        add_line(chart, one.look, source, "tau", "share")
        marks.append(add_points(chart, one.look, source, "tau", "share"))
        bound = new_source({"tau": [end, end], "share": [0.0, max(shares)]})
        add_line(chart, replace(one.look, dash=(2, 4)), bound, "tau", "share")
    rows = [("cell", "@cell"), ("tau", "@tau"), ("gradients", "@share{0.[0000]} %")]
    add_hover(chart, marks, rows)
    return chart

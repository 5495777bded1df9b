"""One builder for all interactive pages: tables, charts, filters and findings, declared as data.

A page is one file that loads nothing. A caller supplies data and words and no HTML; the layout is
interactive.html, and interactive_charts.py draws the charts. Everything that can be hidden has
tags: a row of a table, a series, a part or a section is visible while none of its tags is hidden.
The legend and the filters hide tags.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from largebatch.formatting import MISSING, aligned
from largebatch.report import style
from largebatch.report.interactive_charts import Chart, Series, draw_all
from largebatch.storage import write_html

Row = TypeVar("Row")

STRONGEST = 50
"""Percent of the colour of a cell with strength 1; the number on it stays readable."""


def tag_at(column: str) -> str:
    """Return the tag of what is visible only while this column is the horizontal axis."""
    return f"at {column}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    values: Sequence[Any]
    form: str | None = None
    """Format specification of numbers, such as `,.2f`; None: the values are text."""

    unit: str = ""
    """Text after each number."""

    details: Sequence[str] = ()
    """Smaller text below each value."""

    strengths: Sequence[float] = ()
    """Strength of the background colour of each value, 0 to 1."""

    tooltips: Sequence[str] = ()

    def cells(self) -> Iterator[dict[str, Any]]:
        """Yield what a table shows of each value."""
        for place, value in enumerate(self.values):
            is_missing, is_number = _is_missing(value), self.form is not None
            strength = self.strengths[place] if self.strengths else 0.0
            shown = f"{value:{self.form}}{self.unit}" if is_number and not is_missing else value
            yield {
                "text": MISSING if is_missing else shown,
                "is_missing": is_missing,
                "number": value if is_number and not is_missing else None,
                "detail": self.details[place] if self.details else "",
                "strength": 0 if math.isnan(strength) else round(STRONGEST * strength),
                "tooltip": self.tooltips[place] if self.tooltips else "",
            }

    @property
    def is_empty(self) -> bool:
        """True if every value is missing."""
        return all(map(_is_missing, self.values))


def columns_over(
    rows: Sequence[Row],
) -> Callable[[str, Callable[[Row], object], str | None], Column]:
    """Return a function that makes a column: of a title, the value of a row, and its format."""

    def column(title: str, value: Callable[[Row], object], form: str | None) -> Column:
        return Column(title, [value(row) for row in rows], form)

    return column


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table whose headers sort it; its first column stays in view."""

    name: str
    """Name of the part in the page, its `id`."""

    columns: Sequence[Column]

    series: Sequence[Series | None] = ()
    """Series of each row: colours its first cell, and hides the row with it."""

    caption: str = ""
    tags: tuple[str, ...] = ()
    printed: Collection[str] = ()
    """Titles of the columns that `text` has; all if empty."""

    @property
    def shown(self) -> list[Column]:
        """The columns that have a value."""
        return [one for one in self.columns if not one.is_empty]

    def rows(self) -> Iterator[tuple[Series | None, tuple[dict[str, Any], ...]]]:
        """Yield the series and the cells of each row."""
        cells = list(zip(*(column.cells() for column in self.shown), strict=True))
        return zip(self.series or [None] * len(cells), cells, strict=bool(cells))

    def text(self) -> str:
        """Return the table as aligned lines for a terminal."""
        columns = [one for one in self.shown if not self.printed or one.title in self.printed]
        cells = ([str(cell["text"]) for cell in column.cells()] for column in columns)
        rows = [[one.title for one in columns], *zip(*cells, strict=True)]
        return aligned(rows, right=[n for n, one in enumerate(columns) if one.form is not None])


@dataclass(frozen=True, slots=True)
class Filter:
    """Choices that hide what has the tags of the others."""

    title: str
    choices: Mapping[str, str]
    """Tags, or columns of the charts' data where the kind is `axis`, and their text."""

    kind: Literal["one", "several", "axis", "without"] = "one"
    """`axis`: the choice is the horizontal axis of the charts that follow it. `without`: a switch
    that hides the tag `NAME COLUMN`, for its NAME and the COLUMN of the axis."""

    @property
    def is_shown(self) -> bool:
        """False if there is nothing to choose."""
        return len(self.choices) > 1 or self.kind in {"axis", "without"}

    @property
    def first_hidden(self) -> tuple[str, ...]:
        """Tags that are hidden when the page opens."""
        others = list(self.choices)[1:]
        if self.kind == "axis":
            return tuple(map(tag_at, others))
        return tuple(others) if self.kind == "one" else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with its parts and, below them, notes; one without either is left out."""

    title: str
    parts: Sequence[Table | Chart] = ()
    filters: Sequence[Filter] = ()
    notes: Sequence[str] = ()
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a page shows, from the top down."""

    title: str
    subtitle: str
    findings: Sequence[str]
    """Sentences that answer the question of the page."""

    is_sound: bool
    """False if the findings have a reservation: too few seeds, runs that diverged."""

    note: str
    """How the findings were obtained."""

    legend: tuple[str, Sequence[Series]]
    """What the series are, such as "Policies", and the series."""

    filters: Sequence[Filter] = ()
    sections: Sequence[Section]
    source: str
    """What the page was written from."""

    def write(self, path: Path) -> Path:
        """Write the page; return its path.

        Raises LargebatchError where it cannot be written, MissingPackageError without Bokeh.
        """
        return write_html(path, self.html())

    def text(self) -> str:
        """Return the first table and the findings, for a terminal."""
        parts = [part for section in self.sections for part in section.parts]
        table = next(part for part in parts if isinstance(part, Table))
        return "\n".join([table.text(), *self.findings])

    def html(self) -> str:
        """Return the page. Raises MissingPackageError without Bokeh."""
        filters = [*self.filters, *(one for section in self.sections for one in section.filters)]
        hidden = frozenset(tag for one in filters for tag in one.first_hidden)
        parts = [part for section in self.sections for part in section.parts]
        drawn = draw_all([part for part in parts if isinstance(part, Chart)], hidden=hidden)
        loader = FileSystemLoader(Path(__file__).parent)
        templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
        templates.filters["css_variable"] = style.css_variable
        templates.tests["hidden"] = lambda tags: not hidden.isdisjoint(tags)
        return templates.get_template("interactive.html").render(
            page=self,
            drawn=drawn,
            light=style.LIGHT,
            dark=style.DARK,
            light_to_dark=[(light, style.DARK[name]) for name, light in style.LIGHT.items()],
        )

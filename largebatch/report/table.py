"""Tables of the interactive pages: a click on a header sorts, the first column stays in sight.

Titles take two lines, so that a window shows as many columns as their values leave room for. What
is beyond its right edge the script of interactive.html names above the table.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, TypeAlias

from largebatch.optional import require_bokeh
from largebatch.report.style import css_variable

if TYPE_CHECKING:
    from bokeh.models.widgets import tables

    Table: TypeAlias = tables.DataTable

MISSING = "–"
"""Stands for a value that there is not."""

TAGS = "tags"
"""The column of a table that has the tags of each row."""

ROW, _HEADER, _SCROLLBAR, HIGHEST = 32, 60, 18, 760
"""Heights of parts of a table and its greatest height, in pixels; more rows than fit scroll."""

_NARROWEST, _WIDEST = 60, 240
"""Least and greatest width of a column in pixels."""

_TITLE_LETTER, _LETTER = 7.6, 9.0
"""Width of a character in pixels, in titles and numbers and in texts: labels are bold, and hashes
have few narrow characters."""

_TABLE_CSS = """
.slick-header-column, .slick-cell { font-family: inherit; font-size: 0.8125rem; }
.slick-header-column, .slick-header-columns { background: var(--paper) !important; }
.slick-header-column {
  color: var(--muted); border: 0 !important; padding: 8px 8px 6px !important; font-weight: 400;
  box-sizing: border-box !important; height: 50px !important; line-height: 1.35;
  white-space: normal !important;
}
.slick-column-name { white-space: normal; overflow-wrap: anywhere; }
.slick-header-column:hover { color: var(--ink); }
.slick-cell, .slick-cell.selected {
  color: var(--ink); background: var(--paper) !important; border: 0 !important;
  border-top: 1px solid var(--rule) !important; padding: 6px 8px !important;
}
.slick-cell > div { overflow: hidden; text-overflow: ellipsis; }
.slick-row:hover .slick-cell { background: var(--tint) !important; }
.bk-data-table, .slick-viewport { background: var(--paper) !important; }
.slick-viewport { scrollbar-width: thin; scrollbar-color: var(--muted) transparent; }
.bk-data-table { font: 0.8125rem/1.4 Inter, system-ui, -apple-system, "Segoe UI", sans-serif; }
"""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; it sorts by its values, of which None and NaN are missing."""

    title: str
    values: Sequence[Any]
    format: str | None = None
    """Format of numbers, as in Bokeh's NumberFormatter: `0,0.00`; None: the values are texts."""


def new_table(
    columns: Sequence[Column],
    *,
    colours: Sequence[str] = (),
    tags: Sequence[Sequence[str]] = (),
) -> "Table":
    """Return a table that a click on a header sorts; the first column stays in sight.

    A column of which every value is missing is left out. `colours` are those of the first column's
    texts, by row, and `tags` what hides a row. Raises MissingPackageError without Bokeh.
    """
    require_bokeh()
    from bokeh.models import CDSView, ColumnDataSource, IndexFilter
    from bokeh.models.widgets import tables

    columns = [columns[0], *(column for column in columns[1:] if _has_values(column))]
    data: dict[str, Any] = {str(place): column.values for place, column in enumerate(columns)}
    if colours:
        data["colour"] = list(map(css_variable, colours))
    if tags:
        data[TAGS] = [list(row) for row in tags]
    rows = len(columns[0].values)
    return tables.DataTable(
        source=ColumnDataSource(data), view=CDSView(filter=IndexFilter(indices=list(range(rows)))),
        columns=[
            tables.TableColumn(
                field=str(place), title=escape(column.title), width=_width(column),
                tags=[_width_of_values(column)],
                formatter=_formatter(column, coloured=bool(colours) and place == 0),
                default_sort="ascending" if column.format is None else "descending",
            )
            for place, column in enumerate(columns)
        ],
        index_position=None, frozen_columns=1, autosize_mode="none", sizing_mode="stretch_width",
        margin=0, row_height=ROW, height=table_height(rows),
        selectable=False, reorderable=False, stylesheets=[_TABLE_CSS + _header_css(columns)],
    )  # fmt: skip


def table_height(rows: int) -> int:
    """Return the height of a table with this number of rows in pixels."""
    return min(_HEADER + ROW * rows + _SCROLLBAR, HIGHEST)


def _has_values(column: Column) -> bool:
    return any(value is not None and not _is_nan(value) for value in column.values)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _header_css(columns: Sequence[Column]) -> str:
    """Return what puts the titles of numbers to the right, above these."""
    places = [place for place, column in enumerate(columns[1:], start=1) if column.format]
    return "".join(
        f".slick-header-columns-right > :nth-child({place}) .slick-column-name "
        "{ float: right; text-align: right; }"
        for place in places
    )


def _formatter(column: Column, *, coloured: bool) -> Any:  # noqa: ANN401 -- one of two of Bokeh's
    from bokeh.core.properties import field, value
    from bokeh.models.widgets import tables

    if column.format is not None:
        return tables.NumberFormatter(
            format=column.format, nan_format=MISSING, null_format=MISSING, text_align="right"
        )
    if not coloured:
        return tables.StringFormatter(nan_format=MISSING, null_format=MISSING)
    return tables.StringFormatter(text_color=field("colour"), font_style=value("bold"))


def _width(column: Column) -> int:
    """Return how wide a column is, in pixels: as its title in two lines, or its longest value."""
    words = column.title.split()
    halves = ((" ".join(words[:k]), " ".join(words[k:])) for k in range(1, len(words) + 1))
    title = min(max(map(len, pair)) for pair in halves) + 1  # and the arrow of a sorted column
    return max(_bounded(_TITLE_LETTER * title), _width_of_values(column))


def _width_of_values(column: Column) -> int:
    """Return the width in pixels that its longest value needs, whatever its title does."""
    values = [value for value in column.values if value is not None and not _is_nan(value)]
    if column.format is None:
        return _bounded(_LETTER * max((len(str(value)) for value in values), default=0))
    shown = (_shown(value, column.format) for value in values)
    return _bounded(_TITLE_LETTER * max(map(len, shown), default=0))


def _bounded(text: float) -> int:
    """Return the width in pixels of a column whose text is that wide."""
    return round(min(max(_NARROWEST, 22 + text), _WIDEST))


def _shown(number: float, form: str) -> str:
    """Return about what Bokeh's NumberFormatter shows of a number.

    >>> _shown(57_600, "0,0"), _shown(98.6, "0.00"), _shown(0.5, "0.[00000000]")
    ('57,600', '98.60', '0.5')
    """
    decimals = form.partition(".")[2]
    return f"{number:,.8g}" if decimals.startswith("[") else f"{number:,.{len(decimals)}f}"

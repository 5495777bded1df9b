"""The builder of all pages: of a run, of runs compared, of a study.

A page is declared as data: sections of tables, charts and notes. It is one file that loads nothing,
with charts as inline SVG and 60 lines of script that sort tables, filter rows and hide series; a
page without a sortable table has no script. Text is escaped by the template, pages.html.
"""

import csv
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from largebatch.errors import LargebatchError
from largebatch.formatting import MISSING, table
from largebatch.report.style import (
    COLOURS,
    MORE_COLOURS,
    PALETTE,
    make_svg,
    name_axes,
    save_figure,
)
from largebatch.storage import write_whole, writing

if TYPE_CHECKING:
    from matplotlib.axis import Axis

    from largebatch.report.run import FloatArray
    from largebatch.report.style import Axes, Canvas

Row = TypeVar("Row")

_WIDTH = 960  # of a chart in a page, in points
_PAPER_WIDTH = 468  # of a chart for a paper: 6.5 inches, the text of a page of one column
_COLOURS = (*COLOURS.values(), *MORE_COLOURS)
_DASHES = ((), (4, 2.2), (1, 1.4), (5, 1.6, 1, 1.6), (8, 2.5))
"""In widths of the line. Each six series have another dash, so that colours which some readers
cannot tell apart differ by it; 60 series look different."""


@dataclass(frozen=True, slots=True)
class Series:
    """A run, policy or protocol: one look in all tables and charts, one button of the legend."""

    place: int | None
    """Its number on the page; None for rows that have a colour and cannot be hidden."""

    label: str
    colour: str
    dash: tuple[float, ...] = ()
    title: str = ""
    """Tooltip of the legend."""


def series(place: int, label: str, *, title: str = "") -> Series:
    """Return a series in the colours of the pages, the first ones solid, the next ones dashed."""
    # Another dash with each round of colours: some readers, and printers, see no colour.
    dash = _DASHES[place // len(COLOURS) % len(_DASHES)]
    return Series(place, label, _COLOURS[place % len(_COLOURS)], dash, title)


def _with_code(text: object) -> Markup:
    """Return a text as HTML; what is in backticks, such as a command, is code.

    >>> str(_with_code("run `lab range` & wait"))
    'run <code>lab range</code> &amp; wait'
    """
    # Escaped first: what is between backticks may contain < and &.
    escaped = str(escape(text))
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped))  # noqa: S704 -- escaped


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    values: Sequence[Any]
    form: str | None = None
    """Format specification of numbers, such as `,.2f`; None: the values are text."""

    before: Sequence[str] = ()
    """Earlier values, in grey before each value; empty strings for none."""

    details: Sequence[str] = ()
    """Smaller text below each value."""

    links: Sequence[str] = ()
    """Names of charts that the values link to; empty strings for none."""

    align: Literal["", "number", "text"] = ""
    """`number`: to the right, as numbers are; `text`: sentences, which are wrapped."""

    @property
    def is_number(self) -> bool:
        """True if the values sort by size."""
        return self.form is not None

    @property
    def css(self) -> str:
        """Its class in the page."""
        return "number" if self.is_number else self.align

    def cells(self) -> Iterator[dict[str, Any]]:
        """Yield what a table shows of each value."""
        for row, value in enumerate(self.values):
            missing = _is_missing(value)
            text = f"{value:{self.form}}" if self.is_number and not missing else value
            yield {
                "text": MISSING if missing else text,
                "number": value if self.is_number and not missing else None,
                "missing": missing,
                "before": self.before[row] if self.before else "",
                "detail": self.details[row] if self.details else "",
                "link": self.links[row] if self.links else "",
            }


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

    kind: ClassVar = "table"
    name: str = ""
    """Its `id` in the page."""

    columns: Sequence[Column]
    series: Sequence[Series | None] = ()
    """Series of each row: colours its first cell, and hides the row with it."""

    caption: str = ""
    sortable: bool = True
    """False for a short table in a fixed order, which a phone shows as cards."""

    printed: Collection[str] = ()
    """Titles of the columns that `text` has; all if empty."""

    @property
    def shown(self) -> list[Column]:
        """The columns that have a value."""
        return [column for column in self.columns if not all(map(_is_missing, column.values))]

    def rows(self) -> Iterator[tuple[Series | None, tuple[dict[str, Any], ...]]]:
        """Yield the series and the cells of each row."""
        # A list, because its length is needed where no row has a series.
        cells = list(zip(*(column.cells() for column in self.shown), strict=True))
        return zip(self.series or [None] * len(cells), cells, strict=bool(cells))

    def text(self) -> str:
        """Return the table as aligned lines for a terminal."""
        columns = self.shown
        if self.printed:
            columns = [column for column in columns if column.title in self.printed]
        cells = ([str(cell["text"]) for cell in column.cells()] for column in columns)
        rows = [[column.title for column in columns], *zip(*cells, strict=True)]
        return table(rows, right=[n for n, column in enumerate(columns) if column.is_number])

    def csv(self) -> str:
        """Return the table with all digits, for a spreadsheet; nothing for a missing value."""
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.title for column in self.shown])
        columns = [
            ["" if _is_missing(value) else value for value in column.values]
            for column in self.shown
        ]
        writer.writerows(zip(*columns, strict=True))
        return text.getvalue()

    def latex(self) -> str:
        """Return the table as it is shown, as a `tabular` with the rules of LaTeX's booktabs."""
        align = "".join("r" if column.is_number else "l" for column in self.shown)
        # As on the page, rounded; `csv` has all digits.
        cells = [[str(cell["text"]) for cell in column.cells()] for column in self.shown]
        rows = [[column.title for column in self.shown], *zip(*cells, strict=True)]
        lines = [" & ".join(map(_as_latex, row)) + r" \\" for row in rows]
        return "\n".join(
            [
                r"% needs \usepackage{booktabs}",
                rf"\begin{{tabular}}{{{align}}}",
                *(r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"),
                r"\end{tabular}",
                "",
            ]
        )


_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "−": r"$-$",
        "×": r"$\times$",
        "–": "--",
        "<": r"$<$",
        ">": r"$>$",
    }
)


def _as_latex(text: str) -> str:
    r"""Return a text of a table for LaTeX.

    >>> print(_as_latex("Top-1, % ± a_b"))
    Top-1, \% $\pm$ a\_b
    """
    return text.translate(_LATEX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A series in a panel: a line, points or both."""

    series: Series
    x: "Sequence[Any] | FloatArray"
    y: "Sequence[float] | FloatArray"
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """Ends of intervals, drawn as bars."""

    left: Sequence[float] = ()
    right: Sequence[float] = ()
    """Ends of intervals of x, drawn as bars."""

    line: bool = True
    points: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Axes with lines."""

    lines: Sequence[Line]
    x: str
    y: str
    """Titles of the axes, with their units."""

    log: Literal["", "x", "y", "xy"] = ""
    from_zero: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart as SVG, beside which a phone scrolls."""

    kind: ClassVar = "chart"
    name: str
    """Its `id` in the page."""

    title: str = ""
    """What is read out in its place, and the title of a PNG file."""

    draw: "Callable[[Canvas], None]"
    height: float = 340
    """In points."""

    caption: str = ""

    def svg(self) -> Markup:
        """Return the chart."""
        size = (_WIDTH, self.height)
        label = self.title or self.caption
        markup = make_svg(self.draw, size=size, name=self.name, label=label)
        return Markup(markup)  # noqa: S704 -- matplotlib escapes the text in it

    def save(self, path: Path, *, legend: "Sequence[Series]") -> None:
        """Write the chart for a column of text with a legend; .pdf or .svg, as the path ends."""
        names = [(entry.label, entry.colour, entry.dash) for entry in legend]
        save_figure(path, self.draw, size=(_PAPER_WIDTH, self.height), legend=names)


def line_chart(name: str, *panels: Panel, title: str = "", caption: str = "") -> Chart:
    """Return a chart of one panel, or of several side by side."""

    def draw(figure: "Canvas") -> None:
        all_axes = figure.subplots(1, len(panels), squeeze=False).flat
        for axes, panel in zip(all_axes, panels, strict=True):
            draw_panel(axes, panel)

    title = title or panels[0].y
    return Chart(name=name, title=title, draw=draw, height=320, caption=caption)


def draw_panel(axes: "Axes", panel: Panel) -> None:
    """Draw the lines of a panel; limits, ticks and titles as in the report of a run."""
    for line in panel.lines:
        if len(line.x):
            _draw_line(axes, line)
    if "x" in panel.log:
        axes.set_xscale("log")
        _set_log_ticks(axes.xaxis, axes.get_xlim())
    if "y" in panel.log:
        axes.set_yscale("log")
        _set_log_ticks(axes.yaxis, axes.get_ylim())
    # Names on the axis have no number format.
    if not any(isinstance(x, str) for line in panel.lines for x in line.x):
        axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.yaxis.set_major_formatter("{x:,.10g}")
    if panel.from_zero and any(len(line.y) for line in panel.lines):
        axes.set_ylim(bottom=0)
    name_axes(axes, y=panel.y, x=panel.x)


def _draw_line(axes: "Axes", line: Line) -> None:
    colour = line.series.colour
    number = line.series.place
    gid = None if number is None else f"series-{number}"  # make_svg turns it into an attribute
    if line.line:
        style = (0, line.series.dash) if line.series.dash else "-"
        axes.plot(line.x, line.y, color=colour, ls=style, gid=gid)
    if len(line.low):
        axes.vlines(line.x, line.low, line.high, color=colour, lw=1.2, gid=gid)
    if len(line.left):
        axes.hlines(line.y, line.left, line.right, color=colour, lw=1.2, gid=gid)
    if line.points:
        axes.scatter(line.x, line.y, 25, colour, zorder=3, gid=gid)


def _set_log_ticks(axis: "Axis", limits: tuple[float, float]) -> None:
    """Label 1, 2 and 5 of each decade if an axis has few decades."""
    from matplotlib.ticker import LogLocator, NullLocator

    # Without a positive range: many decades, so few labels.
    low, high = limits
    decades = math.log10(high / low) if 0 < low < high else 9
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 3 else (1,)))
    axis.set_minor_locator(NullLocator())


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values."""

    kind: ClassVar = "facts"
    rows: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Code:
    """A text that is shown as it is, once it is opened."""

    kind: ClassVar = "code"
    name: str
    text: str


PagePart = Table | Chart | Facts | Code | str
"""A part of a section; a text is a note between other parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """A heading with its parts and, below them, notes; one without either is left out."""

    title: str
    parts: Sequence[PagePart] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Headline:
    """One big number."""

    label: str
    value: str
    unit: str
    note: str
    colour: Literal["", "good", "bad", "grey"] = ""
    """Colour of a value that is compared; grey: the change may be chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a page shows, from the top down."""

    title: str
    subtitle: str = ""
    findings: Sequence[str] = ()
    """Sentences that answer the question of the page."""

    is_sound: bool = True
    """False if the findings have a reservation: too few seeds, runs that diverged."""

    headlines: Sequence[Headline] = ()
    note: str = ""
    """How the findings were obtained."""

    legend: tuple[str, Sequence[Series]] = ("", ())
    """What the series are, such as "Policies", and the series."""

    sections: Sequence[PageSection]
    source: str
    """What the page was written from."""

    def write(self, path: Path) -> Path:
        """Write the page; return its path.

        Raises LargebatchError if it cannot be written, MissingPackageError without matplotlib.
        """
        content = self.html().encode()
        with writing(path, error=LargebatchError):
            write_whole(path, content)
        return path

    def write_for_paper(self, folder: Path) -> Path:
        """Write each table as CSV and LaTeX and each chart as PDF and SVG; return the folder.

        CSV begins with the mark by which spreadsheets know UTF-8. Raises LargebatchError if a file
        cannot be written.
        """
        with writing(folder, error=LargebatchError):
            for part in self._parts():
                if isinstance(part, Table):
                    write_whole(folder / f"{part.name}.csv", part.csv().encode("utf-8-sig"))
                    write_whole(folder / f"{part.name}.tex", part.latex().encode())
                elif isinstance(part, Chart):
                    for suffix in (".pdf", ".svg"):
                        part.save(folder / f"{part.name}{suffix}", legend=self.legend[1])
        return folder

    def text(self) -> str:
        """Return the first table and the findings, for a terminal."""
        table = next(part for part in self._parts() if isinstance(part, Table))
        return "\n".join([table.text(), *self.findings])

    def html(self) -> str:
        """Return the page. Raises MissingPackageError without matplotlib."""
        loader = FileSystemLoader(Path(__file__).parent)
        templates = Environment(
            loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
            lstrip_blocks=True,
        )  # fmt: skip
        sortable = any(isinstance(part, Table) and part.sortable for part in self._parts())
        templates.filters["marked"] = _with_code
        return templates.get_template("pages.html").render(
            page=self, palette=PALETTE, has_script=sortable
        )

    def _parts(self) -> Iterator[PagePart]:
        return (part for section in self.sections for part in section.parts)

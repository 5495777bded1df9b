"""Charts of the interactive pages, declared as data and drawn by Bokeh.

The only module that imports Bokeh, whose scripts are written into the page. Text, grids and
backgrounds use CSS variables; a script of the page exchanges the other colours for the dark scheme.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from markupsafe import Markup

from largebatch.optional import require_bokeh
from largebatch.report import style

if TYPE_CHECKING:
    from bokeh import plotting
    from bokeh.models import glyph, renderers

    Figure: TypeAlias = plotting.figure
    Glyph: TypeAlias = glyph.Glyph
    Renderer: TypeAlias = renderers.GlyphRenderer[Any]

DOTTED = (2, 4)
"""Dash pattern in pixels."""

_MOVES = "moves"
"""Tag of what the choice of the horizontal axis moves to another column."""

_COLOURS = tuple(style.COLOURS.values())
_DASHES = ((), (7, 4), (2, 3), (9, 3, 2, 3), (14, 4))
"""In pixels; with 7 colours, 35 series look different."""


@dataclass(frozen=True, slots=True)
class Series:
    """One button of the legend, and how charts draw it."""

    place: int
    label: str
    colour: str
    dash: tuple[int, ...]
    title: str = ""
    """Tooltip of the legend."""

    tags: tuple[str, ...] = ()
    """Tags of the filters that hide it."""

    @property
    def all_tags(self) -> list[str]:
        """Its tags, with that of the legend's button."""
        return [f"series {self.place}", *self.tags]


def series(place: int, label: str, *, title: str = "", tags: tuple[str, ...] = ()) -> Series:
    """Return a series in the colours of the pages, the first ones solid, the next ones dashed."""
    dash = _DASHES[place // len(_COLOURS) % len(_DASHES)]
    return Series(place, label, _COLOURS[place % len(_COLOURS)], dash, title, tags)


Columns: TypeAlias = Mapping[str, Any]
"""Columns of one length, by name."""


def by_column(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Return rows of the same keys as columns."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A series in a chart: a line, points or both."""

    series: Series
    data: Columns
    """The columns that the chart names, and those of tooltips; empty: nothing is drawn. `low` and
    `high` are the ends of an interval, NaN for none. `fill` is the opacity of a point, `marker` its
    form, `size` its size in pixels."""

    line: bool = True
    points: bool = True
    hover: Sequence[tuple[str, str]] = ()
    """Rows of the tooltip of its points, or of its line without points: a name, and what it shows
    in Bokeh's notation, such as `@top1{0.00} %`."""

    x: str | None = None
    """Column along x that the choice of the axis does not change; None: that of the chart."""

    y: str | None = None
    """Column along y; None: that of the chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart whose ranges follow what is visible."""

    name: str
    """Name of the part in the page, its `id`."""

    x: str
    y: str
    """Columns of the data."""

    x_title: str
    y_title: str
    curves: Sequence[Curve]
    caption: str = ""
    tags: tuple[str, ...] = ()
    height: int = 340
    log: Literal["", "x", "y"] = ""
    from_zero: bool = False
    categories: Sequence[str] = ()
    """Texts along x; empty: numbers."""

    ticks: Sequence[float] = ()
    """Places of the ticks along x; empty: chosen by their range."""

    moves: bool = False
    """True if the choice of the horizontal axis puts other columns along x."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Charts as HTML."""

    library: Markup
    script: Markup
    parts: Mapping[str, Markup]
    """By the names of the charts."""


def draw_all(charts: Sequence[Chart], *, hidden: Collection[str]) -> Drawn:
    """Draw charts, without the series that have one of the hidden tags.

    Raises MissingPackageError without Bokeh.
    """
    require_bokeh()
    from bokeh.embed import components
    from bokeh.resources import Resources

    if not charts:
        return Drawn(Markup(), Markup(), {})
    figures = {one.name: _draw(one) for one in charts}
    for figure in figures.values():
        for renderer in figure.renderers:
            renderer.visible = not set(hidden).intersection(renderer.tags)
    script, parts = components({**figures})
    library = Resources(mode="inline", components=["bokeh"], log_level="error").render()
    return Drawn(
        library=Markup(library),  # noqa: S704 -- Bokeh's own scripts
        script=Markup(script),  # noqa: S704 -- Bokeh escapes the texts in it
        parts={name: Markup(part) for name, part in parts.items()},  # noqa: S704 -- the same
    )


def _draw(chart: Chart) -> "Figure":
    """Return a chart as wide as its place; intervals do not widen its ranges."""
    from bokeh import models

    figure, drawn = _new_figure(chart), []
    hovered: dict[tuple[tuple[str, str], ...], list[Renderer]] = {}
    for curve in chart.curves:
        if not curve.data:
            continue
        source, x = models.ColumnDataSource(dict(curve.data)), curve.x or chart.x
        tags = [*curve.series.all_tags, *([_MOVES] if chart.moves and curve.x is None else [])]
        for glyph in _glyphs(curve, x, curve.y or chart.y):
            top = figure.add_glyph(source, glyph, name=curve.series.label, tags=tags)
            if not isinstance(glyph, models.Segment):
                drawn.append(top)
        if curve.hover:
            hovered.setdefault(tuple(curve.hover), []).append(top)
    figure.y_range.update(renderers=drawn)
    for rows, renderers in hovered.items():
        _add_hover(figure, renderers, rows)
    return figure


def _glyphs(curve: Curve, x: str, y: str) -> "Iterator[Glyph]":
    """Yield what a curve consists of, the lowest first."""
    from bokeh.core.properties import value
    from bokeh.models import glyphs

    colour, data = curve.series.colour, curve.data
    if curve.line:
        yield glyphs.Line(
            x=x, y=y, line_color=colour, line_width=2, line_dash=list(curve.series.dash),
            line_join="round",
        )  # fmt: skip
    if "low" in data:
        yield glyphs.Segment(x0=x, x1=x, y0="low", y1="high", line_color=colour, line_width=2)
    if curve.points:
        yield glyphs.Scatter(
            x=x, y=y, line_color=colour, fill_color=colour,
            size="size" if "size" in data else 8 if "fill" in data else 6,
            marker="marker" if "marker" in data else value("circle"),
            fill_alpha="fill" if "fill" in data else 1.0,
        )  # fmt: skip


def _new_figure(chart: Chart) -> "Figure":
    """Return an empty chart."""
    from bokeh import models, plotting

    words = list(chart.categories)
    figure = plotting.figure(
        height=chart.height, sizing_mode="stretch_width", toolbar_location="above",
        tools="box_zoom,reset,save", y_axis_type="log" if chart.log == "y" else "linear",
        x_axis_type="log" if chart.log == "x" else "auto",
        x_range=models.FactorRange(factors=words) if words else models.DataRange1d(),
        y_range=models.DataRange1d(start=0) if chart.from_zero else models.DataRange1d(),
        x_axis_label=chart.x_title, y_axis_label=chart.y_title, output_backend="canvas",
        min_border_right=16,
    )  # fmt: skip
    for span in (figure.x_range, figure.y_range):
        if isinstance(span, models.DataRange1d):
            span.only_visible = True
    if chart.ticks:
        figure.xaxis.ticker = list(chart.ticks)
    elif chart.log == "x":
        figure.xaxis.ticker = models.LogTicker(mantissas=[1, 2, 5])
    figure.xgrid.visible = bool(words)
    for axis in figure.yaxis if words else figure.axis:
        axis.formatter = models.NumeralTickFormatter(format="0,0.[000000]")
    _style(figure)
    return figure


def _style(figure: "Figure") -> None:
    figure.toolbar.autohide, figure.toolbar.logo = True, None
    figure.outline_line_color = None
    figure.background_fill_color = figure.border_fill_color = None
    for axis in figure.axis:
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "13px"
        axis.minor_tick_line_color = axis.major_tick_line_color = None
    figure.yaxis.axis_line_color = None


def _add_hover(
    figure: "Figure", renderers: "Sequence[Renderer]", rows: Sequence[tuple[str, str]]
) -> None:
    """Show a series and these rows where one of the renderers is pointed at; Bokeh escapes them."""
    from bokeh.models import HoverTool

    cells = "".join(
        f'<span style="color: var(--muted)">{escape(name)}</span><span>{value}</span>'
        for name, value in rows
    )
    grid = f'<div style="display: grid; grid-template-columns: auto auto; gap: 0 1em">{cells}</div>'
    figure.add_tools(HoverTool(renderers=list(renderers), tooltips=f"<b>$name</b>{grid}"))

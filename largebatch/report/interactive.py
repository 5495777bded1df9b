"""Pages whose charts and tables are interactive, each one file that loads nothing.

Beside table.py the only module that imports Bokeh, which draws them; its scripts are written into
the page. A page is a Jinja template that extends interactive.html. There stand the legend, whose
buttons hide a series in all charts of the page, the filters, and the choice of what lies along the
horizontal axes. All of them hide tags: a renderer of a chart, or a row of a table, is in sight
while none of its tags is hidden. Text, grids and tables have CSS variables for colours, and a
script exchanges those of charts, so that they are light or dark as the page is.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from largebatch.optional import require_bokeh
from largebatch.report import style
from largebatch.report.table import HIGHEST, ROW, TAGS, table_height

if TYPE_CHECKING:
    from bokeh import model, plotting
    from bokeh.models import renderers, sources

    Chart: TypeAlias = plotting.figure
    Model: TypeAlias = model.Model
    Renderer: TypeAlias = renderers.GlyphRenderer[Any]
    Source: TypeAlias = sources.ColumnDataSource

_ALONG = "along"
"""Tags what the choice of the horizontal axis moves, to a column of the choice's name."""

_COLOURS = tuple(style.COLOURS.values())
_DASHES = ((), (7, 4), (2, 3), (9, 3, 2, 3), (14, 4))
"""In pixels; with 7 colours, 35 series look each different."""

_CELL = 26
"""Of a row of a heat map, in pixels."""


@dataclass(frozen=True, slots=True)
class Series:
    """One button of the legend: what charts call it, and how they draw it."""

    place: int
    label: str
    colour: str
    dash: tuple[int, ...]
    title: str = ""
    """What the legend shows when it is pointed at."""

    tags: tuple[str, ...] = ()
    """By which filters hide it; the legend's button has one of its own."""


def series(place: int, label: str, *, title: str = "", tags: tuple[str, ...] = ()) -> Series:
    """Return a series in the colours of the house, the first ones solid, the next ones dashed."""
    dash = _DASHES[place // len(_COLOURS) % len(_DASHES)]
    return Series(place, label, _COLOURS[place % len(_COLOURS)], dash, title, tags)


def only_at(column: str) -> str:
    """Return the tag of what is shown only while this column lies along the horizontal axes."""
    return f"at {column}"


def new_chart(
    *,
    x: str,
    y: str,
    height: int = 340,
    log: Literal["", "x", "y"] = "",
    from_zero: bool = False,
    categories: Sequence[str] = (),
) -> "Chart":
    """Return an empty chart whose axes have these titles; as wide as its place, `height` pixels.

    Its ranges are those of what is shown; with `from_zero` the vertical one begins at 0. With
    `categories` they are what lies along x. `log` names the axis that is logarithmic. Raises
    MissingPackageError without Bokeh.
    """
    require_bokeh()
    from bokeh import models, plotting

    along = models.DataRange1d()
    chart = plotting.figure(
        height=height, sizing_mode="stretch_width", toolbar_location="above",
        tools="box_zoom,reset,save", y_axis_type="log" if log == "y" else "linear",
        x_axis_type="log" if log == "x" else "auto",
        x_range=models.FactorRange(factors=list(categories)) if categories else along,
        y_range=models.DataRange1d(start=0) if from_zero else models.DataRange1d(),
        y_axis_label=y, x_axis_label=x, output_backend="canvas", min_border_right=16,
    )  # fmt: skip
    for span in (chart.x_range, chart.y_range):
        if isinstance(span, models.DataRange1d):
            span.only_visible = True
    if log == "x":
        chart.xaxis.ticker = models.LogTicker(mantissas=[1, 2, 5])
    chart.xgrid.visible = bool(categories)
    for axis in chart.axis:
        if not categories or axis is not chart.xaxis[0]:
            axis.formatter = models.NumeralTickFormatter(format="0,0.[000000]")
    _style(chart)
    return chart


def _style(chart: "Chart") -> None:
    chart.toolbar.logo = None
    chart.toolbar.autohide = True
    chart.outline_line_color = None
    chart.background_fill_color = chart.border_fill_color = None
    for axis in chart.axis:
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "13px"
        axis.minor_tick_line_color = axis.major_tick_line_color = None
    chart.yaxis.axis_line_color = None


def new_heat_map(*, x: str, columns: Sequence[str], rows: Sequence[str], low: float) -> "Chart":
    """Return an empty heat map of percentages from `low` to 100, with rows from the top down.

    A row without any renderer in sight is left out. Raises MissingPackageError without Bokeh.
    """
    require_bokeh()
    from bokeh import models, palettes, plotting
    from bokeh.models.annotations import ColorBar

    chart = plotting.figure(
        height=110 + _CELL * len(rows), sizing_mode="stretch_width", toolbar_location=None,
        tools="", x_range=models.FactorRange(factors=list(columns)), x_axis_label=x,
        y_range=models.FactorRange(factors=list(reversed(rows))), output_backend="canvas",
    )  # fmt: skip
    colours = models.LinearColorMapper(palette=palettes.Viridis256, low=low, high=100.0)
    bar = ColorBar(color_mapper=colours, width=10, background_fill_color=None)
    bar.major_label_text_color = style.MUTED  # no CSS variable reaches it
    chart.add_layout(bar, "right")
    chart.grid.visible = False
    chart.xaxis.major_label_orientation = math.pi / 4 if max(map(len, columns)) > 3 else 0
    _style(chart)
    return chart


def add_cells(
    chart: "Chart", one: Series, source: "Source", x: str, y: str, value: str
) -> "Renderer":
    """Draw a series as cells of a heat map, coloured by a column of percentages.

    The columns `x` and `y` of its data have the names of the map's columns and rows.
    """
    from bokeh.models import LinearColorMapper, glyphs
    from bokeh.transform import transform

    (colours,) = (each for each in chart.references() if isinstance(each, LinearColorMapper))
    colour = transform(value, colours)
    cells = glyphs.Rect(x=x, y=y, width=1, height=1, line_color=None, fill_color=colour)
    return chart.add_glyph(source, cells, name=one.label, tags=_tags(one, moves=False))


def new_source(columns: Mapping[str, Any]) -> "Source":
    """Return the data of a series, columns of one length; several charts may draw it."""
    from bokeh.models import ColumnDataSource

    return ColumnDataSource(dict(columns))


def add_line(
    chart: "Chart", one: Series, source: "Source", x: str, y: str, *, moves: bool = False
) -> "Renderer":
    """Draw a series as a line through these columns of its data.

    Where it `moves`, the choice of the horizontal axis puts other columns along x.
    """
    from bokeh.models import glyphs

    line = glyphs.Line(
        x=x, y=y, line_color=one.colour, line_width=2, line_dash=list(one.dash), line_join="round"
    )
    return chart.add_glyph(source, line, name=one.label, tags=_tags(one, moves=moves))


def add_points(
    chart: "Chart", one: Series, source: "Source", x: str, y: str, *, moves: bool = False
) -> "Renderer":
    """Draw a series as points, like add_line.

    If its data have such columns, `fill` has how opaque each point is, `marker` its form and `size`
    its pixels.
    """
    from bokeh.core.properties import value
    from bokeh.models import glyphs

    own = {name for name in ("fill", "marker", "size") if name in source.data}
    marks = glyphs.Scatter(
        x=x, y=y, line_color=one.colour, fill_color=one.colour,
        size="size" if "size" in own else 8 if own else 6,
        marker="marker" if "marker" in own else value("circle"),
        fill_alpha="fill" if "fill" in own else 1.0,
    )  # fmt: skip
    return chart.add_glyph(source, marks, name=one.label, tags=_tags(one, moves=moves))


def _tags(one: Series, *, moves: bool) -> list[str]:
    return [f"series {one.place}", *one.tags, *([_ALONG] if moves else [])]


def add_hover(
    chart: "Chart", renderers: "Sequence[Renderer]", rows: Sequence[tuple[str, str]]
) -> None:
    """Show a series and these rows where one of the renderers is pointed at.

    A row is its name and what it shows in Bokeh's words: `@top1{0.00} %`, a column and a format.
    Bokeh escapes what it puts in.
    """
    from bokeh.models import HoverTool

    cells = "".join(
        f'<span style="color: var(--muted)">{escape(name)}</span><span>{value}</span>'
        for name, value in rows
    )
    grid = f'<div style="display: grid; grid-template-columns: auto auto; gap: 0 1em">{cells}</div>'
    chart.add_tools(HoverTool(renderers=list(renderers), tooltips=f"<b>$name</b>{grid}"))


def make_interactive_page(
    template: Path,
    models: "Mapping[str, Model]",
    *,
    hidden: Collection[str] = (),
    **content: object,
) -> str:
    """Return the HTML of a page: this template, which extends interactive.html.

    In it `parts` has each of the models by its name, and `content` is what else it shows. All
    text is escaped. `hidden` are the tags that its controls hide as it opens. Raises
    MissingPackageError without Bokeh.
    """
    require_bokeh()
    from bokeh.embed import components
    from bokeh.resources import Resources

    library = Resources(
        mode="inline", components=["bokeh", "bokeh-widgets", "bokeh-tables"], log_level="error"
    )
    for model in models.values():
        _hide(model, frozenset(hidden))
    script, parts = components(dict(models))
    templates = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]), autoescape=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    templates.filters["css_variable"] = style.css_variable
    return templates.get_template(template.name).render(
        light=style.LIGHT,
        dark=style.DARK,
        light_to_dark=[(light, style.DARK[name]) for name, light in style.LIGHT.items()],
        hidden=hidden,
        cell=_CELL,
        table_heights=[table_height(rows) for rows in range(HIGHEST // ROW + 1)],
        library=Markup(library.render()),  # noqa: S704 -- Bokeh's own scripts
        script=Markup(script),  # noqa: S704 -- Bokeh escapes the texts in it
        parts={name: Markup(part) for name, part in parts.items()},  # noqa: S704 -- the same
        **content,
    )


def _hide(model: Any, hidden: frozenset[str]) -> None:  # noqa: ANN401 -- a chart or a table
    """Hide what has one of these tags, as the script of the page does it later."""
    from bokeh import plotting

    if isinstance(model, plotting.figure):
        for renderer in model.renderers:
            renderer.visible = hidden.isdisjoint(renderer.tags)
    elif TAGS in model.source.data:
        tags = enumerate(model.source.data[TAGS])
        shown = [row for row, own in tags if hidden.isdisjoint(own)]
        model.view.filter.indices, model.height = shown, table_height(len(shown))

"""What the charts are drawn on: figures in the report's style, as PNG and as SVG.

The only module that imports matplotlib. pyplot, which keeps figures in global state, is not used.
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from largebatch.errors import LargebatchError
from largebatch.optional import require_matplotlib
from largebatch.storage import whole_file, writing

if TYPE_CHECKING:
    from matplotlib import axes, figure, text

    Axes: TypeAlias = axes.Axes
    Canvas: TypeAlias = figure.Figure | figure.SubFigure
    Figure: TypeAlias = figure.Figure
    Text: TypeAlias = text.Text

MARGIN = 14  # in points, around and between what is drawn into a PNG file

INK, MUTED, RULE, PAPER = "#1c2430", "#667180", "#e4e7eb", "#ffffff"
COLOURS = {
    "train": "#0068a8",
    "clean": "#b85c00",
    "ema": "#7a6a00",
    "swa": "#6250c4",
    "affine": "#a8477f",
    "statistics": "#008060",
}
"""Blue, orange, olive, violet, purple and bluish green; the markers tell apart what colours
may not."""

MORE_COLOURS = ("#7b3f00", "#c2185b", "#3b4754", "#4b7a00", "#1f2f86", "#00757f")
"""Brown, crimson, slate, leaf green, navy and teal, for pages with more series than stages."""

MARKERS = dict(zip(COLOURS, "os^>vD", strict=True))
MORE_MARKERS = "PX*hp8"


class Look(NamedTuple):
    """How a stage is drawn."""

    colour: str
    marker: str


def looks_of(stages: Iterable[str]) -> dict[str, Look]:
    """Return the look of each stage of a run; those of other packages get the next free one."""
    looks = {}
    # In the order of the run: two of its stages differ, whatever they are called.
    others = zip(cycle(MORE_COLOURS), cycle(MORE_MARKERS), strict=False)
    for stage in stages:
        is_ours = stage in COLOURS
        looks[stage] = Look(COLOURS[stage], MARKERS[stage]) if is_ours else Look(*next(others))
    return looks


PALETTE = {
    "ink": INK,
    "muted": MUTED,
    "rule": RULE,
    "paper": PAPER,
    "tint": "#f6f7f9",
    **COLOURS,
    "bad": "#b42318",
}
"""The CSS variables of every page: `rule`, `paper` and `tint` are of lines and backgrounds, the
others of text and marks, with a contrast of 4.5 or more (WCAG 2.2, 1.4.3)."""

_FONTS = ("Inter", "Helvetica Neue", "Segoe UI", "Arial", "Liberation Sans", "DejaVu Sans")
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": MUTED,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.titlesize": 11.5,
    "font.size": 11.5,
    "grid.color": RULE,
    "lines.linewidth": 1.8,
    "lines.markeredgecolor": PAPER,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "xtick.labelsize": 11,
    "ytick.color": MUTED,
    "ytick.labelsize": 11,
    "ytick.major.size": 0,
}


_UNDATED = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # metadata of an SVG file


def save_png(
    path: Path, draw: Callable[["Figure"], None], *, size: tuple[float, float], pixels: int
) -> None:
    """Write a drawing of `size` points, `pixels` wide."""
    with _style(), whole_file(path) as file:
        figure = _figure(size, margin=MARGIN)
        figure.set_facecolor(PAPER)
        draw(figure)
        figure.savefig(file, format="png", dpi=72 * pixels / size[0])


def save_figure(
    path: Path,
    draw: Callable[["Figure"], None],
    *,
    size: tuple[float, float],
    legend: Sequence[tuple[str, str, tuple[float, ...]]] = (),
) -> None:
    """Write a drawing of `size` points as its suffix says, .pdf or .svg, the same bytes each time.

    `legend` has the label, colour and dashes of lines, which are named beside the drawing.
    """
    undated = {".pdf": {"CreationDate": None, "Producer": None, "Creator": None}, ".svg": _UNDATED}
    own = {"svg.hashsalt": path.stem, "svg.fonttype": "path", "pdf.fonttype": 42}
    with _style(own), whole_file(path) as file:
        from matplotlib.lines import Line2D

        figure = _figure(size, margin=MARGIN / 2)
        figure.set_facecolor(PAPER)
        draw(figure)
        handles = [
            Line2D([], [], color=colour, ls=(0, dashes) if dashes else "-", label=label)
            for label, colour, dashes in legend
        ]
        if handles:
            figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
        figure.savefig(file, format=path.suffix[1:], metadata=undated[path.suffix])


def write_chart(path: Path, draw: Callable[["Figure"], None], *, size: tuple[float, float]) -> None:
    """Write a drawing of `size` points to a file that the user names.

    Raises LargebatchError where that is no PNG file or cannot be written, MissingPackageError
    without matplotlib.
    """
    require_png(path)
    with writing(path, error=LargebatchError):
        save_png(path, draw, size=size, pixels=1920)


def require_png(path: Path) -> None:
    """Raise LargebatchError unless the path of a chart is of a PNG file."""
    if path.suffix.lower() != ".png":
        raise LargebatchError(f"{path}: the chart is a PNG file: give a name that ends in .png")


def write_title(figure: "Canvas", title: str) -> None:
    """Write the title of a chart above it, at the left margin."""
    left = MARGIN * figure.dpi / 72 / figure.bbox.width
    figure.suptitle(title, x=left, ha="left", size=14, weight="bold")


def name_axes(axes: "Axes", *, y: str, x: str | None = None) -> "Text":
    """Name the axes where they end, without turning the page."""
    if x is not None:
        axes.set_xlabel(f"{x} →", loc="right")
    return axes.set_title(f"↑ {y}")


def name_line(axes: "Axes", name: str, colour: str, *, after: "Text") -> "Text":
    """Write the name of a line in its colour, behind another text in the title's line.

    The gap grows with that text: a browser may have another font, in which it is wider.
    """
    return axes.annotate(
        name, (1.3, 1), (3, 8), xycoords=(after, "axes fraction"), textcoords="offset points",
        color=colour, weight="bold",
    )  # fmt: skip


def make_svg(
    draw: Callable[["Figure"], None], *, size: tuple[float, float], name: str, label: str
) -> str:
    """Return a drawing as an SVG element.

    `name` is its class, and keeps its ids apart from those of other drawings in the page; `label`
    is what is read out in its place. A gid `series-N` becomes the attribute `data-series` N.
    """
    buffer = io.StringIO()
    with _style({"svg.hashsalt": name}):
        figure = _figure(size, margin=1)
        figure.set_facecolor("none")
        draw(figure)
        figure.savefig(buffer, format="svg", metadata=_UNDATED)
    svg = buffer.getvalue()
    named = f'<svg role="img" aria-label="{escape(label)}" class="{name}"'
    svg = svg[svg.index("<svg") :].replace("<svg", named, 1)
    svg = re.sub(r' id="series-(\d+)"', r' data-series="\1"', svg)
    return re.sub(r' xmlns(:xlink)?="[^"]*"| id="[\w.]+_\d+"', "", svg)


@contextmanager
def _style(more: dict[str, Any] | None = None) -> Iterator[None]:
    """Draw in the report's style, whatever the user's own is, and put that back afterwards."""
    require_matplotlib()
    from matplotlib import font_manager, style

    installed = set(font_manager.get_font_names())
    family = [font for font in _FONTS if font in installed]
    with style.context(["default", _STYLE | {"font.family": family} | (more or {})]):
        yield


def _figure(size: tuple[float, float], *, margin: float) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=margin / 72, h_pad=margin / 2 / 72)
    return Figure((size[0] / 72, size[1] / 72), layout=layout)

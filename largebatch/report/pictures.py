"""The pictures of a report: as PNG files, as SVG for the page, and all together as the overview."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.report.canvas import MARGIN, MUTED, make_svg, save_png
from largebatch.report.drift import draw_drift
from largebatch.report.figures import draw_accuracy, draw_loss, draw_throughput
from largebatch.report.headline import headlines, subtitle
from largebatch.report.records import Run

if TYPE_CHECKING:
    from largebatch.report.canvas import Canvas, Figure

WIDE, NARROW = 960, 340
"""Widths in points for a desktop and a phone."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: what it shows, how, and how high it is."""

    title: str
    draw: Callable[["Canvas", Run], None]
    wide: float
    narrow: float
    """Heights in points at the two widths; the drift's follows from the number of layers."""

    content: Callable[[Run], object]
    """What is drawn; nothing where that is empty."""

    missing: str
    """What to say instead."""

    def size(self, run: Run, width: float) -> tuple[float, float]:
        """Return width and height in points."""
        if self.draw is draw_drift:
            rows = len(run.drift.layers) if run.drift else 0
            return width, 120 + 14 * max(8, rows)
        return width, self.wide if width == WIDE else self.narrow


def write_pictures(run: Run, folder: Path) -> None:
    """Write every picture, and the overview report.png, as PNG files."""
    for name, picture in PICTURES.items():

        def draw(figure: "Canvas", picture: Picture = picture) -> None:
            _draw_titled(figure, picture, run)

        width, height = picture.size(run, WIDE)
        save_png(folder / f"{name}.png", draw, size=(width, height + 40), pixels=2 * WIDE)
    save_png(
        folder / "report.png",
        lambda figure: _draw_overview(figure, run),
        size=(1120, 700),
        pixels=1600,
    )


def picture_svg(name: str, run: Run, width: int) -> str:
    """Return a picture as an SVG element of the page."""
    picture = PICTURES[name]
    return make_svg(
        lambda figure: picture.draw(figure, run),
        size=picture.size(run, width),
        name=f"{name} {'wide' if width == WIDE else 'narrow'}",
    )


def _draw_titled(figure: "Canvas", picture: Picture, run: Run) -> None:
    left = MARGIN * figure.dpi / 72 / figure.bbox.width
    figure.suptitle(picture.title, x=left, ha="left", size=14, weight="bold")
    if picture.content(run):
        picture.draw(figure, run)
    else:
        axes = figure.add_subplot()  # the layout needs one in every part of a figure
        axes.set_axis_off()
        axes.text(0.5, 0.5, picture.missing, ha="center", va="center", color=MUTED)


def _draw_overview(figure: "Figure", run: Run) -> None:
    grid = figure.add_gridspec(2, 1, height_ratios=[1, 4.2])
    head, body = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    left = MARGIN / 1120
    head.text(left, 0.82, run.name, size=21, weight="bold", va="top")
    head.text(1 - left, 0.79, subtitle(run), color=MUTED, ha="right", va="top")
    for place, number in enumerate(headlines(run)):
        x = left + place * (1 - left) / 6
        head.text(x, 0.28, f"{number.value} {number.unit}", size=15, weight="bold")
        head.text(x, 0.2, number.label, color=MUTED, va="top")
    quarters = body.add_gridspec(2, 2)
    for place, picture in enumerate(PICTURES.values()):
        _draw_titled(body.add_subfigure(quarters[place]), picture, run)


PICTURES = {
    "loss": Picture(
        "Loss and learning rate",
        draw_loss,
        wide=440,
        narrow=380,
        content=lambda run: run.steps,
        missing="No updates were recorded.",
    ),
    "accuracy": Picture(
        "Accuracy",
        draw_accuracy,
        wide=340,
        narrow=500,
        content=lambda run: run.evaluations,
        missing="Accuracy was not measured.",
    ),
    "throughput": Picture(
        "Training speed",
        draw_throughput,
        wide=240,
        narrow=220,
        content=lambda run: run.steps,
        missing="No updates were recorded.",
    ),
    "drift": Picture(
        "What polishing changed in BatchNorm",
        draw_drift,
        wide=0,
        narrow=0,
        content=lambda run: run.drift and run.drift.quantiles,
        missing="No change of BatchNorm statistics was recorded.",
    ),
}

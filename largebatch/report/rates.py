"""The learning rate of a recipe, drawn before anything runs."""

from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.errors import LargebatchError
from largebatch.report.canvas import COLOURS, MARGIN, MUTED, save_png
from largebatch.report.figures import name_axes, name_line
from largebatch.schedules.build import Course

if TYPE_CHECKING:
    from largebatch.report.canvas import Axes, Figure


def write_rates(path: Path, course: Course, *, name: str) -> None:
    """Draw the rate of every step, by epoch, into a PNG file.

    Raises LargebatchError where the file cannot be written, MissingPackageError without matplotlib.
    """
    if path.suffix.lower() != ".png":
        raise LargebatchError(f"{path}: the picture is a PNG file: give a name that ends in .png")

    def draw(figure: "Figure") -> None:
        draw_rates(figure, course, name=name)

    try:
        save_png(path, draw, size=(960, 320), pixels=1920)
    except OSError as error:
        raise LargebatchError(f"{path}: cannot write the picture: {error.strerror}") from None


def draw_rates(figure: "Figure", course: Course, *, name: str) -> None:
    """Draw the warm-up, the training and the clean part, each in its colour."""
    left = MARGIN * figure.dpi / 72 / figure.bbox.width
    figure.suptitle(name, x=left, ha="left", size=14, weight="bold")
    axes = figure.subplots()
    end = len(course.rates)
    parts = {
        "warm-up": (0, course.begin, MUTED),
        "train": (course.begin, course.clean, COLOURS["train"]),
        "clean": (max(course.begin, course.clean), end, COLOURS["clean"]),
    }
    title = name_axes(axes, y="Learning rate", x="Epoch")
    for part, (first, last, colour) in parts.items():
        if first < last:
            _draw_part(axes, course, first, last, colour)
            title = name_line(axes, part, colour, after=title)
    axes.axvspan(
        course.clean / course.steps_per_epoch, end / course.steps_per_epoch,
        color=COLOURS["clean"], alpha=0.08, lw=0,
    )  # fmt: skip
    axes.set_xlim(0, end / course.steps_per_epoch)
    axes.set_ylim(0, 1.1 * course.rates[course.peak])
    axes.locator_params(axis="y", nbins=5)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_formatter("{x:g}")
    _name_rates(axes, course)


def _draw_part(axes: "Axes", course: Course, first: int, last: int, colour: str) -> None:
    """Draw the steps from `first` up to `last`, each rate as long as its step lasts."""
    rates = [*course.rates[first : last + 1], course.rates[-1]][: last - first + 1]
    epochs = [step / course.steps_per_epoch for step in range(first, last + 1)]
    axes.plot(epochs, rates, color=colour, drawstyle="steps-post", clip_on=False)


def _name_rates(axes: "Axes", course: Course) -> None:
    """Write every rate on its stretch where these are few, else the peak and the last rate."""
    for step in course.stretches or (course.peak,):
        place = step / course.steps_per_epoch, course.rates[step]
        _write(axes, f"{course.rates[step]:.3g}", place, offset=(4, 5))
    if not course.stretches:
        place = len(course.rates) / course.steps_per_epoch, course.rates[-1]
        _write(axes, f"{course.rates[-1]:.3g}", place, offset=(6, 0))


def _write(
    axes: "Axes", text: str, place: tuple[float, float], *, offset: tuple[float, float]
) -> None:
    axes.annotate(
        text, place, offset, textcoords="offset points", va="bottom" if offset[1] else "center",
        annotation_clip=False,
    )  # fmt: skip

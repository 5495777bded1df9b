"""Draw epochs to the target next to those of MLPerf's reference implementation.

Left: every run of the reference against its batch, and the line through the points that bound
submissions. Right: the reference's distribution at our batch. Numbers come from
`mlperf.referee`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from largebatch.report.style import COLOURS, INK, MUTED, name_axes, name_line, write_chart

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Figure

_OURS = COLOURS["train"]
_BOUND: dict[str, Any] = {"color": INK, "lw": 1.2, "ls": (0, (4, 3))}


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference at one batch, measured or interpolated, and our runs."""

    batch: int
    """Global batch: ours, or the smallest reference point if ours is smaller than all."""

    mean: float
    std: float
    least: float
    """Least mean of epochs that is accepted."""

    ours: float
    """Our mean epochs, without the fastest and the slowest run."""

    interval: tuple[float, float] | None
    """95 % bootstrap interval of our mean; None if a run did not reach the target."""


@dataclass(frozen=True, slots=True)
class Point:
    """Epochs to the target of the reference's runs at one batch."""

    batch: int
    epochs: tuple[float, ...]
    mean: float
    least: float
    counts: bool
    """True if it bounds submissions; other points converge slower than their neighbours suggest."""


def write_convergence(
    path: Path,
    points: Sequence[Point],
    reference: Reference,
    *,
    batch: int,
    epochs: Sequence[float],
) -> None:
    """Draw runs at `batch` and their epochs next to the reference, into a PNG file.

    Raises as write_chart.
    """

    def draw(figure: "Figure") -> None:
        left, right = figure.subplots(1, 2, width_ratios=[3, 2])
        _draw_points(left, points, batch=batch, epochs=epochs)
        _draw_distribution(right, reference, epochs=epochs)

    write_chart(path, draw, size=(960, 360))


def _draw_points(
    axes: "Axes", points: Sequence[Point], *, batch: int, epochs: Sequence[float]
) -> None:
    for point in points:
        axes.plot(
            [point.batch] * len(point.epochs), point.epochs,
            color=MUTED, marker="o", ms=4, lw=0, alpha=0.35,
        )  # fmt: skip
    bounds = [point for point in points if point.counts]
    axes.plot([point.batch for point in bounds], [point.mean for point in bounds], color=MUTED)
    axes.plot([point.batch for point in bounds], [point.least for point in bounds], **_BOUND)
    axes.plot([batch] * len(epochs), epochs, color=_OURS, marker="o", ms=7, lw=0, zorder=3)
    axes.xaxis.set_major_formatter("{x:,g}")
    title = name_axes(axes, y="Epochs to the target", x="Global batch")
    title = name_line(axes, "reference", MUTED, after=title)
    title = name_line(axes, "fewest accepted", INK, after=title)
    name_line(axes, "ours", _OURS, after=title)


def _draw_distribution(axes: "Axes", reference: Reference, *, epochs: Sequence[float]) -> None:
    import numpy as np

    spread = max(reference.std, 0.01)
    low = min([reference.mean - 4 * spread, *epochs])
    high = max([reference.mean + 4 * spread, *epochs])
    grid = np.linspace(low, high, 400)
    density = np.exp(-0.5 * ((grid - reference.mean) / spread) ** 2)
    axes.fill_between(grid, density, color=MUTED, alpha=0.25, lw=0)
    axes.axvline(reference.mean, ymax=0.95, color=MUTED)
    axes.axvline(reference.least, ymax=0.95, **_BOUND)
    heights = [0.1 + 0.08 * sorted(epochs)[:place].count(epoch)
               for place, epoch in enumerate(sorted(epochs))]  # fmt: skip
    axes.plot(sorted(epochs), heights, color=_OURS, marker="o", ms=7, lw=0)
    if reference.interval is not None:
        axes.plot(reference.interval, [0.62, 0.62], color=_OURS, lw=2.5)
    axes.plot([reference.ours], [0.62], color=_OURS, marker="D", ms=8)
    axes.set_ylim(0, 1.08)
    axes.set_yticks([])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(f"At batch {reference.batch:,}: runs, and their mean with 95 % (bootstrap)")
    axes.set_xlabel("Epochs →", loc="right")

"""A chart of predictions for a cluster: time to 75.9 % by number of GPUs, and by batch."""

from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.errors import LargebatchError
from largebatch.formatting import plural
from largebatch.lab.planner.cluster import Cluster
from largebatch.lab.planner.prediction import (
    Point,
    Prediction,
    batches,
    best_batches,
    has_epoch_law,
)
from largebatch.recipe.recipe import Recipe
from largebatch.report.style import (
    COLOURS,
    INK,
    MUTED,
    name_axes,
    require_png,
    write_chart,
    write_title,
)

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Figure


NEIGHBOURS = (0.25, 1, 4)
"""Numbers of GPUs whose times are drawn by batch, relative to the run's."""


def write_forecast(path: Path, recipe: Recipe, cluster: Cluster, found: Prediction) -> None:
    """Draw the best time for each number of GPUs, and the time with each batch, into a PNG file.

    Raises LargebatchError where the epoch law does not hold, for a measured cluster or other
    images, and as write_chart.
    """
    require_png(path)
    if not has_epoch_law(recipe, cluster):
        other = f"{recipe.name} has {recipe.data.classes:,} classes"
        if cluster.gpu is None:
            other = f"{cluster.name} was measured with another model"
        raise LargebatchError(
            f"--out {path}: the chart needs the epoch law, which is ResNet-50's on ImageNet, and "
            f"{other}; leave --out out"
        )
    write_chart(path, lambda figure: draw_forecast(figure, recipe, cluster, found), size=(960, 400))


def draw_forecast(figure: "Figure", recipe: Recipe, cluster: Cluster, found: Prediction) -> None:
    """Draw the two charts side by side, with the predicted run in both."""
    write_title(figure, f"{cluster.name}: ResNet-50 on ImageNet to 75.9 % top-1")
    by_workers, by_batch = figure.subplots(1, 2)
    for axes in (by_workers, by_batch):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.minorticks_off()
    _draw_workers(by_workers, best_batches(recipe, cluster), found)
    _draw_batches(by_batch, recipe, cluster, found)


def _draw_workers(axes: "Axes", best: list[Point], found: Prediction) -> None:
    workers, seconds = [p.workers for p in best], [p.seconds for p in best]
    low, high = found.low / found.seconds, found.high / found.seconds
    colour = COLOURS["train"]
    axes.fill_between(
        workers, [low * one for one in seconds], [high * one for one in seconds],
        color=colour, alpha=0.15, lw=0,
    )  # fmt: skip
    axes.plot(workers, seconds, color=colour, marker="o", ms=5)
    ideal = [seconds[0] * workers[0] / each for each in workers]
    axes.plot(workers, ideal, color=MUTED, lw=0.8, ls=(0, (4, 3)))
    name_times(axes, [*seconds, found.low, ideal[-1]])
    for point in best[::2]:
        axes.annotate(
            f"{point.global_batch:,}", (point.workers, point.seconds), (5, 5),
            textcoords="offset points", color=colour, size=9.5,
        )  # fmt: skip
    _draw_run(axes, found.workers, found, below=True)
    name_axes(axes, y="Time with the best batch; dashed: without losses", x="GPUs")


def _draw_batches(axes: "Axes", recipe: Recipe, cluster: Cluster, found: Prediction) -> None:
    numbers = {max(1, min(cluster.workers, round(found.workers * one))) for one in NEIGHBOURS}
    times = [found.low, found.high]
    for workers in sorted(numbers):
        points = batches(recipe, cluster, workers=workers)
        own = workers == found.workers
        colour = COLOURS["train"] if own else MUTED
        place, time = [p.global_batch for p in points], [p.seconds for p in points]
        times += time
        axes.plot(place, time, color=colour, lw=1.8 if own else 1)
        lowest = min(points, key=lambda point: point.seconds)
        axes.plot(lowest.global_batch, lowest.seconds, color=colour, marker="o", ms=6)
        axes.annotate(
            plural(workers, "GPU"), (place[0], time[0]), (0, 5),
            textcoords="offset points", color=colour, size=10,
        )  # fmt: skip
    _draw_run(axes, found.global_batch, found, below=False)
    name_times(axes, times)
    name_axes(axes, y="Time by batch; the points are the best", x="Batch")


def _draw_run(axes: "Axes", place: float, found: Prediction, *, below: bool) -> None:
    around = [[found.seconds - found.low], [found.high - found.seconds]]
    axes.errorbar(
        place, found.seconds, yerr=around, color=INK, marker="D", ms=6, lw=1.2, zorder=3,
        markeredgecolor="none",
    )  # fmt: skip
    axes.annotate(
        "this recipe", (place, found.seconds), (-8, -8) if below else (0, 14), ha="right",
        textcoords="offset points", va="top" if below else "bottom", color=INK, weight="bold",
    )  # fmt: skip


def name_times(axes: "Axes", seconds: list[float]) -> None:
    """Label the axis with round times between the shortest and the longest."""
    usual = {
        "1 s": 1, "2 s": 2, "5 s": 5, "10 s": 10, "20 s": 20, "30 s": 30, "1 min": 60,
        "2 min": 120, "5 min": 300, "10 min": 600, "30 min": 1800, "1 h": 3600, "3 h": 10_800,
        "10 h": 36_000, "1 day": 86_400, "3 days": 259_200, "10 days": 864_000,
    }  # fmt: skip
    low, high = min(seconds) / 1.2, max(seconds) * 1.6
    shown = {name: value for name, value in usual.items() if low <= value <= high}
    axes.set_yticks(list(shown.values()), list(shown))
    axes.set_ylim(low, high)

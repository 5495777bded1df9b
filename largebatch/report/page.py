"""The page: one HTML file with everything in it, which loads nothing from anywhere.

Words and layout stand in page.html, which escapes whatever a run folder holds. The charts are also
written as PNG files, and all together as the overview, report.png.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from largebatch.formatting import MISSING, duration, percent, points
from largebatch.report.drift import draw_drift
from largebatch.report.figures import draw_accuracy, draw_loss, draw_metric, draw_throughput
from largebatch.report.mistakes import (
    compare,
    draw_confusion,
    matrix_is_drawn,
    pairs,
    weakest,
    worst,
)
from largebatch.report.monitors import draw_norm, draw_ratios, draw_system, layers
from largebatch.report.noise import describe_noise, draw_noise, has_course
from largebatch.report.numbers import (
    describe_confidence,
    describe_gap,
    describe_waits,
    headlines,
    profile_shares,
    short_commit,
    subtitle,
)
from largebatch.report.run import Run
from largebatch.report.style import DARK, LIGHT, MARGIN, MUTED, make_svg, save_png, write_title
from largebatch.report.verdict import verdict
from largebatch.report.waits import draw_waits
from largebatch.tracking.events import OVERVIEW

if TYPE_CHECKING:
    from largebatch.report.style import Canvas, Figure

_EXPLAINED = {
    "clean": "the last updates of the schedule see training images without random crops and "
    "flips, as validation does.",
    "ema": "the EMA of the weights takes their place.",
    "swa": "the mean of the weights at a regular interval over the last part of the schedule takes "
    "their place.",
    "swap": "several copies are trained on, each alone on small batches in an order of its own; "
    "their mean takes their place.",
    "affine": "further updates on such clean images move BatchNorm's scales and shifts and the "
    "classifier alone.",
    "statistics": "no weight moves: the means and variances that BatchNorm normalises by are "
    "measured again, exactly, over clean training images.",
}
"""What a polishing stage is, after its name."""

WIDE, NARROW = 960, 340
"""Widths in points for a desktop and a phone."""


def make_page(run: Run) -> str:
    """Return the HTML of a run's report."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    templates.filters |= {"duration": duration, "percent": percent, "points": points}
    return templates.get_template("page.html").render(
        light=LIGHT,
        dark=DARK,
        run=run,
        subtitle=subtitle(run),
        verdict=verdict(run),
        headlines=headlines(run),
        explained=_EXPLAINED,
        unknown=MISSING,
        charts=charts_of(run),
        widths=(WIDE, NARROW),
        extra=_extra(run),
        environment=_environment(run),
        confidence=describe_confidence(run),
        gap=describe_gap(run),
        waits=describe_waits(run) if run.timed else None,
        noise=describe_noise(run) if has_course(run) else None,
        profile_shares=profile_shares,
        compare=compare,
        pairs=pairs,
        weakest=weakest,
        worst=worst(run),
    )


def _extra(run: Run) -> dict[str, dict[str, str]]:
    """Return what plugged-in parts report of themselves, by part and key."""
    parts = run.summary.extra if run.summary is not None else {}
    rows = {
        part: {key: _plain(value) for key, value in facts.items() if value}
        for part, facts in parts.items()
    }
    return {part: facts for part, facts in rows.items() if facts}


def _plain(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int():
            return f"{value:,}"
        case dict():
            return ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
        case list():
            return (" · " if not isinstance(value[0], dict) else "; ").join(map(_plain, value))
        case _:
            return str(value)


def _environment(run: Run) -> dict[str, str]:
    """Return the name and the value of what the run was made on."""
    plan, summary = run.plan, run.summary
    facts = {
        "Workers": f"{plan.workers:,}",
        "Device batch": f"{plan.device_batch:,}",
        "Accumulation": ", then ".join(
            f"{accumulation:,}" for _, _, accumulation in plan.within(range(plan.steps))
        ),
    }
    if summary is not None:
        memory = summary.peak_memory_bytes
        facts |= {
            "Backend": summary.backend,
            "Peak memory": MISSING if memory is None else f"{memory / 2**30:.2f} GiB",
            "Commit": short_commit(summary.commit),
            **summary.versions,
        }
    return facts


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart."""

    title: str
    draw: Callable[["Canvas", Run], None]
    content: Callable[[Run], object]
    """What is drawn; there is no chart if it is empty."""

    heights: tuple[float, float] | Callable[[Run], float]
    """Heights in points for a desktop and a phone, or one that follows from the run."""

    def size(self, run: Run, width: float) -> tuple[float, float]:
        """Return width and height in points."""
        if callable(self.heights):
            return width, self.heights(run)
        return width, self.heights[width != WIDE]

    def svg(self, run: Run, name: str, width: int) -> Markup:
        """Return the chart as an SVG element of the page; `name` is its class."""
        shape = "wide" if width == WIDE else "narrow"
        svg = make_svg(
            lambda figure: self.draw(figure, run),
            size=self.size(run, width),
            name=f"{name} {shape}",
            label=self.title,
        )
        return Markup(svg)  # noqa: S704 -- matplotlib escapes the text in it


def _rows(number: int, *, each: float = 14) -> float:
    """Return the height in points of a chart with a row for each layer or class."""
    return 120 + each * max(8, number)


def write_charts(run: Run, folder: Path) -> None:
    """Write every chart, and the overview report.png, as PNG files."""
    for name, chart in charts_of(run).items():
        if not chart.content(run):
            (folder / f"{name}.png").unlink(missing_ok=True)  # of an earlier part of the run
            continue

        def draw(figure: "Canvas", chart: Chart = chart) -> None:
            _draw_titled(figure, chart, run)

        width, height = chart.size(run, WIDE)
        save_png(folder / f"{name}.png", draw, size=(width, height + 40), pixels=2 * WIDE)
    save_png(
        folder / OVERVIEW,
        lambda figure: _draw_overview(figure, run),
        size=(1120, 700),
        pixels=1600,
    )


def _draw_titled(figure: "Canvas", chart: Chart, run: Run) -> None:
    write_title(figure, chart.title)
    chart.draw(figure, run)


_OVERVIEW = (
    *("accuracy", "throughput", "drift", "ratios", "waits", "noise", "norm", "system"),
    "confusion",
)
"""Order of the charts after the loss and the metric of the task; the overview has four."""


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
    there = {name: chart for name, chart in charts_of(run).items() if chart.content(run)}
    order = ["loss", run.task.metric.key, *_OVERVIEW]
    charts = [there[name] for name in sorted(there, key=order.index)[:4]]
    if not charts:
        body.add_subplot().set_axis_off()  # the layout needs one
        return
    quarters = body.add_gridspec(-(-len(charts) // 2), min(2, len(charts)))
    for place, chart in enumerate(charts):
        _draw_titled(body.add_subfigure(quarters[place]), chart, run)


def charts_of(run: Run) -> dict[str, Chart]:
    """Return the charts by name, with that of the metric where accuracy does not judge the run."""
    metric = run.task.metric
    if run.task.by_accuracy:
        return CHARTS
    own = Chart(metric.title, draw_metric, lambda run: run.evaluations, (340, 340))
    return {"loss": CHARTS["loss"], metric.key: own} | CHARTS


CHARTS = {
    "loss": Chart("Loss and learning rate", draw_loss, lambda run: run.steps, (440, 380)),
    "accuracy": Chart(
        "Accuracy",
        draw_accuracy,
        lambda run: run.task.by_accuracy and run.evaluations,
        (340, 500),
    ),
    "throughput": Chart("Training speed", draw_throughput, lambda run: run.steps, (240, 220)),
    "waits": Chart("What updates waited for", draw_waits, lambda run: run.timed, (200, 200)),
    "noise": Chart("Gradient noise scale", draw_noise, has_course, (260, 260)),
    "ratios": Chart(
        "Trust ratios of LARS by layer", draw_ratios, layers, lambda run: _rows(len(layers(run)))
    ),
    "norm": Chart(
        "Gradient norm",
        draw_norm,
        lambda run: any(math.isfinite(step.gradient_norm) for step in run.steps),
        (240, 220),
    ),
    "system": Chart("What the workers used", draw_system, lambda run: run.system, (240, 420)),
    "drift": Chart(
        "What polishing changed in BatchNorm",
        draw_drift,
        lambda run: run.drift and run.drift.quantiles,
        lambda run: _rows(len(run.drift.layers) if run.drift else 0),
    ),
    "confusion": Chart(
        "Classes and what they are taken for",
        draw_confusion,
        matrix_is_drawn,
        lambda run: _rows(len(run.final_mistakes.classes) if run.final_mistakes else 0, each=18),
    ),
}

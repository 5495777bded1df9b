"""The page: one HTML file with everything in it, which loads nothing from anywhere.

Its pictures are also written as PNG files, and all together as the overview, report.png.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from largebatch.report.drift import draw_drift
from largebatch.report.figures import draw_accuracy, draw_loss, draw_throughput
from largebatch.report.numbers import (
    UNKNOWN,
    duration,
    headlines,
    percent,
    points,
    subtitle,
    verdict,
)
from largebatch.report.run import Run, Stage
from largebatch.report.style import MARGIN, MUTED, make_svg, save_png
from largebatch.tracking.events import OVERVIEW

if TYPE_CHECKING:
    from largebatch.report.style import Canvas, Figure

_TEMPLATE = Path(__file__).with_name("page.html")

_EXPLAINED = {
    "train": "",
    "clean": "the last updates of the schedule see training pictures without random crops and "
    "flips, as validation does.",
    "ema": "the moving average of the weights takes their place.",
    "affine": "further updates on such clean pictures move BatchNorm's scales and shifts and the "
    "classifier alone.",
    "statistics": "no weight moves: the means and variances that BatchNorm normalises by are "
    "measured again, exactly, over clean training pictures.",
}
"""What a stage is, after its name."""

WIDE, NARROW = 960, 340
"""Widths in points for a desktop and a phone."""


def make_page(run: Run) -> str:
    """Return the HTML of a run's report."""
    ended = verdict(run)
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        name=escape(run.name),
        subtitle=escape(subtitle(run)),
        verdict=f'<p class="verdict">{escape(ended)}</p>' if ended else "",
        headlines="\n".join(_headlines(run)),
        stages=_stages(run),
        pictures="\n".join(_pictures(run)),
        recipe=_recipe(run),
        environment="\n".join(_environment(run)),
        folder=escape(run.folder),
    )


def _headlines(run: Run) -> Iterator[str]:
    for number in headlines(run):
        tone = {None: "", True: ' class="good"', False: ' class="bad"'}[number.good]
        yield (
            f"<div{tone}><dt>{number.label}</dt>"
            f"<dd><b>{number.value}</b> {number.unit}<small>{number.note}</small></dd></div>"
        )


def _stages(run: Run) -> str:
    if not run.stages:
        return "<p>No stage has been evaluated.</p>"
    names = ["Stage", "Updates", "Time", "Top-1", "Change", "Top-5", "Loss"]
    if run.decisions:
        names.insert(5, "Held out")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = "\n".join(_stage_row(stage, names[1:]) for stage in run.stages)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return table + "".join(f'<p class="note">{note}</p>' for note in _notes(run))


def _stage_row(stage: Stage, names: list[str]) -> str:
    before, after, cost, judged = stage.before, stage.after, stage.result, stage.decision
    cells = {
        "Updates": f"{cost.steps:,}" if cost else UNKNOWN,
        "Time": duration(cost.seconds) if cost else UNKNOWN,
        "Top-1": _change(percent(before.top1) if before else None, percent(after.top1), " %"),
        "Change": points(before.top1, after.top1) if before else UNKNOWN,
        "Held out": _change(percent(judged.before), percent(judged.after), " %")
        if judged
        else UNKNOWN,
        "Top-5": f"{percent(after.top5)} %",
        "Loss": _change(f"{before.loss:.4f}" if before else None, f"{after.loss:.4f}"),
    }
    columns = "".join(f'<td data-name="{name}">{cells[name]}</td>' for name in names)
    name = stage.name if stage.kept else f"{stage.name} (discarded)"
    return f'<tr><th scope="row" class="{stage.name}">{name}</th>{columns}</tr>'


def _notes(run: Run) -> Iterator[str]:
    """Explain the stages that this run has, and who decided which of them stay."""
    first, *later = (stage.name for stage in run.stages)
    if later:
        begin = f"Final Polishing is what comes after <em>{first}</em>"
        if not run.steps:
            begin = f"Here <em>{first}</em> is the checkpoint as it was, and polishing what follows"
        yield " ".join(
            [f"{begin}.", *(f"In <em>{name}</em>, {_EXPLAINED[name]}" for name in later)]
        )
    if run.decisions:
        yield (
            f"Held out: top-1 on {run.decisions[0].samples:,} training pictures that no stage was "
            "trained or measured on. A stage that did not raise it was discarded: the model went "
            "back to what it was before. The other accuracies are of validation pictures, which "
            "decide nothing."
        )
    for note in run.notes:
        yield f"Of <em>{note.stage}</em>: {escape(note.text)}."


def _change(before: str | None, after: str, unit: str = "") -> str:
    return f"{after}{unit}" if before is None else f"<i>{before} →</i> {after}{unit}"


def _pictures(run: Run) -> Iterator[str]:
    captions = _captions(run)
    for name, picture in PICTURES.items():
        yield f'<section id="{name}"><h2>{picture.title}</h2>'
        if picture.content(run):
            yield f"<figure>{picture_svg(name, run, WIDE)}{picture_svg(name, run, NARROW)}"
            yield f"<figcaption>{captions[name]}</figcaption></figure>"
        else:
            yield f"<p>{picture.missing}</p>"
        yield "</section>"


def _captions(run: Run) -> dict[str, str]:
    """Say of every picture how to read it."""
    return {
        "loss": (
            "Training loss of every update (faint) and its running median, loss on the validation "
            "data (dots), and the learning rate below. The two losses need not meet: only training "
            "pictures are augmented, and only the training loss may be label-smoothed."
        ),
        "accuracy": _accuracy_caption(run),
        "throughput": (
            "Training images per second on all workers together, at every update (faint) and as "
            "running median; the dashed line is the rate of the whole run. Dips are updates that "
            "took longer, such as those that waited for data."
        ),
        "drift": _drift_caption(run),
    }


def _accuracy_caption(run: Run) -> str:
    samples = run.evaluations[-1].samples if run.evaluations else 1
    words = (
        f"The share of the {samples:,} validation pictures that are classified right"
        + (": during the run, and after each stage on a scale of its own" if run.stages[1:] else "")
        + f". One picture more or less is {100 / samples:.2g} points."
    )
    if run.decisions:
        words += " Below a stage: what it changed there, and on the training pictures held out."
    worse = [
        stage.name
        for stage in run.stages
        if stage.kept and stage.before and stage.after.top1 < stage.before.top1
    ]
    if worse:
        words += f" Here the {' and the '.join(worse)} stage lowered it."
    if not all(stage.kept for stage in run.stages):
        words += " A hollow mark is a stage that was discarded."
    return words


def _drift_caption(run: Run) -> str:
    if run.drift is None:
        return ""
    return (
        "How far the statistics of each BatchNorm layer, from the input at the top to the output, "
        "lie from the running averages of training when measured on "
        f"{run.drift.samples:,} clean pictures. A layer's channels are sorted: one in twenty fell "
        "by more than the cell at 5 % says (blue: lower), and one in twenty rose by more than the "
        "cell at 95 % (red: higher). Means are in standard deviations (σ); of variances it is the "
        "logarithm of the ratio, where 0.1 is about 10\u00a0%."
        + ("" if run.drift_kept else " The stage was discarded, and these changes with it.")
    )


def _recipe(run: Run) -> str:
    if run.recipe is None:
        return "<p>The folder holds no recipe.yaml.</p>"
    return (
        "<details><summary>recipe.yaml</summary>"
        f"<pre><code>{escape(run.recipe)}</code></pre></details>"
    )


def _environment(run: Run) -> Iterator[str]:
    plan, summary = run.plan, run.summary
    facts = {
        "Workers": f"{plan.workers:,}",
        "Device batch": f"{plan.device_batch:,}",
        "Accumulation": f"{plan.accumulation:,}",
    }
    if summary is not None:
        memory = summary.peak_memory_bytes
        facts |= {
            "Backend": summary.backend,
            "Peak memory": UNKNOWN if memory is None else f"{memory / 2**30:.2f} GiB",
            "Commit": _short(summary.commit),
            **summary.versions,
        }
    for name, value in facts.items():
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"


def _short(commit: str | None) -> str:
    """Return the first digits of a commit, and the mark of changed files."""
    return UNKNOWN if commit is None else commit[:12] + "+" * commit.endswith("+")


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
        folder / OVERVIEW,
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

"""The page: one HTML file with everything in it, which loads nothing from anywhere."""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from string import Template

from largebatch.report.headline import (
    UNKNOWN,
    duration,
    headlines,
    judgements,
    percent,
    points,
    subtitle,
    verdict,
)
from largebatch.report.pictures import NARROW, PICTURES, WIDE, picture_svg
from largebatch.report.records import Run, Stage

_TEMPLATE = Path(__file__).with_name("page.html")


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
    names = ("Stage", "Updates", "Time", "Top-1", "Change", "Top-5", "Loss")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = "\n".join(_stage_row(stage, names[1:]) for stage in run.stages)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return table + "".join(f'<p class="note">{escape(said)}</p>' for said in judgements(run))


def _stage_row(stage: Stage, names: tuple[str, ...]) -> str:
    before, after, cost = stage.before, stage.after, stage.cost
    cells = (
        f"{cost.steps:,}" if cost else UNKNOWN,
        duration(cost.seconds) if cost else UNKNOWN,
        _change(percent(before.top1) if before else None, percent(after.top1), " %"),
        points(before, after) if before else UNKNOWN,
        _change(percent(before.top5) if before else None, percent(after.top5), " %"),
        _change(f"{before.loss:.4f}" if before else None, f"{after.loss:.4f}"),
    )
    columns = "".join(
        f'<td data-name="{name}">{cell}</td>' for name, cell in zip(names, cells, strict=True)
    )
    name = stage.name if stage.kept else f"{stage.name} (discarded)"
    return f'<tr><th scope="row" class="{stage.name}">{name}</th>{columns}</tr>'


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
    samples = run.evaluations[-1].samples if run.evaluations else 1
    measured = run.drift.samples if run.drift else 0
    worse = [
        stage.name
        for stage in run.stages
        if stage.kept and stage.before and stage.after.top1 < stage.before.top1
    ]
    undone = " A hollow mark is a stage that was discarded." * any(not s.kept for s in run.stages)
    lowered = f" Here the {' and the '.join(worse)} stage lowered it." if worse else ""
    return {
        "loss": (
            "Training loss of every update (faint) and its running median, loss on the validation "
            "data (dots), and the learning rate below. The two losses need not meet: only training "
            "pictures are augmented, and only the training loss may be label-smoothed."
        ),
        "accuracy": (
            f"The share of the {samples:,} validation pictures that are classified right: during "
            "the run, and after each stage on a scale of its own. One picture more or less is "
            f"{100 / samples:.2g} points.{lowered}{undone}"
        ),
        "throughput": (
            "Training images per second on all workers together, at every update (faint) and as "
            "running median; the dashed line is the rate of the whole run. Dips are updates that "
            "took longer, such as those that waited for data."
        ),
        "drift": (
            "How far the statistics of each BatchNorm layer, from the input at the top to the "
            f"output, lie from the running averages of training when measured on {measured:,} "
            "clean pictures: the mean in standard deviations (σ), the variance as the logarithm of "
            "the ratio, where 0.1 is about 10 %."
        ),
    }


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

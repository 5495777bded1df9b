"""The report of one run: what its page says and shows, and its charts as PNG files."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from largebatch.formatting import MISSING, duration, percent, plural, points, signed
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.report import charts
from largebatch.report.diagnosis import Verdict, verdict
from largebatch.report.mistakes import by_class, compare, matrix_is_drawn, pairs, worst
from largebatch.report.noise import describe_noise, has_course
from largebatch.report.pages import (
    Chart,
    Code,
    Column,
    Facts,
    Headline,
    Image,
    Images,
    Page,
    Part,
    Section,
    Series,
    Table,
    columns_over,
)
from largebatch.report.run import (
    INPUT_BOUND,
    Run,
    Stage,
    images_per_second,
    shares,
    short_commit,
)
from largebatch.report.style import COLOURS, MARGIN, MUTED, save_png, write_title
from largebatch.tracking.events import OVERVIEW, Mistakes

if TYPE_CHECKING:
    from largebatch.report.style import Canvas, Figure

_EXPLAINED = {
    "clean": "the last updates of the schedule see training images without random crops and "
    "flips, as validation does.",
    "ema": "the EMA of the weights replaces them.",
    "swa": "the mean of the weights at a regular interval over the last part of the schedule "
    "replaces them.",
    "affine": "further updates on clean images change only BatchNorm's scales and shifts and the "
    "classifier.",
    "statistics": "weights stay as they are: the means and variances that BatchNorm normalises by "
    "are measured again, exactly, over clean training images.",
}
"""What a polishing stage is, after its name."""

_NOTES = 50  # the newest notes are shown
_WEAKEST = 10  # classes
_ROW = 14  # points of a layer's row in a chart


def make_page(run: Run) -> str:
    """Return the HTML of a run's report."""
    found = verdict(run)
    drawn = charts_of(run)
    return Page(
        title=run.name,
        subtitle=_subtitle(run),
        findings=[found.words],
        is_sound=found.good,
        headlines=list(headlines(run)),
        sections=[
            Section(title="What to change", parts=_remedies(found, drawn)),
            Section(title="Stages", parts=_stages(run)),
            *(
                Section(title=chart.title, parts=[*_before(run, name), chart])
                for name, chart in drawn.items()
                if name != "confusion"
            ),
            Section(
                title="Classes and what they are taken for",
                parts=list(_mistakes(run, run.final_mistakes, drawn.get("confusion"))),
            ),
            Section(
                title="Recipe",
                parts=[] if run.recipe is None else [Code("recipe.yaml", run.recipe)],
            ),
            *(Section(title=part.capitalize(), parts=[Facts(rows)]) for part, rows in _extra(run)),
            Section(title="Environment", parts=[Facts(_environment(run))]),
        ],
        source=f"the run folder {run.folder}",
    ).html()


def headlines(run: Run) -> Iterator[Headline]:
    """Yield the six numbers that sum up a run."""
    plan, last, rate = run.plan, run.result, images_per_second(run)
    polished = any(stage.kept for stage in run.polishing) and run.finished
    if last is None:
        yield Headline("Top-1 accuracy", MISSING, "", "never measured")
    else:
        when = "after polishing" if polished else f"after {last.step:,} steps"
        yield Headline("Top-1 accuracy", percent(last.top1), "%", when)
    yield _gain(run)
    if rate is None:
        yield Headline("Training speed", MISSING, "", "no step was timed")
    else:
        workers = plural(plan.workers, "worker") + " together" * (plan.workers > 1)
        bound = bool(run.timed) and shares(run).data >= INPUT_BOUND
        yield Headline(
            "Training speed", f"{rate:,.0f}", "images/s", f"{workers}{', input bound' * bound}"
        )
    yield Headline("Global batch", f"{plan.global_batch:,}", "images", _division(plan))
    skipped = run.summary.skipped_steps if run.summary else 0
    passes = f"{plan.epoch(run.num_steps):,.1f} epochs"
    if skipped:
        passes += f", {skipped:,} skipped: gradients not finite"
    steps = "step" if run.num_steps == 1 else "steps"
    yield Headline("Updates", f"{run.num_steps:,}", steps, passes)
    time, unit = duration(run.summary.seconds).split(" ") if run.summary else (MISSING, "")
    yield Headline("Wall time", time, unit, _stage_times(run))


def _gain(run: Run) -> Headline:
    base, last = run.end_of_schedule, run.last_stage
    if base is None or last is None or len(run.stages) < 2:
        return Headline("Gain by polishing", MISSING, "", "not polished")
    first = run.stages[0]
    if not run.polishing:
        return _gain_between(run, "Gain in the clean epochs", first, base, judged=False)
    gain = _gain_between(run, "Gain by polishing", base, last, judged=True)
    if base is first:
        return gain
    clean = points(first.after.top1, base.after.top1)
    return replace(gain, note=f"{gain.note}; clean epochs before: {clean}")


def _gain_between(run: Run, label: str, before: Stage, after: Stage, *, judged: bool) -> Headline:
    change = compare(before.after, after.after, before.mistakes, after.mistakes)
    evaluated = f"{change.samples:,} validation images"
    note = f"{abs(change.images):,} of {evaluated}"
    if not change.beyond_noise:
        note = f"within the noise of {evaluated}"
    place, end = run.stages.index(before), after.after.step
    made = sum(s.result.steps for s in run.stages[place + 1 :] if s.result and s.kept)
    passes = run.plan.epoch(end) - run.plan.epoch(max(0, end - made))
    colour: Literal["", "good", "bad", "grey"] = "grey"
    if change.beyond_noise:
        colour = "bad" if change.images < 0 else "good" if judged else ""
    return Headline(
        label,
        points(before.after.top1, after.after.top1),
        "points",
        f"{note}, in {passes:,.1f} epochs" if made else note,
        colour,
    )


def _division(plan: Plan) -> str:
    """Format the division of a global batch without factors of 1, and later global batches."""
    micro = f" × {plan.accumulation:,} micro-batches" if plan.accumulation > 1 else ""
    later = (f"; {one.global_batch:,} from step {one.step:,}" for one in plan.batch_changes)
    return f"{plural(plan.workers, 'worker')}{micro} × {plan.device_batch:,}{''.join(later)}"


def _stage_times(run: Run) -> str:
    stages = {
        "clean epochs": [stage for stage in run.stages[1:] if stage.name == "clean"],
        "polishing": run.polishing,
    }
    parts: list[str] = []
    for name, of in stages.items():
        seconds = sum(stage.result.seconds for stage in of if stage.result)
        if seconds:
            parts.append(f"{duration(seconds)}{' of it' * (not parts)} {name}")
    return ", ".join(parts)


def _subtitle(run: Run) -> str:
    began = run.starts[0].time
    words = [run.summary.status if run.summary else "killed", f"{began.day} {began:%B %Y}"]
    words.append(plural(run.plan.workers, "worker"))
    if len(run.starts) > 1:
        steps = ", ".join(f"{start.resume_step:,}" for start in run.starts[1:])
        words.append(f"resumed at step {steps}")
    return " · ".join(words)


def _remedies(found: Verdict, drawn: dict[str, Chart]) -> list[Part]:
    if not found.causes:
        return []
    return [
        Table(
            columns=[
                Column("Cause", [cause.kind for cause in found.causes]),
                Column("Measured", [cause.figure for cause in found.causes], align="text", links=[
                    cause.rule.link if cause.rule.link in drawn else "" for cause in found.causes
                ]),
                Column("To change it", [cause.remedy for cause in found.causes], align="text"),
            ],
            sortable=False,
        )
    ]  # fmt: skip


def _stages(run: Run) -> list[Part]:
    if not run.stages:
        return []
    column = columns_over(run.stages)
    befores = [stage.before for stage in run.stages]
    decisions = [stage.decision for stage in run.stages]

    def scores(title: str, values: list[str], before: list[str]) -> Column:
        return Column(title, values, before=before, align="number")

    columns = [
        column("Stage", lambda one: one.name + " (discarded)" * (not one.kept), None),
        column("Updates", lambda one: one.result and one.result.steps, ",d"),
        Column("Time", [one.result and duration(one.result.seconds) for one in run.stages],
               align="number"),
        scores("Top-1", [f"{percent(one.after.top1)} %" for one in run.stages],
               [percent(one.top1) if one else "" for one in befores]),
        Column("Change", [one.before and points(one.before.top1, one.after.top1)
                          for one in run.stages], align="number"),
        scores("Held out", [f"{percent(one.after)} %" if one else MISSING for one in decisions]
               if run.decisions else [],
               [percent(one.before) if one else "" for one in decisions]),
        Column("Top-5", [f"{percent(one.after.top5)} %" for one in run.stages], align="number"),
        scores("Loss", [f"{one.after.loss:.4f}" for one in run.stages],
               [f"{one.loss:.4f}" if one else "" for one in befores]),
    ]  # fmt: skip
    looks = [Series(None, one.name, COLOURS[one.name]) for one in run.stages]
    shown = [one for one in columns if len(one.values)]
    table = Table(columns=shown, series=looks, sortable=False)
    return [table, *_stage_notes(run)]


def _stage_notes(run: Run) -> Iterator[str]:
    gap, last = run.last_gap, run.result
    if last is not None and gap is not None and math.isfinite(gap.gap):
        yield (
            f"The generalization gap is {signed(gap.gap, '.4f')}: the validation loss, "
            f"{last.loss:.4f}, minus the training loss, {gap.loss:.4f}, on {gap.samples:,} images "
            f"without augmentation. Top-1 on these is {percent(gap.top1)} %."
        )
    if run.stages[1:]:
        words = []
        if not run.steps:
            words.append(f"Here {run.stages[0].name} is the checkpoint before polishing.")
        if run.polishing and run.end_of_schedule:
            words.append(
                "In the numbers above, polishing is every stage after "
                f"{run.end_of_schedule.name}, with which the schedule ends."
            )
        words += [
            f"In {stage.name}, {_EXPLAINED[stage.name]}"
            for stage in run.stages[1:]
            if stage.name in _EXPLAINED
        ]
        yield " ".join(words)
    changes = [
        (stage, compare(stage.before, stage.after, stage.mistakes_before, stage.mistakes))
        for stage in run.stages
        if stage.before and stage.mistakes and stage.mistakes_before
    ]
    if changes:
        parts = "; ".join(
            f"{stage.name} turned {change.fixed:,} from wrong to right and {change.broken:,} from "
            f"right to wrong{'' if change.beyond_noise else ' (within the noise)'}"
            for stage, change in changes
        )
        yield f"Of the {changes[0][1].samples:,} validation images, {parts}."
    if run.decisions:
        yield (
            f"Held out: top-1 on {run.decisions[0].samples:,} training images that no stage trains "
            "or measures on. A stage that did not raise it was discarded, and the model was rolled "
            "back. The other accuracies are on validation images, which decide nothing."
        )
    if len(run.notes) > _NOTES:
        yield f"{len(run.notes) - _NOTES:,} earlier notes are in log.jsonl."
    for note in run.notes[-_NOTES:]:
        yield f"{note.stage}, step {note.step:,}: {note.text}."


def charts_of(run: Run) -> dict[str, Chart]:
    """Return the charts for which a run has numbers, by name."""
    number = len(run.drift.layers) if run.drift else 0
    classes = len(run.final_mistakes.classes) if run.final_mistakes else 0
    norms = any(math.isfinite(step.gradient_norm) for step in run.steps)
    all_charts: tuple[tuple[str, str, object, _Draw, tuple[float, float]], ...] = (
        ("loss", "Loss and learning rate", run.steps, charts.draw_loss, (440, 380)),
        ("accuracy", "Accuracy", run.evaluations, charts.draw_accuracy, (340, 500)),
        ("throughput", "Training speed", run.steps, charts.draw_throughput, (240, 220)),
        ("waits", "What updates waited for", run.timed, charts.draw_waits, (200, 200)),
        ("noise", "Gradient noise scale", has_course(run), charts.draw_noise, (260, 260)),
        (
            "ratios", "Trust ratios of LARS by layer", charts.layers(run), charts.draw_ratios,
            _rows(len(charts.layers(run)), _ROW),
        ),
        ("norm", "Gradient norm", norms, charts.draw_norm, (240, 220)),
        ("system", "Resources of the workers", run.system, charts.draw_system, (240, 420)),
        (
            "drift", "What polishing changed in BatchNorm", run.drift and run.drift.quantiles,
            charts.draw_drift, _rows(number, _ROW),
        ),
        (
            "confusion", "Classes and what they are taken for", matrix_is_drawn(run),
            charts.draw_confusion, _rows(classes, 18),
        ),
    )  # fmt: skip
    captions = _captions(run)
    return {
        name: Chart(
            name=name,
            title=title,
            draw=lambda figure, draw=draw: draw(figure, run),  # type: ignore[misc]
            heights=heights,
            caption=captions.get(name, ""),
        )
        for name, title, content, draw, heights in all_charts
        if content
    }


_Draw = Callable[["Canvas", Run], None]


def _rows(number: int, each: float) -> tuple[float, float]:
    height = 120 + each * max(8, number)
    return height, height


def _captions(run: Run) -> dict[str, str]:
    samples = run.evaluations[-1].samples if run.evaluations else 1
    lowered = " and ".join(stage.name for stage in run.stages if stage.lowered_top1)
    discarded = any(not stage.kept for stage in run.stages)
    return {
        "loss": "Training loss of every update (faint) and its running median; validation loss "
        "(dots); learning rate (below). The two losses need not meet: only training images are "
        "augmented, and only the training loss may be label-smoothed.",
        "accuracy": f"Accuracy on the {samples:,} validation images"
        + ": during the run, and after each stage on a scale of its own" * bool(run.stages[1:])
        + f". One of them is {100 / samples:.2g} points."
        + " Below each stage: its change there, and on the held-out training images."
        * bool(run.decisions)
        + (f" Here {lowered} lowered it." if lowered else "")
        + " A hollow mark is a stage that was discarded." * discarded,
        "throughput": "Training images per second on all workers: every update (faint), running "
        "median, and the whole run (dashed). Dips are slow updates, for example without data.",
        "drift": "Change of each BatchNorm layer's statistics, measured on "
        f"{run.drift.samples if run.drift else 0:,} clean images, from the running averages, "
        "the input at the top. Columns are quantiles over channels: one in twenty fell by more "
        "than the value at 5 % (blue), one in twenty rose by more than that at 95 % (red). Means "
        "are in standard deviations (σ), variances are ln of the ratio: 0.1 is about 10 %."
        + " The stage and these changes were discarded."
        * (not run.drift_kept),
        "noise": "tr(Σ)/|G|²: the batch at which the noise of the mean gradient is as large as the "
        "gradient, for consecutive parts of the run, from squared norms at two batch sizes. Bars "
        "are 95 % intervals; one that leaves the chart has no upper end. Larger batches than the "
        "noise scale save few steps.",
        "ratios": "Factor of LARS on the step of each layer, η|w| / (|g| + decay |w|), the input "
        "at the top. A layer much darker than its neighbours hardly moves. A bright spot is a "
        "gradient close to zero. Light grey: no gradient.",
        "norm": "Norm of the gradient over the global batch (faint), and its running median.",
        "system": f"Median of the {run.plan.workers} workers, and their range (shaded). log.jsonl "
        "also has network and disk.",
        "waits": "Time of worker 0's updates; on a GPU, what the GPU waited for."
        + " While another worker waits for images, this one waits for its gradients. Sums that "
        "overlap with computing take no time here." * (run.plan.workers > 1),
        "confusion": f"The {samples:,} validation images: a row for each class, with the number of "
        "its images by predicted class; correct ones are on the diagonal (grey), others red.",
    }


def _before(run: Run, name: str) -> list[Part]:
    if name == "waits":
        return [describe_waits(run)]
    return [describe_noise(run)] if name == "noise" else []


def describe_waits(run: Run) -> str:
    """Return a sentence on whether the run was input bound."""
    data, reduction = shares(run)
    parts = f"{_percent(data)} of the time waiting for images"
    if run.plan.workers > 1:
        parts += f" and {_percent(reduction)} waiting for the sums of gradients"
    if data < INPUT_BOUND:
        return f"Not input bound: updates spent {parts}."
    return (
        f"Input bound: updates spent {parts}. Without waiting for images, training would be "
        f"{1 / max(1 - data, 0.01):.2g} times as fast (see execution.cache and execution.decoder, "
        "or give each worker more cores)."
    )


def _percent(part: float) -> str:
    """Return a share in percent.

    >>> [_percent(part) for part in (0.0004, 0.034, 0.417)]
    ['less than 0.1 %', '3.4 %', '42 %']
    """
    if part < 0.001:
        return "less than 0.1 %"
    return f"{100 * part:.0f} %" if part >= 0.1 else f"{100 * part:.1f} %"


def _mistakes(run: Run, found: Mistakes | None, matrix: Chart | None) -> Iterator[Part]:
    if found is None or not found.samples:
        return
    if matrix is not None:
        yield matrix
    column = columns_over(pairs(found))
    yield Table(
        columns=[
            column("Class", lambda pair: pair.label, None),
            column("Taken for", lambda pair: pair.predicted, None),
            column("Images", lambda pair: f"{pair.images:,} of {pair.size:,}", None),
        ],
        sortable=False,
    )
    weakest = columns_over(by_class(found)[:_WEAKEST])
    yield Table(
        columns=[
            weakest("Class", lambda row: row.name, None),
            weakest("Right", lambda row: f"{row.correct:,} of {row.size:,}", None),
        ],
        caption="The classes with the lowest accuracy",
        sortable=False,
    )
    images = [
        Image(one.url, one.label, f"taken for {one.predicted}\nloss {one.loss:.3g}")
        for one in worst(run)
    ]
    if images:
        yield Images(images)
        yield "The wrong validation images with the largest loss, as the model sees them."


def _extra(run: Run) -> Iterator[tuple[str, dict[str, str]]]:
    for part, facts in (run.summary.extra if run.summary else {}).items():
        rows = {key: _plain(value) for key, value in facts.items() if value}
        if rows:
            yield part, rows


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


_WIDE = 960  # points
_NAMES = (
    *("loss", "accuracy", "throughput", "drift", "ratios", "waits", "noise", "norm", "system"),
    "confusion",
)
"""Names of all PNG files, in the order in which the overview has four of them."""


def write_charts(run: Run, folder: Path) -> None:
    """Write every chart, and the overview report.png, as PNG files."""
    drawn = charts_of(run)
    for name in _NAMES:
        if name not in drawn:
            (folder / f"{name}.png").unlink(missing_ok=True)  # of an earlier part of the run
            continue
        chart = drawn[name]

        def draw(figure: "Canvas", chart: Chart = chart) -> None:
            write_title(figure, chart.title)
            chart.draw(figure)

        size = _WIDE, chart.heights[0] + 40
        save_png(folder / f"{name}.png", draw, size=size, pixels=2 * _WIDE)
    shown = [drawn[name] for name in _NAMES if name in drawn][:4]
    save_png(
        folder / OVERVIEW,
        lambda figure: _draw_overview(figure, run, shown),
        size=(1120, 700),
        pixels=1600,
    )


def _draw_overview(figure: "Figure", run: Run, shown: list[Chart]) -> None:
    grid = figure.add_gridspec(2, 1, height_ratios=[1, 4.2])
    head, body = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    left = MARGIN / 1120
    head.text(left, 0.82, run.name, size=21, weight="bold", va="top")
    head.text(1 - left, 0.79, _subtitle(run), color=MUTED, ha="right", va="top")
    for place, number in enumerate(headlines(run)):
        x = left + place * (1 - left) / 6
        head.text(x, 0.28, f"{number.value} {number.unit}", size=15, weight="bold")
        head.text(x, 0.2, number.label, color=MUTED, va="top")
    if not shown:
        body.add_subplot().set_axis_off()  # the layout needs one
        return
    quarters = body.add_gridspec(-(-len(shown) // 2), min(2, len(shown)))
    for place, chart in enumerate(shown):
        quarter = body.add_subfigure(quarters[place])
        write_title(quarter, chart.title)
        chart.draw(quarter)

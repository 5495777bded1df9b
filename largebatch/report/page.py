"""The report of one run: what its page shows, and its overview as a PNG file."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from largebatch.formatting import (
    MISSING,
    TOP5,
    duration,
    four_decimals,
    percent,
    plural,
    points,
    signed,
    three_digits,
)
from largebatch.recipe.arithmetic.plan import describe_division
from largebatch.report.charts import (
    draw_accuracy,
    draw_loss,
    draw_monitors,
    draw_noise,
    draw_throughput,
)
from largebatch.report.noise import describe_noise, has_course
from largebatch.report.pages import (
    Chart,
    Code,
    Column,
    Facts,
    Headline,
    Page,
    PagePart,
    PageSection,
    Series,
    Table,
    columns_over,
)
from largebatch.report.run import (
    INPUT_BOUND,
    Run,
    change_from,
    images_per_second,
    median,
    shares,
    short_commit,
    values_of,
)
from largebatch.report.style import MARGIN, MUTED, looks_of, save_png, write_title
from largebatch.report.verdict import Verdict, verdict
from largebatch.tracking.events import OVERVIEW, Mistakes

if TYPE_CHECKING:
    from largebatch.report.style import Figure

_NOTES = 50  # the newest ones
_LAYERS = 10  # those that changed most
_PAIRS = 10  # the most frequent mistakes


def make_page(run: Run) -> str:
    """Return the HTML of a run's report."""
    outcome = verdict(run)
    drawn = charts_of(run)
    return Page(
        title=run.name,
        subtitle=_subtitle(run),
        findings=[outcome.words],
        is_sound=outcome.good,
        headlines=list(headlines(run)),
        sections=[
            PageSection(title="What to change", parts=_remedies(outcome, drawn)),
            PageSection(title="Stages", parts=_stages(run)),
            *(
                PageSection(title=chart.title, parts=[*_before(run, name), chart])
                for name, chart in drawn.items()
            ),
            PageSection(title="What polishing changed in BatchNorm", parts=_drift(run)),
            PageSection(
                title="Most frequent wrong predictions",
                parts=list(wrong_predictions(run.final_mistakes)),
            ),
            PageSection(
                title="Recipe",
                parts=[] if run.recipe is None else [Code("recipe.yaml", run.recipe)],
            ),
            PageSection(title="Environment", parts=[Facts(_environment(run))]),
        ],
        source=f"the run folder {run.folder}",
    ).html()


def headlines(run: Run) -> Iterator[Headline]:
    """Yield the six numbers that sum up a run."""
    plan = run.plan
    last = run.result
    rate = images_per_second(run)
    polished = any(stage.kept for stage in run.polishing) and run.finished
    if last is None:
        yield Headline("Top-1 accuracy", MISSING, "", "never measured")
    else:
        when = "after polishing" if polished else f"after {plural(last.step, 'step')}"
        yield Headline("Top-1 accuracy", percent(last.top1), "%", when)
    yield _gain(run)
    if rate is None:
        yield Headline("Training speed", MISSING, "", "no step was timed")
    else:
        workers = plural(plan.workers, "worker") + " together" * (plan.workers > 1)
        bound = bool(run.timed) and shares(run)[0] >= INPUT_BOUND
        yield Headline(
            "Training speed", f"{rate:,.0f}", "images/s", f"{workers}{', input bound' * bound}"
        )
    division = describe_division(plan).partition(" = ")[2]
    division += "".join(f"; {it.global_batch:,} from step {it.step:,}" for it in plan.batch_changes)
    yield Headline("Global batch", f"{plan.global_batch:,}", "images", division)
    skipped = run.summary.skipped_steps if run.summary else 0
    passes = f"{plan.epoch(run.num_steps):,.1f} epochs"
    if skipped:
        passes += f", {skipped:,} skipped: gradients not finite"
    yield Headline("Updates", f"{run.num_steps:,}", "steps", passes)
    time, unit = duration(run.summary.seconds).split(" ") if run.summary else (MISSING, "")
    yield Headline("Wall time", time, unit, "of all parts of the run" * (len(run.starts) > 1))


def _gain(run: Run) -> Headline:
    """Return the gain from the end of the schedule, whose clean epochs are epochs of it anyway."""
    before, after = run.end_of_schedule, run.last_stage
    if before is None or after is None or not run.polishing:
        return Headline("Gain by polishing", MISSING, "", "not polished")
    change = change_from(before, after)
    note = f"{abs(change.images):,} of {change.samples:,} validation images"
    colour: Literal["good", "bad", "grey"] = "bad" if change.images < 0 else "good"
    if not change.beyond_noise:
        note, colour = f"within the noise of {change.samples:,} validation images", "grey"
    return Headline(
        "Gain by polishing", points(before.after.top1, after.after.top1), "points", note, colour
    )


def _subtitle(run: Run) -> str:
    began = run.starts[0].time
    words = [run.summary.status if run.summary else "killed", f"{began.day} {began:%B %Y}"]
    words.append(run.workers)
    if len(run.starts) > 1:
        steps = ", ".join(f"{start.resume_step:,}" for start in run.starts[1:])
        words.append(f"resumed at step {steps}")
    return " · ".join(words)


def _remedies(outcome: Verdict, drawn: dict[str, Chart]) -> list[PagePart]:
    shown = {*drawn, "drift"}
    column = columns_over(outcome.causes)
    links = [cause.chart if cause.chart in shown else "" for cause in outcome.causes]
    columns = [
        column("Cause", lambda cause: cause.check, None),
        Column("Measured", [cause.text for cause in outcome.causes], align="text", links=links),
        Column("To change it", [cause.remedy for cause in outcome.causes], align="text"),
    ]
    return [Table(columns=columns, sortable=False)] if outcome.causes else []


def _stages(run: Run) -> list[PagePart]:
    if not run.stages:
        return []
    column = columns_over(run.stages)
    befores = [stage.before.after if stage.before else None for stage in run.stages]
    decisions = [stage.decision for stage in run.stages]

    def scores(title: str, values: Sequence[object], before: list[str]) -> Column:
        return Column(title, values, before=before, align="number")

    shows_top5 = run.classes is None or run.classes > TOP5
    top5s = [f"{percent(one.after.top5)} %" if shows_top5 else None for one in run.stages]
    balanced = [
        None if one.after.balanced_top1 is None else f"{percent(one.after.balanced_top1)} %"
        for one in run.stages
    ]
    columns = [
        column("Stage", lambda one: one.name + " (discarded)" * (not one.kept), None),
        column("Updates", lambda one: one.result and one.result.steps, ",d"),
        Column("Time", [one.result and duration(one.result.seconds) for one in run.stages],
               align="number"),
        scores("Top-1", [f"{percent(one.after.top1)} %" for one in run.stages],
               [percent(one.top1) if one else "" for one in befores]),
        Column("Mean of classes", balanced, align="number"),
        Column("Change", [one.before and points(one.before.after.top1, one.after.top1)
                          for one in run.stages], align="number"),
        scores("Held out", [one and f"{percent(one.after)} %" for one in decisions],
               [percent(one.before) if one else "" for one in decisions]),
        Column("Top-5", top5s, align="number"),
        scores("Loss", [four_decimals(one.after.loss) for one in run.stages],
               [four_decimals(one.loss) if one else "" for one in befores]),
    ]  # fmt: skip
    looks = looks_of(run.stage_names)
    series = [Series(None, stage.name, looks[stage.name].colour) for stage in run.stages]
    return [Table(columns=columns, series=series, sortable=False), *_stage_notes(run)]


def _stage_notes(run: Run) -> Iterator[str]:
    gap = run.last_gap
    last = run.result
    if last is not None and gap is not None and math.isfinite(gap.gap):
        yield (
            f"The generalization gap is {signed(gap.gap, '.4f')}: the validation loss, "
            f"{four_decimals(last.loss)}, minus the training loss, {four_decimals(gap.loss)}, on "
            f"{gap.samples:,} images "
            f"without augmentation. Top-1 on these is {percent(gap.top1)} %."
        )
    changes = [
        (stage, change_from(stage.before, stage))
        for stage in run.stages
        if stage.before and stage.mistakes and stage.before.mistakes
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
    # fmt: off
    charts = (
        Chart(name="loss", title="Loss and learning rate", height=440,
              draw=lambda figure: draw_loss(figure, run),
              caption="Training loss of every update (faint) and its running median; validation "
              "loss (dots); learning rate (below). The two losses need not meet: only training "
              "images are augmented, and only the training loss may be label-smoothed, weighted "
              "by class, or a binary cross-entropy."
              + _caption_of_mixing(run)),
        Chart(name="accuracy", title="Accuracy", draw=lambda figure: draw_accuracy(figure, run),
              caption="Accuracy on the validation images. A hollow mark is a stage that was "
              "discarded."),
        Chart(name="throughput", title="Training speed", height=240,
              draw=lambda figure: draw_throughput(figure, run),
              caption="Training images per second on all workers: every update (faint), running "
              "median, and the whole run (dashed)."),
        Chart(name="noise", title="Gradient noise scale", height=260,
              draw=lambda figure: draw_noise(figure, run),
              caption="tr(Σ)/|G|²: the batch at which the noise of the mean gradient is as large "
              "as the gradient, for consecutive parts of the run. Bars are 95 % intervals; one "
              "that leaves the chart has no upper end. Larger batches save few steps."),
        Chart(name="monitors", title="Monitors of other packages",
              height=60 + 160 * len(run.measured),
              draw=lambda figure: draw_monitors(figure, run),
              caption="Running medians of what they measured on worker 0 after every update."),
    )
    # fmt: on
    shown = run.steps, run.evaluations, run.steps, has_course(run), run.measured
    return {chart.name: chart for chart, rows in zip(charts, shown, strict=True) if rows}


def _caption_of_mixing(run: Run) -> str:
    end = run.plan.mix_steps
    if not end:
        return ""
    until = f" before step {end:,}" if end < run.plan.train_steps else ""
    return (
        f" Training images{until} are mixed in pairs (data.mix): the loss there is that of shares "
        "of two classes, which no model brings to 0."
    )


def _before(run: Run, name: str) -> list[PagePart]:
    if name == "loss":
        return describe_clipping(run)
    if name == "throughput" and run.timed:
        return [describe_waits(run)]
    return [describe_noise(run)] if name == "noise" else []


def describe_clipping(run: Run) -> list[PagePart]:
    """Return a sentence on how many updates were clipped; none without optimizer.clip_norm."""
    limit = run.parsed.optimizer.clip_norm if run.parsed else None
    norms = values_of(run.steps, "gradient_norm")
    norms = norms[np.isfinite(norms)]
    if limit is None or not norms.size:
        return []
    part = float((norms > limit).mean())
    clipped = f"{percent(part)} % of the updates were" if part else "No update was"
    text = (
        f"{clipped} clipped to a gradient norm of {limit:g}; the median norm before clipping was "
        f"{three_digits(median(norms))}."
    )
    return [text]


def describe_waits(run: Run) -> str:
    """Return a sentence on whether the run was input bound."""
    data, reduction = shares(run)
    parts = f"{three_digits(100 * data)} % of the time waiting for images"
    if run.plan.workers > 1:
        parts += f" and {three_digits(100 * reduction)} % waiting for the sums of gradients"
    if data < INPUT_BOUND:
        return f"Not input bound: updates spent {parts}."
    return (
        f"Input bound: updates spent {parts}. Without waiting for images, training would be "
        f"{1 / max(1 - data, 0.01):.2g} times as fast (see execution.cache and execution.decoder, "
        "or give each worker more cores)."
    )


def _drift(run: Run) -> list[PagePart]:
    drift = run.drift
    if drift is None:
        return []
    most = {it: max(it.mean_shift, it.log_variance_ratio) for it in drift.layers}
    changed = sorted(most, key=lambda it: -most[it] if math.isfinite(most[it]) else -math.inf)
    column = columns_over(changed[:_LAYERS])
    columns = [
        column("Layer", lambda it: it.name, None),
        column("Channels", lambda it: it.channels, ",d"),
        column("Mean, σ", lambda it: it.mean_shift, ".3f"),
        column("ln(variance)", lambda it: it.log_variance_ratio, ".3f"),
    ]
    note = (
        f"The largest changes of {plural(len(drift.layers), 'layer')} from the running averages to "
        f"statistics of {drift.samples:,} clean images, as root mean square over the channels. 0.1 "
        "of ln(variance) is about 10 %."
    )
    if any(not it.kept and it.stage == drift.stage for it in run.decisions):
        note += " They were discarded: the model was rolled back."
    return [Table(name="drift", columns=columns, sortable=False), note]


def wrong_predictions(mistakes: Mistakes | None) -> Iterator[Table]:
    """Yield the table of the classes that are mixed up most; nothing without mistakes."""
    if mistakes is None or not mistakes.samples:
        return
    counts = Counter(zip(mistakes.labels, mistakes.predicted, strict=True))
    column = columns_over(sorted(counts, key=lambda pair: (-counts[pair], pair))[:_PAIRS])
    yield Table(
        columns=[
            column("Class", lambda pair: mistakes.classes[pair[0]], None),
            column("Predicted as", lambda pair: _class_name(mistakes, pair[1]), None),
            column("Images", lambda pair: f"{counts[pair]:,} of {mistakes.sizes[pair[0]]:,}", None),
        ],
        sortable=False,
    )


def _class_name(mistakes: Mistakes, label: int) -> str:
    return "none: scores are NaN" if label < 0 else mistakes.classes[label]


def _environment(run: Run) -> dict[str, str]:
    facts = {"Workers": run.workers, "Device batch": f"{run.plan.device_batch:,}"}
    if run.summary is None:
        return facts
    memory = run.summary.peak_memory_bytes
    return facts | {
        "Backend": run.summary.backend,
        "Peak memory": MISSING if memory is None else f"{memory / 2**30:.2f} GiB",
        "Commit": short_commit(run.summary.commit),
        **run.summary.versions,
    }


def write_overview(run: Run, folder: Path) -> None:
    """Write the six numbers and the charts as report.png, for a quick look."""
    shown = list(charts_of(run).values())
    left = MARGIN / 1120

    def draw(figure: "Figure") -> None:
        grid = figure.add_gridspec(2, 1, height_ratios=[1, 4.2])
        head, body = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
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
            fills_row = len(shown) % 2 and chart is shown[-1]
            quarter = body.add_subfigure(quarters[-1, :] if fills_row else quarters[place])
            write_title(quarter, chart.title)
            chart.draw(quarter)

    save_png(folder / OVERVIEW, draw, size=(1120, 700), pixels=1600)

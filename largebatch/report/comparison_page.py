"""The page that compares runs: what it finds first, its tables and its charts.

Every chart has all runs, each with the colour that the legend has.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from largebatch.errors import printable, shorten
from largebatch.formatting import MISSING, plural, points
from largebatch.report.comparison import Compared, Comparison, describe
from largebatch.report.course import Course
from largebatch.report.figures import needs_log_scale
from largebatch.report.interactive import Column, Filter, Page, Section, Table, columns_over
from largebatch.report.interactive_charts import Chart, Columns, Curve, Series, series
from largebatch.report.run import Stage, images_per_second

_NOISE = (
    "Noise is two standard errors of the difference of two runs on these samples: by McNemar's "
    "test where both logs hold every mistake, else as of two independent samples. It does not "
    "include how far a run moves with its seed, and of many runs the best one is best by luck, too."
)
_RUNS = (
    "Top-1 is that of the model as the run left it; a stage may have "
    "been discarded since. The time to an accuracy is that to the first evaluation that reached "
    'it, on the axis of the charts, and "at most" that where it was the run\'s first evaluation; '
    "the run time is all of worker 0's, with starting, saving and what was done again after a "
    "failure."
)
_DIFFERENCES = (
    "The settings of recipe.yaml that are not the same in all runs, and in brackets what the runs "
    f"were made on. {MISSING} stands where a run has no such key, or its recipe or summary cannot "
    "be read."
)
_SAME = "No setting: the recipes are the same, and so is what the runs were made on."


class Unit(NamedTuple):
    """In what the page gives times."""

    name: str
    seconds: int


def make_comparison_page(comparison: Comparison) -> Page:
    """Return the page of a comparison."""
    unit = _unit(comparison)
    looks = [
        series(place, one.label, title=printable(str(one.run.path.resolve())))
        for place, one in enumerate(comparison.runs)
    ]
    differences = (
        [Table(name="differences", columns=_differences(comparison))]
        if comparison.differences
        else []
    )
    axes = {"step": "Steps", "epoch": "Epochs", "images": "Samples", "time": f"Time, {unit.name}"}
    return Page(
        title=f"{plural(len(comparison.runs), 'run')} compared",
        subtitle=_subtitle(comparison),
        findings=list(describe(comparison)),
        is_sound=len(comparison.groups) == 1,
        note=_NOISE if any(len(group.runs) > 1 for group in comparison.groups) else "",
        legend=("Runs", looks),
        filters=[Filter("Against", axes, "axis")],
        sections=[
            Section(title="Not compared", notes=comparison.left_out),
            Section(title="Runs", parts=[_summary(comparison, looks, unit)], notes=[_RUNS]),
            *_charts(comparison, looks, unit),
            Section(
                title="What differs",
                parts=differences,
                notes=[_DIFFERENCES if differences else _SAME],
            ),
        ],
        source=f"{len(comparison.runs)} run folders",
    )


def _subtitle(comparison: Comparison) -> str:
    """Return the data, the recipes' names and how the runs ended, in one line."""
    ends = Counter(one.status for one in comparison.runs)
    names = dict.fromkeys(one.run.name for one in comparison.runs)
    words = [shorten(list(names), most=4)]
    words += [group.data for group in comparison.groups[:1] if len(comparison.groups) == 1]
    words.append(", ".join(f"{count} {status}" for status, count in ends.items()))
    return " · ".join(words)


def _unit(comparison: Comparison) -> Unit:
    """Return the unit that suits the longest time."""
    lengths = [one.run.summary.seconds for one in comparison.runs if one.run.summary]
    for one in comparison.runs:
        lengths += [*one.evaluated.seconds[-1:], *one.updates.seconds[-1:]]
    longest = max((length for length in lengths if not math.isnan(length)), default=0)
    units = (Unit("h", 3600), Unit("min", 60))
    return next((unit for unit in units if longest >= 2 * unit.seconds), Unit("s", 1))


def _summary(comparison: Comparison, looks: Sequence[Series], unit: Unit) -> Table:
    """Return a row for each run, the most accurate first."""
    groups = {one.label: group for group in comparison.groups for one in group.runs}
    ranked = [one for group in comparison.groups for one in group.runs]
    ranked += [one for one in comparison.runs if one.label not in groups]
    by_label = {look.label: look for look in looks}

    column = columns_over(ranked)

    def behind(one: Compared) -> float | None:
        group = groups.get(one.label)
        return None if group is None else group.points_to_best(one)

    def beyond(one: Compared) -> str | None:
        group = groups.get(one.label)
        if group is None or one is group.runs[0]:
            return None
        return "yes" if group.change(one).beyond_noise else "no"

    names = dict.fromkeys(stage.name for one in ranked for stage in one.ended)
    columns = [
        column("Run", lambda one: one.label, None),
        column("Top-1, %", lambda one: one.run.result and 100 * one.run.result.top1, ".2f"),
        column("To the best", behind, ".2f"),
        column("Beyond noise", beyond, None),
        *(column(f"After {name}, %", partial(_after, name=name), ".2f") for name in names),
        *(
            column(
                f"{target:g} % in{' at most' * at_once}, {unit.name}",
                partial(_reached, target=target, unit=unit, at_once=at_once),
                ",.2f",
            )
            for target in comparison.targets
            for at_once in (False, True)
        ),
        column("Steps", lambda one: one.run.num_steps, ",d"),
        column("Epochs", lambda one: one.run.plan.epoch(one.run.num_steps), ",.1f"),
        column("Samples/s", lambda one: images_per_second(one.run), ",.0f"),
        column(
            f"Run time, {unit.name}",
            lambda one: one.run.summary and one.run.summary.seconds / unit.seconds,
            ",.2f",
        ),
        column("Batch", lambda one: one.run.plan.global_batch, ",d"),
        column("Workers", lambda one: one.run.plan.workers, ",d"),
        column("Status", lambda one: one.status, None),
        column("Backend", lambda one: one.run.summary and one.run.summary.backend, None),
        column(
            "torch", lambda one: one.run.summary and one.run.summary.versions.get("torch"), None
        ),
        column("Started", lambda one: f"{one.run.starts[0].time:%Y-%m-%d %H:%M}", None),
    ]
    return Table(name="runs", columns=columns, series=[by_label[one.label] for one in ranked])


def _reached(one: Compared, *, target: float, unit: Unit, at_once: bool) -> float:
    """Return the time to a target; NaN where the other column has it, of bounds or of times."""
    if one.reached_at_once(target) != at_once:
        return math.nan
    return one.seconds_to(target) / unit.seconds


def _after(one: Compared, *, name: str) -> float | None:
    """Return top-1 in percent after a stage, also one that was discarded; None while it lasts."""
    return next((100 * stage.after.top1 for stage in one.ended if stage.name == name), None)


def _differences(comparison: Comparison) -> list[Column]:
    """Return a row for each setting that differs, and a column for each run."""
    rows = comparison.differences
    return [
        Column("Setting", list(rows)),
        *(
            Column(one.label, [values[place] for values in rows.values()])
            for place, one in enumerate(comparison.runs)
        ),
    ]


def _charts(comparison: Comparison, looks: Sequence[Series], unit: Unit) -> Iterator[Section]:
    """Yield those charts of which any run has something."""
    runs = list(zip(looks, comparison.runs, strict=True))
    evaluated = [(look, _columns(one.evaluated.thinned(), unit)) for look, one in runs]
    updates = [(look, _columns(one.updates, unit)) for look, one in runs]
    places = ("step", "@step{0,0}"), ("epoch", "@epoch{0,0.00}"), ("samples", "@images{0,0}")
    time = ("time", f"@time{{0,0.00}} {unit.name}")
    where = (*places, time)
    top1, loss, stage = (
        ("top-1", "@top1{0.00} %"), ("loss", "@loss{0.0000}"), ("stage", "@stage"),
    )  # fmt: skip
    is_evaluated = any(one.evaluated.stages for one in comparison.runs)
    if is_evaluated:
        yield _section("Accuracy", Chart(
            name="accuracy", x="step", y="top1", moves=True, height=400,
            x_title="Steps", y_title="Top-1, %",
            curves=_curves(evaluated, top1, loss, stage, *where),
            caption="The validation samples that are classified right, at every evaluation of what "
            "the run kept; time is that of updates, evaluations and stages without updates, each "
            "counted once.",
        ))  # fmt: skip
    if is_evaluated or any(one.updates.stages for one in comparison.runs):
        courses = [course for one in comparison.runs for course in (one.updates, one.evaluated)]
        log = needs_log_scale(np.concatenate([course.values["loss"] for course in courses]))
        yield _section("Loss", Chart(
            name="loss", x="step", y="loss", moves=True, log="y" if log else "",
            x_title="Steps", y_title="Loss",
            curves=[
                *_curves(updates, ("training loss", "@loss{0.0000}"), *where, points=False),
                *_curves(evaluated, ("validation loss", "@loss{0.0000}"), *where, line=False),
            ],
            caption="The running median of the training loss (lines), and the loss on the "
            "validation data (points). Training losses compare only where augmentation and label "
            "smoothing are the same.",
        ))  # fmt: skip
    if any(one.updates.stages for one in comparison.runs):
        yield _section("Training speed", Chart(
            name="throughput", x="step", y="rate", moves=True, height=280, from_zero=True,
            x_title="Steps", y_title="Samples per second",
            curves=_curves(updates, ("samples/s", "@rate{0,0}"), *where, points=False),
            caption="Training samples per second on all workers together, as running median.",
        ))  # fmt: skip
    if any(np.isfinite(one.evaluated.seconds).any() for one in comparison.runs):
        yield _section("Time to accuracy", Chart(
            name="times", x="top1", y="time", from_zero=True,
            x_title="Top-1 to reach, %", y_title=f"Time, {unit.name}",
            curves=[
                *_curves([(look, _steps(_records(one, unit))) for look, one in runs], points=False),
                *_curves([(look, _records(one, unit)) for look, one in runs], top1, time, *places,
                         line=False),
            ],
            caption="How long it took until an evaluation had reached the accuracy below. The "
            "lower run is the faster one to that target; a line ends at the best that its run "
            "reached. A run that polished a checkpoint is not here: its model was trained in "
            "another.",
        ))  # fmt: skip
    if any(one.ended[1:] for one in comparison.runs):
        yield _section("Stages", _stages_chart(runs))


def _section(title: str, chart: Chart) -> Section:
    return Section(title=title, parts=[chart])


def _curves(
    runs: Sequence[tuple[Series, Columns]],
    *hover: tuple[str, str],
    line: bool = True,
    points: bool = True,
) -> list[Curve]:
    return [
        Curve(series=look, data=data, line=line, points=points, hover=hover) for look, data in runs
    ]


def _records(one: Compared, unit: Unit) -> Columns:
    """Return the evaluations that were better than all before."""
    top1 = one.evaluated.values["top1"]
    before = np.maximum.accumulate(np.concatenate(([-np.inf], top1[:-1])))
    return _columns(one.evaluated.at(np.flatnonzero(top1 > before)).thinned(), unit)


def _steps(records: Columns) -> Columns:
    """Return the steps between records."""
    return {"top1": np.repeat(records["top1"], 2)[:-1], "time": np.repeat(records["time"], 2)[1:]}


def _stages_chart(runs: Sequence[tuple[Series, Compared]]) -> Chart:
    """Return top-1 at the end of every stage; one that was discarded is hollow."""
    ended = [(look, _stage_columns(one.ended)) for look, one in runs]
    kept = [(look, _stage_columns([it for it in one.ended if it.kept])) for look, one in runs]
    hover = ("stage", "@stage, @kept"), ("top-1", "@top1{0.00} %"), ("change", "@change")
    return Chart(
        name="stages", x="stage", y="top1", x_title="After the stage", y_title="Top-1, %",
        categories=list(dict.fromkeys(stage.name for _, one in runs for stage in one.ended)),
        curves=[*_curves(kept, points=False), *_curves(ended, *hover, line=False)],
        caption="Top-1 at the end of each stage. A hollow mark is a stage that was discarded.",
    )  # fmt: skip


def _stage_columns(stages: Sequence[Stage]) -> dict[str, list[object]]:
    return {
        "stage": [stage.name for stage in stages],
        "top1": [100 * stage.after.top1 for stage in stages],
        "change": [
            f"{points(stage.before.top1, stage.after.top1)} points" if stage.before else MISSING
            for stage in stages
        ],
        "kept": ["kept" if stage.kept else "discarded" for stage in stages],
        "fill": [1.0 if stage.kept else 0.0 for stage in stages],
    }


def _columns(course: Course, unit: Unit) -> Columns:
    """Return a course as the columns of a chart's data."""
    return {
        "step": course.step,
        "epoch": course.epoch,
        "images": course.images,
        "time": course.seconds / unit.seconds,
        "stage": list(course.stages),
        **course.values,
    }

"""The page that compares runs: what it says first, its tables and its charts.

Words and layout stand in comparison.html. Every chart has all runs, each with the colour that the
legend has, and a button there hides a run in all of them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from largebatch.errors import printable, shorten
from largebatch.recipe.task import Task
from largebatch.report.comparison import Compared, Comparison, describe, plural
from largebatch.report.course import Course
from largebatch.report.interactive import (
    Series,
    add_hover,
    add_line,
    add_points,
    make_interactive_page,
    new_chart,
    new_source,
    series,
)
from largebatch.report.numbers import points
from largebatch.report.run import Stage, images_per_second, needs_log_scale
from largebatch.report.table import MISSING, Column, new_table

if TYPE_CHECKING:
    from largebatch.report.interactive import Chart, Model, Source
    from largebatch.report.table import Table


class Unit(NamedTuple):
    """In what the page gives times."""

    name: str
    seconds: int


def make_comparison_page(comparison: Comparison) -> str:
    """Return the HTML of the page. Raises MissingPackageError without Bokeh."""
    unit = _unit(comparison)
    models: dict[str, Model] = {"summary": _summary(comparison, unit)}
    models |= dict(_charts(comparison, unit))
    if comparison.differences:
        models["differences"] = _differences(comparison)
    sentences = list(describe(comparison))
    return make_interactive_page(
        Path(__file__).with_name("comparison.html"),
        models,
        title=plural(len(comparison.runs), "run"),
        subtitle=_subtitle(comparison),
        comparison=comparison,
        sentences=sentences,
        good=len(comparison.groups) == 1,
        judged=any(len(group.runs) > 1 for group in comparison.groups),
        tasks=_measured(comparison.runs),
        legend_of=[look for look, _ in _looks(comparison)],
        axes={
            "step": "Steps",
            "epoch": "Epochs",
            "images": "Samples",
            "time": f"Time, {unit.name}",
        },
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


def _summary(comparison: Comparison, unit: Unit) -> "Table":
    """Return a row for each run, the most accurate first."""
    groups = {one.label: group for group in comparison.groups for one in group.runs}
    ranked = [one for group in comparison.groups for one in group.runs]
    ranked += [one for one in comparison.runs if one.label not in groups]
    looks = {look.label: look for look, _ in _looks(comparison)}

    def column(title: str, value: Callable[[Compared], object], form: str | None = "0,0") -> Column:
        return Column(title, [value(one) for one in ranked], form)

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
        *(
            column(task.metric.title, partial(_value, task=task), "0,0.00")
            for task in _measured(ranked)
        ),
        column("Top-1, %", _end, "0.00"),
        column("To the best", behind, "0.00"),
        column("Beyond noise", beyond, None),
        *(column(f"After {name}, %", partial(_after, name=name), "0.00") for name in names),
        *(
            column(
                f"{target:g} % in{' at most' if at_once else ''}, {unit.name}",
                partial(_reached, target=target, unit=unit, at_once=at_once),
                "0,0.00",
            )
            for target in comparison.targets
            for at_once in (False, True)
        ),
        column("Steps", lambda one: one.run.num_steps),
        column("Epochs", lambda one: one.run.plan.epoch(one.run.num_steps), "0,0.0"),
        column("Samples/s", lambda one: images_per_second(one.run)),
        column(f"Run time, {unit.name}", lambda one: _whole(one) / unit.seconds, "0,0.00"),
        column("Batch", lambda one: one.run.plan.global_batch),
        column("Workers", lambda one: one.run.plan.workers),
        column("Status", lambda one: one.status, None),
        column("Backend", lambda one: one.run.summary and one.run.summary.backend, None),
        column(
            "torch", lambda one: one.run.summary and one.run.summary.versions.get("torch"), None
        ),
        column("Begun", lambda one: f"{one.run.starts[0].time:%Y-%m-%d %H:%M}", None),
    ]
    return new_table(columns, colours=[looks[one.label].colour for one in ranked])


def _end(one: Compared) -> float | None:
    return None if one.run.result is None else 100 * one.run.result.top1


def _measured(runs: Sequence[Compared]) -> list[Task]:
    """Return the tasks that another metric than accuracy judges."""
    return list(dict.fromkeys(one.run.task for one in runs if not one.run.task.by_accuracy))


def _value(one: Compared, *, task: Task) -> float | None:
    if one.run.result is None or one.run.task is not task:
        return None
    return task.metric.shown(one.run.result)


def _reached(one: Compared, *, target: float, unit: Unit, at_once: bool) -> float:
    """Return the time to a target; NaN where the other column has it, of bounds or of times."""
    if one.reached_at_once(target) != at_once:
        return math.nan
    return one.seconds_to(target) / unit.seconds


def _after(one: Compared, *, name: str) -> float | None:
    """Return top-1 in percent after a stage, also one that was discarded; None while it lasts."""
    return next((100 * stage.after.top1 for stage in one.ended if stage.name == name), None)


def _whole(one: Compared) -> float:
    return one.run.summary.seconds if one.run.summary else math.nan


def _differences(comparison: Comparison) -> "Table":
    """Return a row for each setting that differs, and a column for each run."""
    rows = comparison.differences
    columns = [Column("Setting", list(rows))]
    for place, one in enumerate(comparison.runs):
        columns.append(Column(one.label, [values[place] for values in rows.values()]))
    return new_table(columns)


class Drawn(NamedTuple):
    """A run, how its lines look, and what they are drawn from."""

    look: Series
    one: Compared
    evaluated: "Source"
    updates: "Source"


def _draw(comparison: Comparison, unit: Unit) -> list[Drawn]:
    """Return what all charts share."""
    return [
        Drawn(
            look,
            one,
            new_source(_columns(one.evaluated.thinned(), unit)),
            new_source(_columns(one.updates, unit)),
        )
        for look, one in _looks(comparison)
    ]


def _looks(comparison: Comparison) -> Iterator[tuple[Series, Compared]]:
    """Yield every run and how it looks."""
    for place, one in enumerate(comparison.runs):
        yield series(place, one.label, title=printable(str(one.run.path.resolve()))), one


def _charts(comparison: Comparison, unit: Unit) -> "Iterator[tuple[str, Chart]]":
    """Yield those charts by name of which any run has something."""
    runs, drawn = comparison.runs, _draw(comparison, unit)
    evaluated = any(one.evaluated.stages for one in runs)
    for task in _measured(runs) if evaluated else ():
        yield task.metric.key, _draw_metric(drawn, unit, task)
    if evaluated:
        yield "accuracy", _draw_accuracy(drawn, unit)
    if evaluated or any(one.updates.stages for one in runs):
        yield "loss", _draw_loss(drawn, unit)
    if any(one.updates.stages for one in runs):
        yield "throughput", _draw_throughput(drawn, unit)
    if any(np.isfinite(one.evaluated.seconds).any() for one in runs):
        yield "times", _draw_times(drawn, unit)
    if any(one.ended[1:] for one in runs):
        yield "stages", _draw_stages(drawn)


def _draw_accuracy(drawn: list[Drawn], unit: Unit) -> "Chart":
    """Draw top-1 of every evaluation."""
    chart = new_chart(x="Steps", y="Top-1, %", height=400)
    for look, _, evaluated, _ in drawn:
        add_line(chart, look, evaluated, "step", "top1", moves=True)
    marks = [
        add_points(chart, look, evaluated, "step", "top1", moves=True)
        for look, _, evaluated, _ in drawn
    ]
    rows = [("top-1", "@top1{0.00} %"), ("loss", "@loss{0.0000}"), ("stage", "@stage")]
    add_hover(chart, marks, [*rows, *_rows(unit)])
    return chart


def _draw_metric(drawn: list[Drawn], unit: Unit, task: Task) -> "Chart":
    """Draw the metric of a task at every evaluation of its runs."""
    metric = task.metric
    chart = new_chart(x="Steps", y=metric.title, height=400)
    marks = []
    for look, one, evaluated, _ in drawn:
        if one.run.task is task:
            add_line(chart, look, evaluated, "step", metric.key, moves=True)
            marks.append(add_points(chart, look, evaluated, "step", metric.key, moves=True))
    rows = [(metric.name, f"@{metric.key}{{0.00}}"), ("loss", "@loss{0.0000}"), ("stage", "@stage")]
    add_hover(chart, marks, [*rows, *_rows(unit)])
    return chart


def _draw_loss(drawn: list[Drawn], unit: Unit) -> "Chart":
    """Draw the running median of the training loss, and the loss of every evaluation."""
    courses = [course for each in drawn for course in (each.one.updates, each.one.evaluated)]
    log = needs_log_scale(np.concatenate([course.values["loss"] for course in courses]))
    chart = new_chart(x="Steps", y="Loss", log="y" if log else "")
    lines, marks = [], []
    for look, _, evaluated, updates in drawn:
        lines.append(add_line(chart, look, updates, "step", "loss", moves=True))
        marks.append(add_points(chart, look, evaluated, "step", "loss", moves=True))
    add_hover(chart, lines, [("training loss", "@loss{0.0000}"), *_rows(unit)])
    add_hover(chart, marks, [("validation loss", "@loss{0.0000}"), *_rows(unit)])
    return chart


def _draw_throughput(drawn: list[Drawn], unit: Unit) -> "Chart":
    """Draw the running median of the training samples per second, from 0 on."""
    chart = new_chart(x="Steps", y="Samples per second", height=280, from_zero=True)
    lines = [
        add_line(chart, look, updates, "step", "rate", moves=True) for look, _, _, updates in drawn
    ]
    add_hover(chart, lines, [("samples/s", "@rate{0,0}"), *_rows(unit)])
    return chart


def _draw_times(drawn: list[Drawn], unit: Unit) -> "Chart":
    """Draw the time to the first evaluation that reached a target, by target."""
    chart = new_chart(x="Top-1 to reach, %", y=f"Time, {unit.name}", from_zero=True)
    marks = []
    for look, one, _, _ in drawn:
        top1 = one.evaluated.values["top1"]
        before = np.maximum.accumulate(np.concatenate(([-np.inf], top1[:-1])))
        records = _columns(one.evaluated.at(np.flatnonzero(top1 > before)).thinned(), unit)
        steps = {"top1": np.repeat(records["top1"], 2)[:-1],
                 "time": np.repeat(records["time"], 2)[1:]}  # fmt: skip
        add_line(chart, look, new_source(steps), "top1", "time")
        marks.append(add_points(chart, look, new_source(records), "top1", "time"))
    *places, time_row = _rows(unit)
    add_hover(chart, marks, [("top-1", "@top1{0.00} %"), time_row, *places])
    return chart


def _draw_stages(drawn: list[Drawn]) -> "Chart":
    """Draw top-1 at the end of every stage; one that was discarded is hollow."""
    names = dict.fromkeys(stage.name for each in drawn for stage in each.one.ended)
    chart = new_chart(x="After the stage", y="Top-1, %", categories=list(names))
    marks = []
    for look, one, _, _ in drawn:
        stages = one.ended
        kept = [stage for stage in stages if stage.kept]
        add_line(chart, look, new_source(_stage_columns(kept)), "stage", "top1")
        marks.append(add_points(chart, look, new_source(_stage_columns(stages)), "stage", "top1"))
    rows = [("stage", "@stage, @kept"), ("top-1", "@top1{0.00} %"), ("change", "@change")]
    add_hover(chart, marks, rows)
    return chart


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


def _rows(unit: Unit) -> list[tuple[str, str]]:
    """Return what a tool tip has of the place in a course."""
    return [
        ("step", "@step{0,0}"),
        ("epoch", "@epoch{0,0.00}"),
        ("samples", "@images{0,0}"),
        ("time", f"@time{{0,0.00}} {unit.name}"),
    ]


def _columns(course: Course, unit: Unit) -> dict[str, Any]:
    """Return a course as the columns of a chart's data."""
    return {
        "step": course.step,
        "epoch": course.epoch,
        "images": course.images,
        "time": course.seconds / unit.seconds,
        "stage": list(course.stages),
        **course.values,
    }

"""Several runs side by side: which one is best and how surely, tables, charts and differences.

Accuracies are compared only where the validation data is the same, and a difference is judged by
the noise of these images, as in the report of one run (`mistakes`).
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from largebatch.errors import (
    CheckpointError,
    LargebatchError,
    RecipeError,
    clip,
    printable,
    shorten,
)
from largebatch.formatting import percent, plural
from largebatch.recipe.loading import parse_recipe
from largebatch.report.course import Course, evaluations_of, needs_log_scale, updates_of
from largebatch.report.mistakes import Change, compare
from largebatch.report.pages import (
    Chart,
    Column,
    Line,
    Page,
    Panel,
    Section,
    Series,
    Table,
    columns_over,
    line_chart,
    series,
)
from largebatch.report.run import (
    FloatArray,
    Run,
    Stage,
    images_per_second,
    read_run,
    short_commit,
)

_TARGETS = (*range(1, 100), 75.9, 99.5, 99.7, 99.9)
"""Accuracies in percent to which time is measured; 75.9 is MLPerf's of ResNet-50."""


_NOISE = (
    "Noise is two standard errors of the difference of two runs on these images: by McNemar's "
    "test if both logs hold every mistake, else as of two independent samples. It does not "
    "include the spread over seeds, and the best of many runs is best by luck, too."
)
_RUNS = (
    "Top-1 is that of the model as the run left it. The time to an accuracy is that of the first "
    "evaluation that reached it; the run time has starting, saving and repeated updates, too."
)
_DIFFERENCES = (
    "The settings of recipe.yaml that differ, and in brackets what the runs were made with. A "
    "dash: not known."
)
_SAME = "No setting differs, and the runs were made with the same software and workers."


@dataclass(frozen=True)
class Compared:
    """A run among others."""

    run: Run
    label: str
    """The shortest unique suffix of its folder's path."""

    @property
    def status(self) -> str:
        """How it ended; without a summary it was killed or is running."""
        return self.run.summary.status if self.run.summary else "no summary"

    @cached_property
    def settings(self) -> dict[str, str] | None:
        """The recipe by dotted keys, with its defaults; None if it cannot be read."""
        try:
            recipe = parse_recipe(self.run.recipe or "")
        except RecipeError:
            return None
        return dict(_flatten(recipe.model_dump(mode="json")))

    @cached_property
    def evaluated(self) -> Course:
        """Accuracy and loss on the validation data."""
        return evaluations_of(self.run)

    @cached_property
    def updates(self) -> Course:
        """Training loss and images per second."""
        return updates_of(self.run)

    @property
    def ended(self) -> tuple[Stage, ...]:
        """Its stages that have ended; the last one may still be running."""
        stages = self.run.stages
        if stages and stages[-1].result is None and stages[-1].mistakes is None:
            return stages[:-1]
        return stages

    @property
    def best(self) -> float:
        """The highest top-1 in percent; NaN without an evaluation."""
        return max(self.evaluated.top1, default=math.nan)

    @property
    def top1(self) -> float:
        """Top-1 of the model as the run left it, a fraction of 1."""
        assert self.run.result is not None
        return self.run.result.top1

    def seconds_to(self, target: float) -> float:
        """Return the time to the first evaluation with this top-1 in percent; NaN without one."""
        place = self.evaluated.first_at(target)
        return math.nan if place is None else float(self.evaluated.seconds[place])

    def data(self, *, named: bool) -> tuple[str, ...]:
        """Return a key of its validation data; `named`: with the names of the classes."""
        known, stage = self.settings or {}, self.run.last_stage
        samples = stage.after.samples if stage else self.run.plan.val_samples
        images = f"{samples:,} validation images"
        if "data.held_out.samples" in known:
            images = f"{samples:,} held-out training images, seed {known['data.held_out.seed']}"
        words = [known.get("data.source", ""), known.get("data.classes", "")]
        words[1] += " classes" * bool(words[1])
        names = stage.mistakes.classes if named and stage and stage.mistakes else ()
        return (", ".join(filter(None, [*words, images])), *names)


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of the same validation data."""

    data: str
    runs: tuple[Compared, ...]
    """Runs with a measured accuracy, in descending order of their last accuracy."""

    def points_to_best(self, run: Compared) -> float:
        """Return the difference of top-1 at the end, in percentage points; 0 or less."""
        return 100 * (run.top1 - self.runs[0].top1)

    def change(self, run: Compared) -> Change:
        """Return how `run` ended compared with the best of the group."""
        best, other = self.runs[0].run.last_stage, run.run.last_stage
        assert best is not None
        assert other is not None
        return compare(best.after, other.after, best.mistakes, other.mistakes)


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, in the order in which they were named."""

    runs: tuple[Compared, ...]
    left_out: tuple[str, ...]
    """Why folders were left out; each begins with the path."""

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The runs by validation data; those that were never evaluated are in none."""
        measured = [one for one in self.runs if one.run.result is not None]
        named = all(one.run.last_stage and one.run.last_stage.mistakes for one in measured)
        by_data: dict[tuple[str, ...], list[Compared]] = {}
        for one in measured:
            by_data.setdefault(one.data(named=named), []).append(one)
        return tuple(
            Group(data, tuple(sorted(runs, key=lambda one: one.top1, reverse=True)))
            for (data, *_), runs in by_data.items()
        )

    @cached_property
    def targets(self) -> tuple[float, ...]:
        """Round accuracies in percent that all runs, half of them, and the best one reached."""
        best = sorted(one.best for one in self.runs if not math.isnan(one.best))
        if not best:
            return ()
        reached = (best[0], best[len(best) // 2], best[-1])
        below = [[target for target in _TARGETS if target <= one + 1e-9] for one in reached]
        return tuple(sorted({max(found) for found in below if found}))

    @cached_property
    def differences(self) -> dict[str, tuple[str | None, ...]]:
        """Settings that differ, by key, and the value in each run; then software and workers.

        None where a run has no such key. A recipe or summary that cannot be read has None for all
        of them, and makes none differ.
        """
        known = [one.settings for one in self.runs if one.settings is not None]
        keys = dict.fromkeys(key for settings in known for key in settings)
        rows: dict[str, tuple[str | None, ...]] = {
            key: tuple((one.settings or {}).get(key) for one in self.runs)
            for key in keys
            if len({settings.get(key) for settings in known}) > 1
        }
        machines = [dict(_machine(one.run)) for one in self.runs]
        for name in dict.fromkeys(name for machine in machines for name in machine):
            row = tuple(machine.get(name) for machine in machines)
            pairs = zip(row, self.runs, strict=True)
            if len({fact for fact, one in pairs if fact is not None or one.run.summary}) > 1:
                rows[f"({name})"] = row
        return rows


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Read the runs in these folders; one that is damaged is noted and left out.

    Raises LargebatchError if a folder is given twice, CheckpointError if no run can be read.
    """
    resolved = [path.resolve() for path in folders]
    twice = [path for path, real in zip(folders, resolved, strict=True) if resolved.count(real) > 1]
    if twice:
        raise LargebatchError(f"{twice[0]}: given twice; a comparison takes each run once")
    runs, left_out = [], []
    for path in folders:
        try:
            runs.append(read_run(path))
        except (CheckpointError, OSError) as error:
            reason = f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            left_out.append(printable(reason))
    if not runs:
        raise CheckpointError(f"no run can be read: {left_out[0]}")
    compared = map(Compared, runs, _labels([run.path for run in runs]))
    return Comparison(tuple(compared), tuple(left_out))


def _labels(paths: Sequence[Path]) -> list[str]:
    """Return for each path its shortest unique suffix.

    >>> _labels([Path("/a/rate-4/run"), Path("/a/rate-8/run"), Path("/a/best")])
    ['rate-4/run', 'rate-8/run', 'best']
    """
    parts = [path.resolve().parts for path in paths]
    labels = []
    for own in parts:
        lengths = range(1, len(own) + 1)
        alone = (n for n in lengths if sum(other[-n:] == own[-n:] for other in parts) == 1)
        labels.append(printable("/".join(own[-next(alone, 1) :])))
    return labels


def _flatten(tree: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every value by its dotted key; a list is one value.

    >>> dict(_flatten({"batch": {"global_batch": 96}, "std": [1, 2], "polish": None}))
    {'batch.global_batch': '96', 'std': '[1, 2]', 'polish': 'null'}
    """
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{key}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"{key}{name}", clip(printable(text), 200)


def _machine(run: Run) -> Iterator[tuple[str, str]]:
    yield "workers", run.workers
    yield "device batch", f"{run.plan.device_batch:,}"
    if run.summary is not None:
        yield "backend", run.summary.backend
        if run.summary.commit is not None:
            yield "commit", short_commit(run.summary.commit)
        yield from run.summary.versions.items()


def describe(comparison: Comparison) -> Iterator[str]:
    """Yield the sentences that the page begins with: which run is best by what, and how surely."""
    groups = comparison.groups
    if not groups:
        yield "Accuracy was measured in none of these runs."
    if len(groups) > 1:
        data = "; ".join(f"{group.data} ({_names(group.runs)})" for group in groups)
        yield (
            f"These runs were measured on {len(groups)} sets of validation images, so their "
            f"accuracies cannot be compared: {data}."
        )
    for group in groups:
        if len(groups) == 1 or len(group.runs) > 1:
            yield _best(group)


def _best(group: Group) -> str:
    best, *others = group.runs
    assert best.run.result is not None
    top1, samples = percent(best.top1), best.run.result.samples
    if not others:
        return f"{best.label} ends with top-1 of {top1} %; no other run was evaluated."
    second = others[0]
    if group.points_to_best(second) == 0:
        return f"{best.label} and {second.label} end with the same top-1, {top1} %."
    close = [one for one in others if not group.change(one).beyond_noise]
    gap = f"{-group.points_to_best(second):.2f} points above {second.label}"
    begin = f"{best.label} ends with the highest top-1, {top1} %, {gap}"
    noise = f"the noise of {samples:,} validation images"
    if not close:
        return f"{begin}: more than {noise}."
    return f"{begin}. Its lead over {_names(close)} is within {noise}."


def _names(runs: Sequence[Compared]) -> str:
    return shorten([one.label for one in runs], most=4)


def make_comparison_page(comparison: Comparison) -> Page:
    """Return the page of a comparison."""
    looks = {
        one.label: series(place, one.label, title=printable(str(one.run.path.resolve())))
        for place, one in enumerate(comparison.runs)
    }
    ends = Counter(one.status for one in comparison.runs)
    words = [", ".join(f"{count} {status}" for status, count in ends.items())]
    words += [group.data for group in comparison.groups[:1] if len(comparison.groups) == 1]
    rows = comparison.differences
    differing = [
        Column("Setting", list(rows)),
        *(
            Column(one.label, [values[place] for values in rows.values()])
            for place, one in enumerate(comparison.runs)
        ),
    ]
    return Page(
        title=f"{plural(len(comparison.runs), 'run')} compared",
        subtitle=" · ".join(words),
        findings=list(describe(comparison)),
        is_sound=len(comparison.groups) == 1,
        note=_NOISE if any(len(group.runs) > 1 for group in comparison.groups) else "",
        legend=("Runs", list(looks.values())),
        sections=[
            Section(title="Left out", notes=comparison.left_out),
            Section(title="Runs", parts=[_table(comparison, looks)], notes=[_RUNS]),
            *(Section(title=one.title, parts=[one]) for one in _charts(comparison, looks)),
            Section(
                title="What differs",
                parts=[Table(name="differences", columns=differing)] if rows else [],
                notes=[_DIFFERENCES if rows else _SAME],
            ),
        ],
        source=f"{len(comparison.runs)} run folders",
    )


def _table(comparison: Comparison, looks: dict[str, Series]) -> Table:
    groups = {one.label: group for group in comparison.groups for one in group.runs}
    ranked = [one for group in comparison.groups for one in group.runs]
    ranked += [one for one in comparison.runs if one.label not in groups]
    column = columns_over(ranked)

    def behind(one: Compared) -> float | None:
        group = groups.get(one.label)
        return None if group is None else group.points_to_best(one)

    def beyond(one: Compared) -> str | None:
        group = groups.get(one.label)
        if group is None or one is group.runs[0]:
            return None
        return "yes" if group.change(one).beyond_noise else "no"

    def after(one: Compared, name: str) -> float | None:
        """Return top-1 after a stage, kept or discarded."""
        return next((100 * stage.after.top1 for stage in one.ended if stage.name == name), None)

    names = dict.fromkeys(stage.name for one in ranked for stage in one.ended)
    columns = [
        column("Run", lambda one: one.label, None),
        column("Top-1, %", lambda one: one.run.result and 100 * one.run.result.top1, ".2f"),
        column("To the best", behind, ".2f"),
        column("Beyond noise", beyond, None),
        *(column(f"After {name}, %", partial(after, name=name), ".2f") for name in names),
        *(
            Column(f"{target:g} % in, min", [one.seconds_to(target) / 60 for one in ranked], ",.2f")
            for target in comparison.targets
        ),
        column("Steps", lambda one: one.run.num_steps, ",d"),
        column("Epochs", lambda one: one.run.plan.epoch(one.run.num_steps), ",.1f"),
        column("Images/s", lambda one: images_per_second(one.run), ",.0f"),
        column(
            "Run time, min", lambda one: one.run.summary and one.run.summary.seconds / 60, ",.2f"
        ),
        column("Batch", lambda one: one.run.plan.global_batch, ",d"),
        column("Workers", lambda one: one.run.workers.rpartition(" ")[0], None),
        column("Status", lambda one: one.status, None),
        column("Started", lambda one: f"{one.run.starts[0].time:%Y-%m-%d %H:%M}", None),
    ]
    return Table(name="runs", columns=columns, series=[looks[one.label] for one in ranked])


def _charts(comparison: Comparison, looks: dict[str, Series]) -> Iterator[Chart]:
    axes = "Epoch", "Time, min"
    accuracy: dict[str, list[Line]] = {axis: [] for axis in axes}
    loss: dict[str, list[Line]] = {axis: [] for axis in axes}
    values: list[FloatArray] = []
    for one in comparison.runs:
        evaluated, updates, look = one.evaluated, one.updates, looks[one.label]
        values += [updates.loss, evaluated.loss]
        columns = (
            (evaluated.epoch, updates.epoch),
            (evaluated.seconds / 60, updates.seconds / 60),
        )
        for axis, both in zip(axes, columns, strict=True):
            x, x_updates = (column.tolist() for column in both)
            accuracy[axis].append(Line(series=look, x=x, y=evaluated.top1.tolist()))
            loss[axis] += [
                Line(series=look, x=x_updates, y=updates.loss.tolist(), points=False),
                Line(series=look, x=x, y=evaluated.loss.tolist(), line=False),
            ]
    if any(one.evaluated.stages for one in comparison.runs):
        panels = [Panel(lines=accuracy[axis], x=axis, y="Top-1, %") for axis in axes]
        yield line_chart(
            "accuracy",
            *panels,
            title="Accuracy",
            caption="Top-1 on the validation images, at every evaluation of what the run kept. "
            "Time is that of updates, evaluations and stages without updates, each counted once.",
        )
    if any(map(len, values)):
        log: Literal["", "y"] = "y" if needs_log_scale(np.concatenate(values)) else ""
        panels = [Panel(lines=loss[axis], x=axis, y="Loss", log=log) for axis in axes]
        yield line_chart(
            "loss",
            *panels,
            title="Loss",
            caption="The running median of the training loss (lines), and the loss on the "
            "validation images (points). Training losses compare only if augmentation and label "
            "smoothing are the same.",
        )

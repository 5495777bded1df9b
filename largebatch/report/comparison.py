"""Several runs side by side: which one is best and how surely, tables, charts and differences.

Accuracies are compared only where the validation data is the same, and a difference is judged by
the noise of these images, as in the report of one run.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np

from largebatch.errors import CheckpointError, LargebatchError, clip, printable, shorten
from largebatch.formatting import dotted, plural
from largebatch.report.course import RunCourse, evaluations_of, needs_log_scale, updates_of
from largebatch.report.pages import (
    Chart,
    Column,
    Line,
    Page,
    PageSection,
    Panel,
    Series,
    Table,
    columns_over,
    line_chart,
    series,
)
from largebatch.report.run import (
    EvaluatedStage,
    Run,
    change_from,
    images_per_second,
    read_run,
    short_commit,
)
from largebatch.report.seeds import Interval, Lead, interval, leads

_LONGEST = 60  # characters of settings that name a row

_TARGETS = (*range(1, 100), 75.9, 99.5, 99.7, 99.9)
"""Accuracies in percent to which time is measured; 75.9 is MLPerf's of ResNet-50."""

_NOISE = (
    "Noise is two standard errors of the difference of two runs on these images: by McNemar's "
    "test if both logs hold every mistake, else as of two independent samples. It does not "
    "include the spread over seeds, and the best of many runs is best by luck, too."
)
_SEEDS = (
    "Means are over seeds, with 95 % intervals by Student's t; several differences hold together "
    "(Bonferroni). Differences are of pairs of equal seeds where two settings share two or more. "
    "The best of several seeds is best by luck, so no single run is compared. Runs that did not "
    "finish are in no mean."
)
_RUNS = (
    "Top-1 is that of the model as the run left it. The time to an accuracy is that of the first "
    "evaluation that reached it; the run time has starting, saving and repeated updates, too."
)
_SAME = "No setting differs, and the runs were made with the same software and workers."


@dataclass(frozen=True)
class Compared:
    """A run among others."""

    run: Run
    label: str
    """The path of its folder, below the one that holds all of them."""

    @property
    def status(self) -> str:
        """How it ended; without a summary it was killed or is running."""
        return self.run.summary.status if self.run.summary else "no summary"

    @cached_property
    def settings(self) -> dict[str, str] | None:
        """The recipe by dotted keys, with its defaults; None if it cannot be read."""
        if self.run.parsed is None:
            return None
        return {
            key: clip(printable(value if isinstance(value, str) else json.dumps(value)), 200)
            for key, value in dotted(self.run.parsed.model_dump(mode="json"))
        }

    @property
    def software(self) -> dict[str, str] | None:
        """What the run was made with; None without a summary."""
        summary = self.run.summary
        if summary is None:
            return None
        software = {"backend": summary.backend, "commit": short_commit(summary.commit)}
        return {f"({name})": value for name, value in (software | summary.versions).items()}

    @cached_property
    def evaluated(self) -> RunCourse:
        """Accuracy and loss on the validation data."""
        return evaluations_of(self.run)

    @property
    def ended(self) -> tuple[EvaluatedStage, ...]:
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
    def last(self) -> EvaluatedStage:
        """The stage that left the model as it is, of a run whose accuracy was measured."""
        assert self.run.last_stage is not None
        return self.run.last_stage

    @property
    def top1(self) -> float:
        """Top-1 of the model as the run left it, in percent."""
        return 100 * self.last.after.top1

    @property
    def seed(self) -> int | None:
        """The recipe's seed; None if it cannot be read."""
        return self.run.parsed.seed if self.run.parsed else None

    @property
    def setting(self) -> str:
        """What is equal in runs that differ only in their seed; the label without a recipe."""
        recipe = self.run.parsed
        return recipe.mathematics.model_dump_json(exclude={"seed"}) if recipe else self.label

    def seconds_to(self, target: float) -> float:
        """Return the time to the first evaluation with this top-1 in percent; NaN without one."""
        reached = self.evaluated.seconds[self.evaluated.top1 >= target - 1e-9]  # a part of 1 x 100
        return float(reached[0]) if reached.size else math.nan

    def data(self) -> str:
        """Return what its validation data is, as far as recipe and log have it."""
        known = self.settings or {}
        images = f"{self.last.after.samples:,} validation images"
        if "data.held_out.samples" in known:
            images = images.replace("validation", "held-out training")
            images += f", seed {known['data.held_out.seed']}"
        if not known:
            return images
        return f"{known['data.source']}, {known['data.classes']} classes, {images}"


@dataclass(frozen=True)
class SeedGroup:
    """Runs on the same validation data that differ in their seed, or in nothing."""

    label: str
    runs: tuple[Compared, ...]

    @cached_property
    def by_seed(self) -> dict[int, float]:
        """Top-1 in percent of the runs that finished; the mean of runs with the same seed."""
        top1s: dict[int, list[float]] = {}
        for place, compared in enumerate(self.runs):
            if compared.run.finished:
                # Runs without a readable seed are never pairs of each other.
                seed = -1 - place if compared.seed is None else compared.seed
                top1s.setdefault(seed, []).append(compared.top1)
        return {seed: fmean(values) for seed, values in sorted(top1s.items())}

    @property
    def mean(self) -> Interval | None:
        """Mean of top-1 in percent; None if no run finished."""
        return interval(self.by_seed.values()) if self.by_seed else None

    @property
    def seeds(self) -> str:
        """Number of seeds in the mean."""
        return plural(len(self.by_seed), "seed")


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, in the order in which they were named."""

    runs: tuple[Compared, ...]
    left_out: tuple[str, ...]
    """Why folders were left out; each begins with the path."""

    @cached_property
    def groups(self) -> tuple[tuple[Compared, ...], ...]:
        """The runs of the same validation data, that of the highest top-1 at the end first.

        Runs that were never evaluated are in none.
        """
        measured = [compared for compared in self.runs if compared.run.last_stage]
        # Names of classes tell data sets apart that have equal sizes, where all logs have them.
        named = all(compared.last.mistakes for compared in measured)
        by_data: dict[tuple[str, ...], list[Compared]] = {}
        for compared in measured:
            classes = compared.last.mistakes.classes if named and compared.last.mistakes else ()
            by_data.setdefault((compared.data(), *classes), []).append(compared)
        return tuple(
            tuple(sorted(runs, key=attrgetter("top1"), reverse=True)) for runs in by_data.values()
        )

    def settings_of(self, group: tuple[Compared, ...]) -> tuple[SeedGroup, ...]:
        """Return the settings of runs of the same data, that of the highest mean first.

        Empty if no two runs differ in their seed alone: then runs are compared one by one.
        """
        alike: dict[str, list[Compared]] = {}
        for compared in group:
            alike.setdefault(compared.setting, []).append(compared)
        settings = [
            SeedGroup(self._label(runs, others=len(alike) > 1), tuple(runs))
            for runs in alike.values()
        ]
        if all(len(setting.by_seed) < 2 for setting in settings):
            return ()
        means = {setting.label: setting.mean for setting in settings}
        best_first = sorted(
            settings,
            key=lambda seed_group: -math.inf if seed_group.mean is None else seed_group.mean.mean,
            reverse=True,
        )
        return tuple(best_first) if len(means) == len(settings) else ()

    def _label(self, runs: Sequence[Compared], *, others: bool) -> str:
        """Return the settings that differ, if few, else the common start of the folders."""
        values = runs[0].settings or {}
        keys = [key for key in self.differences if key in values and key not in {"seed", "name"}]
        text = ", ".join(f"{key}={values[key]}" for key in keys)
        if others and keys and len(text) <= _LONGEST:
            return text
        labels = [compared.label for compared in runs]
        if len(runs) == 1:
            return labels[0]
        alike = takewhile(lambda letters: len({*letters}) == 1, zip(*labels, strict=False))
        common = "".join(letters[0] for letters in alike).rstrip("-_/ .=")
        return common or shorten(labels, most=2)

    @cached_property
    def targets(self) -> tuple[float, ...]:
        """Round accuracies in percent that all runs, half of them, and the best one reached."""
        best = sorted(compared.best for compared in self.runs if not math.isnan(compared.best))
        if not best:
            return ()
        reached = (best[0], best[len(best) // 2], best[-1])
        below = [
            [target for target in _TARGETS if target <= accuracy + 1e-9] for accuracy in reached
        ]
        return tuple(sorted({max(targets) for targets in below if targets}))

    @cached_property
    def differences(self) -> dict[str, tuple[str | None, ...]]:
        """Settings that differ, by key, and the value in each run; then workers and software.

        None where a run has no such key. A recipe or summary that cannot be read has None for all
        of them, and makes none differ.
        """
        plans = [
            {"(device batch)": f"{compared.run.plan.device_batch:,}"} for compared in self.runs
        ]
        return {
            **_differing([compared.settings for compared in self.runs]),
            **_differing([{"(workers)": compared.run.workers} for compared in self.runs]),
            **_differing(plans),
            **_differing([compared.software for compared in self.runs]),
        }


def _differing(facts: Sequence[dict[str, str] | None]) -> dict[str, tuple[str | None, ...]]:
    known = [known_facts for known_facts in facts if known_facts is not None]
    return {
        key: tuple(known_facts.get(key) if known_facts else None for known_facts in facts)
        for key in dict.fromkeys(key for known_facts in known for key in known_facts)
        if len({known_facts.get(key) for known_facts in known}) > 1
    }


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Read the runs in these folders; one that is damaged is noted and left out.

    Raises LargebatchError if a folder is given twice, CheckpointError if no run can be read.
    """
    # Links and relative paths may name one folder twice, and a run would be compared with itself.
    resolved = [path.resolve() for path in folders]
    twice = [path for path, real in zip(folders, resolved, strict=True) if resolved.count(real) > 1]
    if twice:
        raise LargebatchError(f"{twice[0]}: given twice; a comparison takes each run once")
    runs = []
    left_out = []
    for path in folders:
        try:
            runs.append(read_run(path))
        except (CheckpointError, OSError) as error:
            reason = f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            left_out.append(printable(reason))
    if not runs:
        raise CheckpointError(f"no run can be read: {left_out[0]}")
    paths = [run.path.resolve() for run in runs]
    # Labels are as short as they can be: paths below the folder that holds all runs.
    above = os.path.commonpath([path.parent for path in paths])
    labels = [printable(str(path.relative_to(above))) for path in paths]
    return Comparison(tuple(map(Compared, runs, labels)), tuple(left_out))


def describe(comparison: Comparison) -> Iterator[str]:
    """Yield the sentences that the page begins with: which run is best by what, and how surely."""
    groups = comparison.groups
    if not groups:
        yield "Accuracy was measured in none of these runs."
    if len(groups) > 1:
        data = "; ".join(f"{runs[0].data()} ({_names(runs)})" for runs in groups)
        yield (
            f"These runs were measured on {len(groups)} sets of validation images, so their "
            f"accuracies cannot be compared: {data}."
        )
    for runs in groups:
        settings = comparison.settings_of(runs)
        if settings:
            yield from _describe_settings(settings)
        elif len(groups) == 1 or len(runs) > 1:
            yield _best(*runs)


def _describe_settings(settings: Sequence[SeedGroup]) -> Iterator[str]:
    for setting in settings:
        unfinished = sum(not compared.run.finished for compared in setting.runs)
        left_out = f"; {plural(unfinished, 'run')} did not finish" if unfinished else ""
        mean = setting.mean
        if mean is None:
            yield f"{setting.label}: no run finished."
            continue
        values = setting.by_seed.values()
        spread = ""
        if mean.number > 1:
            spread = f" ({mean.low:.2f} to {mean.high:.2f}), the runs {min(values):.2f} to "
            spread += f"{max(values):.2f} %"
        over = f"mean top-1 {mean.mean:.2f} % over {setting.seeds}"
        yield f"{setting.label}: {over}{spread}{left_out}."
    best, *others = [setting for setting in settings if setting.mean is not None]
    if not others:
        yield "These runs differ only in their seeds, so none is better than another but by chance."
        return
    lead, *_ = every_lead = _leads(settings)
    assert lead.gap is not None
    close = [other for other, lead in zip(others, every_lead, strict=True) if not lead.is_sure]
    pairs = len(best.by_seed.keys() & others[0].by_seed.keys())
    described = f", {pairs} pairs of equal seeds" if pairs > 1 else ""
    ends = f" ({lead.gap.low:.2f} to {lead.gap.high:.2f}{described})" if lead.gap.number > 1 else ""
    begin = f"{best.label} has the highest mean, {lead.gap.mean:.2f} points{ends} above {lead.over}"
    if not close:
        yield f"{begin}: more than the spread over seeds."
    else:
        names = shorten([f"{other.label} ({other.seeds})" for other in close], most=4)
        yield f"{begin}. Its lead over {names} is within the spread over seeds."


def _leads(groups: Sequence[SeedGroup]) -> list[Lead]:
    """Return the leads of the first setting over the others in which a run has finished."""
    best, *others = [group for group in groups if group.by_seed]
    by_label = {group.label: group.by_seed for group in others}
    return leads(best.by_seed, by_label, unpaired=True)


def _settings_table(settings: Sequence[SeedGroup]) -> Table:
    column = columns_over(settings)
    gaps = {lead.over: lead.gap for lead in _leads(settings)} if settings[0].by_seed else {}

    def to_the_best(setting: SeedGroup) -> Interval | None:
        gap = gaps.get(setting.label)
        return gap and Interval(-gap.mean, -gap.high, -gap.low, gap.number)

    def ends(mean: Interval | None) -> str | None:
        if mean is None or mean.number < 2:
            return None
        return f"{mean.low:.2f} to {mean.high:.2f}"

    differences = [to_the_best(setting) for setting in settings]
    return Table(
        name="settings",
        columns=[
            column("Setting", lambda setting: setting.label, None),
            column("Seeds", lambda setting: len(setting.by_seed), ",d"),
            column(
                "Mean top-1, %", lambda setting: setting.mean.mean if setting.mean else None, ".2f"
            ),
            column("95 % interval", lambda setting: ends(setting.mean), None),
            column("Lowest, %", lambda setting: min(setting.by_seed.values(), default=None), ".2f"),
            column(
                "Highest, %", lambda setting: max(setting.by_seed.values(), default=None), ".2f"
            ),
            Column("To the best", [gap and gap.mean for gap in differences], ".2f"),
            Column("95 % of the difference", [ends(gap) for gap in differences]),
        ],
    )


def _best(best: Compared, *others: Compared) -> str:
    top1 = f"{best.top1:.2f} %"
    if not others:
        return f"{best.label} ends with top-1 of {top1}; no other run was evaluated."
    second = others[0]
    if best.top1 == second.top1:
        return f"{best.label} and {second.label} end with the same top-1, {top1}."
    close = [other for other in others if not change_from(best.last, other.last).beyond_noise]
    gap = f"{best.top1 - second.top1:.2f} points above {second.label}"
    begin = f"{best.label} ends with the highest top-1, {top1}, {gap}"
    noise = f"the noise of {best.last.after.samples:,} validation images"
    if not close:
        return f"{begin}: more than {noise}."
    return f"{begin}. Its lead over {_names(close)} is within {noise}."


def _names(runs: Sequence[Compared]) -> str:
    return shorten([compared.label for compared in runs], most=4)


def make_comparison_page(comparison: Comparison) -> Page:
    """Return the page of a comparison."""
    looks = {
        compared.label: series(
            place, compared.label, title=printable(str(compared.run.path.resolve()))
        )
        for place, compared in enumerate(comparison.runs)
    }
    ends = Counter(compared.status for compared in comparison.runs)
    words = [", ".join(f"{count} {status}" for status, count in ends.items())]
    words += [runs[0].data() for runs in comparison.groups[:1] if len(comparison.groups) == 1]
    rows = comparison.differences
    by_seeds = [*filter(None, map(comparison.settings_of, comparison.groups))]
    note = _SEEDS if by_seeds else _NOISE if any(runs[1:] for runs in comparison.groups) else ""
    differing = [
        Column("Setting", list(rows)),
        *(
            Column(compared.label, [values[place] for values in rows.values()])
            for place, compared in enumerate(comparison.runs)
        ),
    ]
    return Page(
        title=f"{plural(len(comparison.runs), 'run')} compared",
        subtitle=" · ".join(words),
        findings=list(describe(comparison)),
        is_sound=len(comparison.groups) == 1,
        note=note,
        legend=("Runs", list(looks.values())),
        sections=[
            PageSection(title="Left out", notes=comparison.left_out),
            PageSection(title="Means over seeds", parts=[*map(_settings_table, by_seeds)]),
            PageSection(title="Runs", parts=[_table(comparison, looks)], notes=[_RUNS]),
            *(
                PageSection(title=chart.title, parts=[chart])
                for chart in _charts(comparison, looks)
            ),
            PageSection(
                title="What differs",
                parts=[Table(name="differences", columns=differing)] if rows else [],
                notes=[] if rows else [_SAME],
            ),
        ],
        source=f"{len(comparison.runs)} run folders",
    )


def _table(comparison: Comparison, looks: dict[str, Series]) -> Table:
    best = {compared.label: runs[0] for runs in comparison.groups for compared in runs}
    ranked = [compared for runs in comparison.groups for compared in runs]
    ranked += [compared for compared in comparison.runs if compared.label not in best]
    column = columns_over(ranked)
    # The best of several seeds is best by luck: a difference to it would say nothing.
    has_seeds = any(map(comparison.settings_of, comparison.groups))

    def beyond(compared: Compared) -> str | None:
        if best.get(compared.label, compared) is compared:
            return None
        return "yes" if change_from(best[compared.label].last, compared.last).beyond_noise else "no"

    def after(compared: Compared, name: str) -> float | None:
        """Return top-1 after a stage, kept or discarded."""
        return next(
            (100 * stage.after.top1 for stage in compared.ended if stage.name == name), None
        )

    to_the_best = [
        Column(
            "To the best",
            [
                compared.top1 - best[compared.label].top1 if compared.label in best else None
                for compared in ranked
            ],
            ".2f",
        ),
        column("Beyond noise", beyond, None),
    ]
    names = dict.fromkeys(stage.name for compared in ranked for stage in compared.ended)
    columns = [
        column("Run", lambda compared: compared.label, None),
        column(
            "Top-1, %", lambda compared: compared.top1 if compared.label in best else None, ".2f"
        ),
        *([] if has_seeds else to_the_best),
        *(column(f"After {name}, %", partial(after, name=name), ".2f") for name in names),
        *(
            Column(
                f"{target:g} % in, min",
                [compared.seconds_to(target) / 60 for compared in ranked],
                ",.2f",
            )
            for target in comparison.targets
        ),
        *([column("Seed", lambda compared: compared.seed, "d")] if has_seeds else []),
        column("Steps", lambda compared: compared.run.num_steps, ",d"),
        column("Epochs", lambda compared: compared.run.plan.epoch(compared.run.num_steps), ",.1f"),
        column("Images/s", lambda compared: images_per_second(compared.run), ",.0f"),
        column(
            "Run time, min",
            lambda compared: compared.run.summary and compared.run.summary.seconds / 60,
            ",.2f",
        ),
        column("Batch", lambda compared: compared.run.plan.global_batch, ",d"),
        column("Workers", lambda compared: compared.run.workers.rpartition(" ")[0], None),
        column("Status", lambda compared: compared.status, None),
        column("Started", lambda compared: f"{compared.run.starts[0].time:%Y-%m-%d %H:%M}", None),
    ]
    return Table(
        name="runs", columns=columns, series=[looks[compared.label] for compared in ranked]
    )


def _charts(comparison: Comparison, looks: dict[str, Series]) -> Iterator[Chart]:
    shown = [
        (looks[compared.label], compared.evaluated, updates_of(compared.run))
        for compared in comparison.runs
    ]

    all_losses = np.concatenate([curve.loss for _, *curves in shown for curve in curves])
    log: Literal["", "y"] = "y" if needs_log_scale(all_losses) else ""
    accuracy = list[Panel]()
    loss = list[Panel]()
    for axis in ("Epoch", "Time, min"):
        top1s = list[Line]()
        losses = list[Line]()
        for look, evaluated, updates in shown:
            x, x_updates = (
                curve.epoch if axis == "Epoch" else curve.seconds / 60
                for curve in (evaluated, updates)
            )
            top1s.append(Line(series=look, x=x, y=evaluated.top1))
            losses.append(Line(series=look, x=x_updates, y=updates.loss, points=False))
            losses.append(Line(series=look, x=x, y=evaluated.loss, line=False))
        accuracy.append(Panel(lines=top1s, x=axis, y="Top-1, %"))
        loss.append(Panel(lines=losses, x=axis, y="Loss", log=log))
    if comparison.groups:
        yield line_chart(
            "accuracy",
            *accuracy,
            title="Accuracy",
            caption="Top-1 on the validation images, at every evaluation of what the run kept. "
            "Time is that of updates, evaluations and stages without updates, each counted once.",
        )
    if all_losses.size:
        yield line_chart(
            "loss",
            *loss,
            title="Loss",
            caption="The running median of the training loss (lines), and the loss on the "
            "validation images (points). Training losses compare only if augmentation and label "
            "smoothing are the same.",
        )

"""Output of a study: a line after every run, and a table at the end."""

import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta

from largebatch.errors import printable
from largebatch.formatting import plural
from largebatch.measure.estimate import estimate
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.studies.metrics import ENOUGH_SEEDS, costs, interval
from largebatch.studies.queue.cells import Values
from largebatch.studies.queue.database import Claim
from largebatch.studies.queue.phases import Bench, Phase, Progress, seed_slots, trial_updates
from largebatch.studies.queue.results import Result, edges
from largebatch.studies.queue.study import SCALES, Study
from largebatch.studies.queue.trial import Result as Record
from largebatch.studies.settings.settings import Findings, Measured, describe


def print_run(progress: Progress, phase: Phase, claim: Claim, result: Record) -> None:
    """Print the result of a run, how many are done, and the time left."""
    ended = f"top-1 {result['top1']:.2%}"
    if "diverged" in result:
        ended = "diverged"
    elif "pruned_after" in result:
        ended += f", stopped after {result['pruned_after']:,} updates"
    left = progress.remaining_seconds()
    rest = "" if left is None else f"; {timedelta(seconds=round(left))} left"
    values = describe_values(result["values"])
    line = (
        f"{progress.num_done}/{progress.bench.num_runs}  {phase.cell.name} {claim.slot}"
        f"{', ' * bool(values)}{values}: {ended}{rest}"
    )
    sys.stdout.write(f"{printable(line)}\n")
    sys.stdout.flush()


def describe_values(values: Values, ends: Mapping[str, str] | None = None) -> str:
    """Format values by the last word of their keys; mark those at an end of the tried range.

    >>> describe_values(
    ...     {"schedule.peak_lr": 0.5, "optimizer.weight_decay": 1e-4},
    ...     {"schedule.peak_lr": "lowest"},
    ... )
    'peak_lr 0.5 (the lowest tried), weight_decay 0.0001'
    """
    marks = {key: f" (the {end} tried)" for key, end in (ends or {}).items()}
    return ", ".join(
        f"{key.rpartition('.')[2]} {value:g}{marks.get(key, '')}" for key, value in values.items()
    )


def describe_study(study: Study, progress: Progress) -> str:
    """Return the table of a finished study: one line for each recipe with each policy."""
    scales = [scale for scale in SCALES if scale != 1] if study.robustness_seeds else []
    rows = [
        [
            *("recipe", "policy", "found", f"top-1 ({study.seeds} seeds)"),
            *(f"updates to {target:.1%}" for target in study.targets),
            *(f"rate x {scale:g}" for scale in scales),
        ]
    ]
    phases = progress.phases()
    for search, seeds in zip(phases[::2], phases[1::2], strict=True):
        done = _results(seeds, scale=1.0)
        diverged = sum(result.diverged is not None for result in done)
        rows.append(
            [
                *(search.cell.configuration, search.cell.variant),
                _found(search, seeds.values or {}),
                describe_mean(_top1(done)) + (f", {diverged} diverged" if diverged else ""),
                *(_updates_to(done, target) for target in study.targets),
                *(
                    f"{statistics.mean(_top1(_results(seeds, scale=scale))):.2%}"
                    for scale in scales
                ),
            ]
        )
    if len(rows) > 2 and study.seeds < ENOUGH_SEEDS:
        return (
            f"{_align(rows)}\nToo few seeds to compare: {ENOUGH_SEEDS} or more tell policies apart."
        )
    return _align(rows)


def _align(rows: Sequence[Sequence[str]]) -> str:
    """Return the lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


_COLUMNS = {
    "train s": ("train_seconds", 1.0, ",.1f"),
    "images/s": ("images_per_second", 1.0, ",.0f"),
    "evaluation s": ("evaluation_seconds", 1.0, ",.2f"),
    "cpu s": ("cpu_seconds", 1.0, ",.1f"),
    "cores": ("cores", 1.0, ".2f"),
    "memory MB": ("peak_memory_bytes", 1e-6, ",.0f"),
    "read MB": ("read_bytes", 1e-6, ",.1f"),
}
"""Printed columns of a setting: a field of its runs or their usage, its unit, its format."""


def describe_settings(findings: Findings) -> str:
    """Return the table of a study of settings, with its findings below."""
    rows = [["recipe", "setting", "top-1", *_COLUMNS]]
    for cell in findings.cells:
        diverged = f", {cell.found.diverged} diverged" if cell.found.diverged else ""
        rows.append(
            [
                *(cell.found.configuration, cell.found.setting),
                describe_mean(_top1(cell.found.seeds)) + diverged,
                *(_shown(cell, *column) for column in _COLUMNS.values()),
            ]
        )
    return "\n".join([_align(rows), *describe(findings)])


def _shown(result: Measured, name: str, factor: float, form: str) -> str:
    """Return the mean of a field over the seeds that have it and did not diverge."""

    def value(run: Result) -> float | None:
        if run.diverged is not None or run.usage is None:
            return None
        of = run if name == "images_per_second" else run.usage
        value: float | None = getattr(of, name)
        return value

    mean = result.found.mean(value)
    return "-" if mean is None else format(factor * mean.mean, form)


def _results(seeds: Phase, *, scale: float) -> list[Result]:
    """Return the results of the seeds at a multiple of the rate."""
    return [result for result in seeds.results().values() if result.scale == scale]


def _top1(results: Sequence[Result]) -> list[float]:
    return [result.top1 for result in results]


def describe_mean(values: Sequence[float]) -> str:
    """Format the mean of accuracies, with Student's interval if there are enough.

    >>> describe_mean([0.90, 0.91, 0.92]), describe_mean([0.90, 0.92])
    ('91.00 % +- 2.48', '91.00 %')
    """
    found = interval(values)
    level = "" if found.reach is None else f" +- {100 * found.reach:.2f}"
    return f"{100 * found.mean:.2f} %{level}"


def _found(search: Phase, values: Values) -> str:
    """Format the best values; mark those at an end of the tried range."""
    tried = [result.values for result in search.results().values()]
    return describe_values(values, edges(values, tried))


def _updates_to(done: Sequence[Result], target: float) -> str:
    """Format the mean updates to an accuracy, and the number of seeds that reached it."""
    spent = costs([result.cost(target) for result in done])
    if spent.updates is None:
        return f"none of {spent.runs}"
    return f"{spent.updates.mean:,.0f} ({spent.reached} of {spent.runs})"


def describe_budget(bench: Bench, *, processes: int) -> str:
    """Describe the number of runs of a study, their updates and an estimate of their time here.

    The estimate is of forward, backward and update alone, from a few samples trained on now;
    trials that are stopped early take less.
    """
    lines, total = [], 0.0
    seeds = len(seed_slots(bench.study))
    for cell in bench.cells:
        searched, trials = "", 0
        if bench.study.search is not None:
            number = bench.study.search.trials
            trials = number * trial_updates(cell)
            around = describe_values({key: cell.own(key) for key in cell.ranges})
            searched = f"{number} trials of {trial_updates(cell):,} updates around {around}, then "
        plan = make_plan(cell.recipe, workers=1)
        lines.append(f"{cell.name}: {searched}{seeds} runs of {plan.updates:,} updates")
        each = estimate(cell.recipe, plan).run_seconds / plan.updates
        total += each * (trials + seeds * plan.updates)
    time = timedelta(seconds=round(total / processes))
    lines.append(
        f"{bench.num_runs} runs; about {time} of forward, backward and update in "
        f"{plural(processes, 'process', 'processes')} on this machine"
    )
    return "\n".join(lines)

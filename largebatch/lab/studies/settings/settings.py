"""What a study of settings has found: recipes with each setting, by every measure.

The relations are those of GTDLBench (arXiv:1810.12210): how far settings lie apart on each data
set, and whether what is best for one is good for another (transfer).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from largebatch.errors import StudyError, shorten
from largebatch.formatting import plural
from largebatch.lab.studies.metrics import ENOUGH_SEEDS, Interval, interval
from largebatch.lab.studies.policies.standings import describe_interval
from largebatch.lab.studies.queue.cells import value_at
from largebatch.lab.studies.queue.results import Result, SettingResults, describe_machines
from largebatch.lab.studies.queue.study import Metric
from largebatch.lab.studies.settings.transfer import (
    Transfer,
    best_setting,
    gap,
    lost,
    transfer_matrix,
)
from largebatch.recipe.loading import differences

_NAMED = 4
"""Names and pairs that a sentence has at most."""

_OUTSIDE = ("workers", "threads", "backend")
"""What a setting may change besides the recipe."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric: what it is called, and how a value of it reads."""

    title: str
    unit: str
    factor: float
    """Factor from recorded values to the unit."""

    digits: int
    best: str
    """What the best setting is called: `the highest top-1`."""

    is_cost: bool = True

    def text(self, mean: Interval) -> str:
        """Return a mean with its unit, and how far its interval reaches."""
        return mean.scaled(self.factor).text(f",.{self.digits}f", f" {self.unit}")


MEASURES: dict[Metric, Measure] = {
    "top1": Measure("Top-1", "%", 100, 2, "the highest top-1", is_cost=False),
    "top5": Measure("Top-5", "%", 100, 2, "the highest top-5", is_cost=False),
    "train_seconds": Measure("Training time", "s", 1, 1, "the shortest training"),
    "evaluation_seconds": Measure("Evaluation time", "s", 1, 2, "the shortest evaluations"),
    "cpu_seconds": Measure("Processor time", "s", 1, 1, "the least processor time"),
    "peak_memory_bytes": Measure("Peak memory", "MB", 1e-6, 0, "the least memory"),
    "read_bytes": Measure("Read from disk", "MB", 1e-6, 1, "the fewest bytes read"),
}


def value_of(run: Result, metric: Metric) -> float:
    """Return a metric of a run; NaN where it was not measured, and the cost where it diverged."""
    if metric == "top1":
        return run.top1
    if metric == "top5":
        return run.top5
    return run.used(metric)


@dataclass(frozen=True)
class Measured:
    """A cell with at least one run: a recipe with a setting."""

    found: SettingResults
    configuration: int
    """Its place among the recipes of the study."""

    def by_seed(self, metric: Metric) -> dict[int, float]:
        """Return the finite values of a metric."""
        every = {run.seed: value_of(run, metric) for run in self.found.seeds}
        return {seed: value for seed, value in every.items() if math.isfinite(value)}

    def mean_of(self, metric: Metric) -> Interval | None:
        """Return the mean of a metric; None where no seed has it."""
        return self.found.mean(lambda run: value_of(run, metric))

    @cached_property
    def tree(self) -> dict[str, Any]:
        """Its recipe as JSON."""
        return self.found.recipe.model_dump(mode="json")

    def at(self, key: str) -> Any:  # noqa: ANN401 -- any value of a recipe
        """Return what is set at a dotted key of the recipe, or outside of it."""
        if key in _OUTSIDE:
            return getattr(self.found, key)
        return value_at(self.tree, key)


@dataclass(frozen=True)
class Findings:
    """All cells of a page, by recipe and in the order of the study's settings."""

    study: str
    cells: tuple[Measured, ...]
    metrics: tuple[Metric, ...]
    waiting: tuple[str, ...] = ()
    """Recipes with settings that have not all their runs."""

    trials: tuple[Result, ...] = ()
    """Cells of all searches."""

    @cached_property
    def recipes(self) -> tuple[str, ...]:
        """The names of the recipes."""
        return tuple(dict.fromkeys(one.found.configuration for one in self.cells))

    @cached_property
    def settings(self) -> tuple[str, ...]:
        """The names of the settings."""
        return tuple(dict.fromkeys(one.found.setting for one in self.cells))

    @cached_property
    def all_keys(self) -> tuple[str, ...]:
        """The keys in which settings differ: of the recipe, and workers, threads and backend."""
        keys: dict[str, None] = {}
        for place in range(len(self.recipes)):
            first, *others = self.of(place)
            for one in others:
                keys |= dict.fromkeys(key for key, _, _ in differences(first.tree, one.tree))
            keys |= dict.fromkeys(
                key for key in _OUTSIDE if any(one.at(key) != first.at(key) for one in others)
            )
        return tuple(keys)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Keys whose values are neither sections nor lists."""
        return tuple(
            key for key in self.all_keys if not any(_is_whole(one.at(key)) for one in self.cells)
        )

    @cached_property
    def numeric_keys(self) -> tuple[str, ...]:
        """Keys with numbers above 0 in all cells, which are drawn in proportion."""
        return tuple(
            key for key in self.keys if all(_is_positive(one.at(key)) for one in self.cells)
        )

    @property
    def has_enough_seeds(self) -> bool:
        """True if all cells have the seeds to be compared, or there is one setting alone."""
        few = min(len(one.found.seeds) for one in self.cells) < ENOUGH_SEEDS
        return len(self.settings) < 2 or not few

    def of(self, place: int) -> list[Measured]:
        """Return the cells of a recipe."""
        return [one for one in self.cells if one.configuration == place]

    def values(self, place: int, metric: Metric) -> dict[str, dict[int, float]]:
        """Return a metric of a recipe by setting and seed, of the seeds that all settings have run.

        Else a setting that a study under way has run with more seeds would win by that alone.
        """
        cells = self.of(place)
        run = set.intersection(*({one.seed for one in cell.found.seeds} for cell in cells))
        return {
            one.found.setting: {
                seed: value for seed, value in one.by_seed(metric).items() if seed in run
            }
            for one in cells
        }

    def matrix(self, metric: Metric) -> list[list[Transfer]]:
        """Return the transfer matrix of a metric."""
        values = {name: self.values(place, metric) for place, name in enumerate(self.recipes)}
        return transfer_matrix(values, higher=not MEASURES[metric].is_cost)


def _is_whole(value: object) -> bool:
    return isinstance(value, dict | list)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def find(found: Sequence[SettingResults], metrics: Sequence[Metric]) -> Findings:
    """Return what the cells of one study have found; those without a run are left out.

    Raises StudyError where none has one.
    """
    some = [one for one in found if one.seeds]
    if not some:
        raise StudyError("the database holds no run that has ended: there is nothing to show yet")
    recipes = list(dict.fromkeys(one.configuration for one in some))
    cells = [Measured(one, recipes.index(one.configuration)) for one in some]
    cells.sort(key=lambda one: one.configuration)
    waiting = [f"{one.configuration} with {one.setting}" for one in found if not one.finished]
    trials = tuple(trial for one in found for trial in one.search)
    return Findings(some[0].study, tuple(cells), tuple(metrics), tuple(waiting), trials)


def describe(findings: Findings) -> Iterator[str]:
    """Yield what a study has found, a sentence each."""
    for place, name in enumerate(findings.recipes):
        times = findings.values(place, "train_seconds")
        yield f"{name}: {_spread(findings.of(place), times)}"
    if len(findings.recipes) > 1 and len(findings.settings) > 1:
        for metric in findings.metrics:
            yield from _transfers(findings, metric)
    yield from _circumstances(findings)


def _spread(cells: Sequence[Measured], times: Mapping[str, Mapping[int, float]]) -> str:
    """Return how far the settings of a recipe lie apart, and which one trains the fastest."""
    ranked = [(one, top1) for one in cells if (top1 := one.mean_of("top1")) is not None]
    ranked.sort(key=lambda each: each[1].mean)
    (worst, low), (best, high) = ranked[0], ranked[-1]
    if worst is best:
        return f"top-1 {describe_interval(high)} with {best.found.setting}, the only setting."
    spread = 100 * (high.mean - low.mean)
    return (
        f"top-1 from {100 * low.mean:.2f} % ({worst.found.setting}) to {100 * high.mean:.2f} % "
        f"({best.found.setting}), a spread of {spread:.2f} points over {len(ranked)} settings; "
        + _fastest(cells, times, high)
    )


def _fastest(
    cells: Sequence[Measured], times: Mapping[str, Mapping[int, float]], best: Interval
) -> str:
    name = best_setting(times, higher=False)
    if name is None:
        return "training was not timed."
    one = next(each for each in cells if each.found.setting == name)
    seconds, top1 = interval(times[name].values()), one.mean_of("top1")
    assert top1 is not None
    behind = 100 * (best.mean - top1.mean)
    level = "which is the highest" if behind == 0 else f"{behind:.2f} points below the highest"
    close = _as_fast(times, name)
    noise = f" (within the noise of it: {shorten(close, most=_NAMED)})" if close else ""
    return (
        f"{name} trains in the shortest time, {seconds.mean:,.1f} s{noise}, with "
        f"{100 * top1.mean:.2f} %, {level}."
    )


def _as_fast(times: Mapping[str, Mapping[int, float]], fastest: str) -> list[str]:
    """Return the other settings whose times, by pairs of seeds, are not surely longer."""
    own = times[fastest]
    others = {name: found for name, found in times.items() if found.keys() == own.keys()}
    del others[fastest]
    gaps = {
        name: gap(each, own, higher=False, together=len(others)) for name, each in others.items()
    }
    return [name for name, each in gaps.items() if each is None or each.low <= 1]


def _transfers(findings: Findings, metric: Metric) -> Iterator[str]:
    """Yield whether the best settings of recipes are good for the others."""
    measure, matrix = MEASURES[metric], findings.matrix(metric)
    best = {row[0].best_of: row[0].setting for row in matrix}
    if None in best.values():
        missing = [name for name, setting in best.items() if setting is None]
        yield f"{measure.title}: not every seed has it with any setting of {shorten(missing)}."
        return
    if len(set(best.values())) == 1:
        (setting,) = set(best.values())
        yield f"{setting} has {measure.best} on all {len(best)} recipes: it transfers."
        return
    each = shorten([f"{setting} on {name}" for name, setting in best.items()], most=_NAMED)
    lead = f"{measure.best.capitalize()}: {each}."
    worse = [_describe_lost(one, measure) for one in lost(matrix, higher=not measure.is_cost)]
    if worse:
        yield " ".join([lead, *worse[:_NAMED]])
    elif any(one.gap is None or one.gap.number < ENOUGH_SEEDS for row in matrix for one in row):
        yield f"{lead} Too few seeds to compare: {ENOUGH_SEEDS} or more tell whether they transfer."
    else:
        yield f"{lead} Used on the other recipes, they are within the noise of seeds of the best."


def _describe_lost(one: Transfer, measure: Measure) -> str:
    assert one.gap is not None
    found = f"takes {one.gap.with_ends('.2f', ' times')}"
    if not measure.is_cost:
        mean, low, high, number = one.gap.scaled(-100)
        found = f"is {Interval(mean, high, low, number).with_ends('.2f', ' points')} below"
    return f"On {one.used_on}, that of {one.best_of} ({one.setting}) {found} its own best."


def _circumstances(findings: Findings) -> Iterator[str]:
    """Yield how many runs there are, where they were made, and what disturbed them."""
    runs = [run for one in findings.cells for run in one.found.seeds]
    machines = describe_machines(runs, hardware=False, most=_NAMED)
    yield f"{plural(len(runs), 'run')} with seeds{machines}."
    together = overlapping(runs, findings.trials)
    if together:
        yield (
            f"{together:,} of them {'was' if together == 1 else 'were'} made while another one was "
            "under way on the same machine: their times are those of a machine that is shared."
        )
    others = [run.other_cores for run in runs if math.isfinite(run.other_cores)]
    if others and max(others) >= 0.1:
        yield (
            f"Other programs used {min(others):.1f} to {max(others):.1f} cores of the machine "
            "during the runs, which their times show."
        )
    if not findings.has_enough_seeds:
        yield f"Too few seeds to compare: {ENOUGH_SEEDS} or more tell settings apart."
    if findings.waiting:
        named = shorten(findings.waiting, most=_NAMED)
        yield f"Not finished: {plural(len(findings.waiting), 'cell')}, {named}"


def overlapping(runs: Sequence[Result], trials: Sequence[Result] = ()) -> int:
    """Return how many runs were under way while another run or trial was on the same machine."""
    return sum(
        any(
            other is not one and other.host == one.host
            and other.begun < one.ended and one.begun < other.ended
            for other in (*runs, *trials)
        )
        for one in runs
    )  # fmt: skip

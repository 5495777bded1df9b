"""What several runs have in common and what they differ in: numbers and words of the comparison.

Accuracies are compared only where the validation data is the same, and a difference is judged by
the noise of these images, as in the report of one run (`mistakes`).
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from largebatch.errors import (
    CheckpointError,
    LargebatchError,
    RecipeError,
    clip,
    printable,
    shorten,
)
from largebatch.formatting import duration, percent, plural
from largebatch.recipe.loading import parse_recipe, parse_yaml
from largebatch.report.course import Course, evaluations_of, updates_of
from largebatch.report.mistakes import Change, compare
from largebatch.report.numbers import short_commit
from largebatch.report.run import Run, Stage, read_run

_TARGETS = (*range(1, 100), 75.9, 99.5, 99.7, 99.9)
"""Accuracies in percent to which time is measured; 75.9 is MLPerf's of ResNet-50."""

_NAMED = 4
"""Runs that a sentence names at most."""

_LABEL = 48
"""Characters of a run's label."""


@dataclass(frozen=True)
class Compared:
    """A run among others."""

    run: Run
    label: str
    """Its folder's name, with those above it where another run has the same."""

    @property
    def status(self) -> str:
        """How it ended; without a summary it was killed or is under way."""
        return self.run.summary.status if self.run.summary else "no summary"

    @cached_property
    def settings(self) -> dict[str, str] | None:
        """The recipe by dotted keys, with today's defaults; None where it cannot be read."""
        return None if self.run.recipe is None else _read_settings(self.run.recipe)

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
        """Its stages that have ended; the last one may be under way, with accuracies of its own."""
        stages = self.run.stages
        if stages and stages[-1].result is None and stages[-1].mistakes is None:
            return stages[:-1]
        return stages

    @property
    def best(self) -> float:
        """The highest top-1 in percent; NaN without an evaluation."""
        return max(self.evaluated.values["top1"], default=math.nan)

    def seconds_to(self, target: float) -> float:
        """Return the time to the first evaluation with this top-1 in percent; NaN without one."""
        place = self.evaluated.first_at(target)
        return math.nan if place is None else float(self.evaluated.seconds[place])

    def reached_at_once(self, target: float) -> bool:
        """Return True if the first evaluation had it, so that its time is an upper bound."""
        return self.evaluated.first_at(target) == 0

    def data(self, *, named: bool) -> tuple[str, ...]:
        """Return what tells its validation data from that of others; `named`: by its classes."""
        known = self.settings or {}
        stage = self.run.last_stage
        samples = stage.after.samples if stage else self.run.plan.val_samples
        words = [f"{samples:,} validation images"]
        if "data.held_out.samples" in known:
            seed = known["data.held_out.seed"]
            words[0] = f"{samples:,} held-out training images, seed {seed}"
        if "data.classes" in known:
            words.insert(0, f"{known['data.classes']} classes")
        if "data.source" in known:
            words.insert(0, known["data.source"])
        names = stage.mistakes.classes if named and stage and stage.mistakes else ()
        return (", ".join(words), *names)


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of the same validation data."""

    data: str
    runs: tuple[Compared, ...]
    """Runs with a measured accuracy, in descending order of their last accuracy."""

    def points_to_best(self, run: Compared) -> float:
        """Return the difference of top-1 at the end, in percentage points; 0 or less."""
        return 100 * (_top1(run) - _top1(self.runs[0]))

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
        alike = Counter(data[0] for data in by_data)
        return tuple(
            Group(
                f"{data} ({shorten(names, most=3)})" if alike[data] > 1 else data,
                tuple(sorted(runs, key=_top1, reverse=True)),
            )
            for (data, *names), runs in by_data.items()
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
        """Settings that differ, by key, and the value in each run; then what it was made on.

        None stands where a run has no such key. Where its recipe, or its summary, cannot be read
        that is so of all keys, and makes none differ.
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

    Raises LargebatchError where a folder is missing or given twice, CheckpointError where no run
    can be read.
    """
    resolved = [path.resolve() for path in folders]
    twice = [path for path, real in zip(folders, resolved, strict=True) if resolved.count(real) > 1]
    if twice:
        raise LargebatchError(f"{twice[0]}: given twice; a comparison takes each run once")
    missing = [path for path in folders if not path.exists()]
    if missing:
        raise CheckpointError(
            f"{missing[0]}: not found; expected the folder of a run (the --out of `largebatch "
            "train`)"
        )
    runs, left_out = [], []
    for path in folders:
        try:
            runs.append(read_run(path))
        except (CheckpointError, OSError) as error:
            reason = f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            left_out.append(printable(reason))
    if not runs:
        raise CheckpointError(
            f"none of the {len(folders)} folders holds a run that can be read; the first: "
            f"{left_out[0]}"
        )
    compared = map(Compared, runs, _labels([run.path for run in runs]))
    return Comparison(tuple(compared), tuple(left_out))


def _labels(paths: Sequence[Path]) -> list[str]:
    """Return for each path as few of its last parts as tell it from the others.

    >>> _labels([Path("/a/rate-4/run"), Path("/a/rate-8/run"), Path("/a/best")])
    ['rate-4/run', 'rate-8/run', 'best']
    """
    parts = [path.resolve().parts for path in paths]
    labels = []
    for own in parts:
        lengths = range(1, len(own) + 1)
        alone = (n for n in lengths if sum(other[-n:] == own[-n:] for other in parts) == 1)
        labels.append(_shorten(printable("/".join(own[-next(alone, 1) :]))))
    return [
        label if labels.count(label) == 1 else f"{label} ({place})"
        for place, label in enumerate(labels, start=1)
    ]


def _shorten(label: str) -> str:
    half = _LABEL // 2
    return label if len(label) <= _LABEL else f"{label[: half - 1]}…{label[-half:]}"


def _top1(one: Compared) -> float:
    assert one.run.result is not None
    return one.run.result.top1


def _read_settings(text: str) -> dict[str, str] | None:
    """Return a recipe by dotted keys; as it is written where today's types do not take it."""
    tree: object
    try:
        tree = parse_recipe(text).model_dump(mode="json")
    except RecipeError:
        try:
            tree = parse_yaml(text, source="recipe.yaml")
        except RecipeError:
            return None
    return dict(_flatten(tree)) if isinstance(tree, dict) else None


def _flatten(tree: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every value by its dotted key; a list of plain values is one value.

    >>> dict(_flatten({"batch": {"global_batch": 96, "schedule": [{"after": 0.5}]}, "std": [1, 2]}))
    {'batch.global_batch': '96', 'batch.schedule.0.after': '0.5', 'std': '1, 2'}
    """
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from _flatten(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list) and any(isinstance(value, dict | list) for value in tree):
        for place, value in enumerate(tree):
            yield from _flatten(value, f"{key}.{place}")
    elif isinstance(tree, list):
        yield key, clip(", ".join(map(_written, tree)), 200) or "none"
    else:
        yield key, clip(_written(tree), 200)


def _written(value: object) -> str:
    """Return a value as a recipe has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None or value == {} else printable(str(value))


def _machine(run: Run) -> Iterator[tuple[str, str]]:
    """Yield what is no setting: how the run was divided, and what it was made with."""
    yield "workers", f"{run.plan.workers:,}"
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
        data = "; ".join(f"{group.data} ({_named(group.runs)})" for group in groups)
        yield (
            f"These runs were measured on {len(groups)} sets of validation images, so their "
            f"accuracies cannot be compared: {data}."
        )
    for group in groups:
        if len(groups) == 1 or len(group.runs) > 1:
            yield _best(group)
    if len(groups) == 1:
        yield from _fastest(comparison)
        yield from _seeds(groups[0])


def _best(group: Group) -> str:
    """Describe which run ends with the highest top-1, and which ones its images do not rule out."""
    best, *others = group.runs
    assert best.run.result is not None
    top1, samples = percent(best.run.result.top1), best.run.result.samples
    if not others:
        return f"{best.label} ends with top-1 of {top1} %; no other run was evaluated."
    second = others[0]
    alike = [one for one in others if not group.change(one).beyond_noise]
    if group.points_to_best(second) == 0:
        return f"{best.label} and {second.label} end with the same top-1, {top1} %."
    gap = f"{-group.points_to_best(second):.2f} points above {second.label}"
    begin = f"{best.label} ends with the highest top-1, {top1} %, {gap}"
    noise = f"the noise of the {samples:,} validation images"
    if not alike:
        return f"{begin}: more than {noise}."
    return f"{begin}. Its lead is within {noise} over {_named(alike)}."


def _fastest(comparison: Comparison) -> Iterator[str]:
    """Yield which run came first to the highest target that two runs reached.

    They have no order where the first evaluation of one had reached it: that is an upper bound.
    """
    workers = {one.run.plan.workers for one in comparison.runs}
    for target in reversed(comparison.targets):
        times = [(one.seconds_to(target), one) for one in comparison.runs]
        reached = [(time, one) for time, one in times if not math.isnan(time)]
        if len(reached) < 2:
            continue
        first, second = (
            _time_to(target, one)
            + (f" on {plural(one.run.plan.workers, 'worker')}" if len(workers) > 1 else "")
            for _, one in sorted(reached, key=lambda each: each[0])[:2]
        )
        words = f"First to reach a top-1 of {target:g} % was {first}, then {second}"
        if any(one.reached_at_once(target) for _, one in reached):
            words = f"Top-1 reached {target:g} % in {first} and in {second}"
        yield f"{words}; {len(reached)} of {plural(len(comparison.runs), 'run')} reached it."
        return


def _time_to(target: float, one: Compared) -> str:
    time = duration(one.seconds_to(target))
    if one.reached_at_once(target):
        return f"{one.label} after at most {time} (its first evaluation)"
    return f"{one.label} after {time}"


def _seeds(group: Group) -> Iterator[str]:
    """Yield the means over the seeds of runs that differ in nothing else, the highest two."""
    alike: dict[frozenset[tuple[str, str]], list[Compared]] = {}
    for one in group.runs:
        if one.settings is not None and one.status == "finished":
            same = {item for item in one.settings.items() if item[0] not in {"name", "seed"}}
            alike.setdefault(frozenset(same), []).append(one)
    means = []
    for runs in alike.values():
        by_seed: dict[str, list[float]] = {}  # one seed on several machines is one seed
        for one in runs:
            assert one.settings is not None
            by_seed.setdefault(one.settings["seed"], []).append(100 * _top1(one))
        if len(by_seed) < 2:
            continue
        tops = [statistics.fmean(each) for each in by_seed.values()]
        mean, deviation = statistics.fmean(tops), statistics.stdev(tops)
        words = (
            f"{mean:.2f} ± {deviation:.2f} % over {len(tops)} seeds in finished runs like "
            f"{runs[0].label}"
        )
        means.append((mean, words))
    ranked = [words for _, words in sorted(means, reverse=True)[:2]]
    if ranked:
        yield (
            "By recipe, as mean and standard deviation over its seeds, top-1 ends at "
            f"{' and at '.join(ranked)}."
        )


def _named(runs: Sequence[Compared]) -> str:
    """Return the labels of a few runs, and how many more there are."""
    labels = [one.label for one in runs[:_NAMED]]
    more = len(runs) - len(labels)
    return ", ".join(labels) + (f" and {more} more" if more else "")

"""Rank measured policies: the best one, how sure the order is, and what is missing.

Policies are compared within one recipe of one study, where all else is the same, and by seed.
Differences within the noise of seeds are reported as such. The page of a study, `lab recommend`
and `lab suggest` use the same ranking.
"""

import json
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic_core import to_json

from largebatch.errors import StudyError, shorten
from largebatch.formatting import plural
from largebatch.lab.planner.suggest import IMAGENET, Suggestion
from largebatch.lab.studies.metrics import (
    CONFIDENCE,
    ENOUGH_SEEDS,
    Cost,
    Costs,
    Interval,
    Ratio,
    costs,
    difference,
    ratio,
    ratio_of_updates,
)
from largebatch.lab.studies.search import good_values
from largebatch.lab.studies.store import read_folder
from largebatch.lab.studies.trained import CellResults, read_policy
from largebatch.optional import require_scipy
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.scaling import scaled, shortened
from largebatch.recipe.schedule import Schedule
from largebatch.recipe.writing import dump_yaml
from largebatch.report.pages import Table, columns_over

Criterion = Literal["cost", "accuracy", "robustness"]
"""cost: updates to the target. accuracy: top-1 at the rate found. robustness: top-1 over multiples
of the rate found, as metrics.Robustness.area has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One policy, and how it compares with the first one."""

    results: CellResults
    scores: Mapping[int, float | None]
    """By seed, of the criterion; None: the target was not reached."""

    reached: Mapping[int, Cost | None]
    """Cost of each seed to the target, None if it did not reach it; empty without a target."""

    against: Ratio | Interval | None = None
    """Its cost over that of the first policy, or the accuracy of that one minus its own."""

    is_level: bool = False
    """True if it is within the noise of seeds of the first policy."""

    avoid: tuple[str, ...] = ()
    """Reasons to avoid it."""

    @property
    def policy(self) -> str:
        """Its name."""
        return self.results.variant

    @property
    def known(self) -> list[float]:
        """Its scores."""
        return [score for score in self.scores.values() if score is not None]

    @property
    def costs(self) -> Costs | None:
        """Costs over all seeds; None without a target."""
        return costs(list(self.reached.values())) if self.reached else None

    @property
    def comparison(self) -> str | None:
        """Text of `against`; None if it is not compared."""
        match self.against:
            case Ratio(interval=Interval() as times):
                return f"{times.with_ends('.2f', ' times')} the updates"
            case Interval() as points:
                return f"{_points(points)} below"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The policies of one recipe of a study, the best first; those without a score last."""

    by: Criterion
    target: float | None
    ranked: tuple[Ranked, ...]
    gaps: tuple[str, ...] = ()
    """Missing measurements, without which nothing is recommended."""

    doubts: tuple[str, ...] = ()
    """Open questions: the order of policies, a rate at the edge."""

    @property
    def first(self) -> Ranked | None:
        """The best policy; None if none has a score, or none reached the target."""
        return self.ranked[0] if self.ranked[0].known else None

    @property
    def level(self) -> tuple[Ranked, ...]:
        """The others within its noise."""
        return tuple(one for one in self.ranked[1:] if one.is_level)

    @property
    def recommended(self) -> Ranked | None:
        """The best policy, if nothing speaks against it."""
        return None if self.gaps or self.doubts else self.first


def rank(
    cells: Sequence[CellResults],
    *,
    by: Criterion,
    target: float | None = None,
    batch: int | None = None,
) -> Ranking:
    """Rank the policies of one recipe; `target` is a fraction, whose cost may be the criterion.

    `batch` is the requested batch, which may differ from the measured one. Raises ValueError for
    the cost without a target.
    """
    if by == "cost" and target is None:
        raise ValueError("the cost is that of a target: give one")
    ranked = sorted((_scored(cell, by, target) for cell in cells), key=_order(by))
    first = ranked[0]
    compared = [_compared(one, first, by, together=len(ranked) - 1) for one in ranked[1:]]
    others = (replace(one, avoid=tuple(_reasons(one, first))) for one in compared)
    found = Ranking(by=by, target=target, ranked=(first, *others))
    return replace(found, gaps=tuple(_gaps(found)), doubts=tuple(_doubts(found, batch)))


def _scored(cell: CellResults, by: Criterion, target: float | None) -> Ranked:
    reached = {} if target is None else {one.seed: one.cost(target) for one in cell.seeds}
    every: dict[Criterion, Mapping[int, float | None]] = {
        "cost": {seed: one.updates if one else None for seed, one in reached.items()},
        "accuracy": {one.seed: one.top1 for one in cell.seeds},
        "robustness": cell.areas,
    }
    return Ranked(results=cell, reached=reached, scores=every[by])


def _order(by: Criterion) -> Callable[[Ranked], tuple[float, float, float]]:
    """Return a key to sort by: none diverged, then the most seeds at the target, then the mean."""

    def key(one: Ranked) -> tuple[float, float, float]:
        if not one.known:
            return 2.0, 0.0, -one.results.top1.mean if one.results.top1 else math.inf
        mean = statistics.fmean(one.known)
        share = len(one.known) / len(one.scores)
        return float(one.results.diverged > 0), -share, mean if by == "cost" else -mean

    return key


def _compared(one: Ranked, first: Ranked, by: Criterion, *, together: int) -> Ranked:
    """Compare a policy with the first one, over the seeds that both have.

    It is one of `together` comparisons, whose intervals hold jointly with CONFIDENCE.
    """
    if not first.known or not one.scores.keys() & first.scores.keys():
        return one
    only_it_diverged = one.results.diverged > 0 and not first.results.diverged
    if by == "cost":
        times = ratio_of_updates(one.reached, first.reached, together=together)
        costlier = _is_rarer(one, first, together) or _is_longer(one, first, times, together)
        return replace(one, against=times, is_level=not only_it_diverged and not costlier)
    if not one.known:
        return one
    scores = (
        {seed: score for seed, score in each.scores.items() if score is not None}
        for each in (first, one)
    )
    below = difference(*scores, together=together)
    is_level = not only_it_diverged and below.low <= 0 <= below.high
    return replace(one, against=below, is_level=is_level)


def _is_longer(one: Ranked, first: Ranked, times: Ratio, together: int) -> bool:
    """Return True if a policy surely takes more updates to the target than the first one.

    By the seeds that reach it with both, whose ratio is `times`, or by all that reach it with the
    first one; a run that does not reach it takes more than all its updates. If a seed reached the
    target only with this policy, it is open which of the two takes more.
    """
    least: dict[int, float | None] = {}
    for run in one.results.seeds:
        own, other = one.reached[run.seed], first.reached.get(run.seed)
        if own is not None and other is None and run.seed in first.reached:
            return False
        least[run.seed] = run.updates if own is None else own.updates_before
    if times.interval is not None and times.interval.low > 1:
        return True
    if 0 in least.values():
        return False
    at = {seed: None if cost is None else cost.updates for seed, cost in first.reached.items()}
    found = ratio(least, at, together=together).interval
    return found is not None and found.low > 1


def _is_rarer(one: Ranked, first: Ranked, together: int) -> bool:
    """Return True if surely fewer seeds reach the target, by Fisher's exact test."""
    fisher_exact = require_scipy("scipy.stats").fisher_exact
    table = [(len(each.known), len(each.scores) - len(each.known)) for each in (one, first)]
    return bool(fisher_exact(table, alternative="less").pvalue < (1 - CONFIDENCE) / 2 / together)


def _points(points: Interval) -> str:
    return points.scaled(100).with_ends(".2f", " points")


def _reasons(one: Ranked, first: Ranked) -> Iterator[str]:
    """Yield why a policy is to be avoided, and what might speak against that."""
    reasons = []
    if one.results.diverged:
        reasons.append(f"{one.results.diverged} of {len(one.results.seeds)} seeds diverged")
    match one.against:
        case Ratio(interval=times) as both if not one.is_level:
            if both.reached < both.reached_other:
                number = both.reached or "none"
                reasons.append(f"{number} of {both.seeds} seeds reached the target")
            if times is not None and times.low > 1:
                reasons.append(f"{times.with_ends('.2f', ' times')} the updates of {first.policy}")
        case Interval(low=low) as points if low > 0:
            reasons.append(f"{_points(points)} below {first.policy}")
        case _:
            pass
    yield from reasons
    if reasons:
        yield from _edges(one.results)


def _edges(cell: CellResults) -> Iterator[str]:
    for key, end in cell.edges.items():
        yield f"{key} {cell.values[key]:g} is the {end} tried: a better one may be beyond"


def _gaps(found: Ranking) -> Iterator[str]:
    cells, first = [one.results for one in found.ranked], found.first
    unfinished = [cell.variant for cell in cells if not cell.finished]
    if unfinished:
        yield f"not finished: {', '.join(unfinished)}"
    if len(cells) == 1:
        yield "only one policy was measured"
    if first is None:
        best = cells[0]
        if found.by == "robustness":
            yield "no seed has runs at other rates: give the study robustness_seeds"
        elif best.top1 is None:
            yield "no policy has a finished seed"
        else:
            yield (
                f"no policy reached {found.target or 0:.2%}: the best of them, {best.variant}, "
                f"ended at {best.top1.mean:.2%}"
            )
        return
    seeds = min(len(one.scores) for one in (first, *found.level))
    reached = len(first.known)
    if min(seeds, reached) < ENOUGH_SEEDS:
        few = plural(seeds, "seed")
        if reached < seeds:
            few = f"{reached} of {len(first.scores)} seeds reached the target"
        yield f"{few}: the noise of seeds is hardly known; {ENOUGH_SEEDS} or more are needed"


def _doubts(found: Ranking, batch: int | None) -> Iterator[str]:
    first = found.first
    measured = found.ranked[0].results.recipe.batch.global_batch
    if batch is not None and batch != measured:
        yield (
            f"batch {batch:,} was not measured: this is batch {measured:,}, and neither the order "
            "of policies nor a rate need be the same"
        )
    if first is None:
        return
    cell = first.results
    if cell.diverged:
        number = f"{cell.diverged} of {len(cell.seeds)}"
        yield f"{first.policy} comes first although {number} seeds diverged"
    yield from (f"{first.policy}: {end}" for end in _edges(cell))
    if found.level:
        names = ", ".join(one.policy for one in (first, *found.level))
        yield f"within the noise of each other, so in no order: {names}"


def sentences(found: Ranking) -> Iterator[str]:
    """Yield the best policy with its values, and what is missing."""
    first = found.first
    if first is not None:
        head = "recommended" if found.recommended else "tentative"
        to = "" if found.target is None else f" to {found.target:.2%}"
        values = describe_values(first.results)
        yield f"{head} by {found.by}{to}: {first.policy}{', ' * bool(values)}{values}"
    yield from (f"insufficient data: {missing}" for missing in found.gaps + found.doubts)


def describe_values(cell: CellResults) -> str:
    """Return the values found, and the range of those as good in the search."""
    if cell.cell.search is None or not cell.values:
        return ""
    good = good_values(cell.cell.search, cell.trials, cell.seeds)
    found, ranges = [], []
    for key, value in cell.values.items():
        name = key.rpartition(".")[2]
        low, high = good.ranges.get(key, (value, value))
        found.append(f"{name} {value:g}")
        ranges.append(f"{name} {low:g} to {high:g}")
    return (
        f"{', '.join(found)}; within the noise of the best in its search: {', '.join(ranges)} "
        f"({good.number} of {good.trials} trials)"
    )


def ranking_table(found: Ranking) -> Table:
    """Return a row for each policy, the best first; costs are means over the seeds that have it."""
    column = columns_over(found.ranked)

    def cost(unit: str, one: Ranked) -> Interval | None:
        return getattr(one.costs, unit, None)

    columns = [
        column("policy", lambda one: one.policy, None),
        column("top-1, %", lambda one: (it := one.results.top1) and 100 * it.mean, ".2f"),
        column("±", lambda one: (it := one.results.top1) and it.scaled(100).reach, ".2f"),
        column("updates", lambda one: (it := cost("updates", one)) and it.mean, ",.0f"),
        column("images", lambda one: (it := cost("images", one)) and it.mean, ",.0f"),
        column("seconds", lambda one: (it := cost("seconds", one)) and it.mean, ",.1f"),
        column("reached", lambda one: (it := one.costs) and f"{it.reached} of {it.runs}", None),
        column(f"against {found.ranked[0].policy}", lambda one: one.comparison, None),
        column("within noise", lambda one: one.against and ("no", "yes")[one.is_level], None),
        column(
            "worst drop", lambda one: (it := one.results.robustness) and 100 * it.worst_drop, ".2f"
        ),
        column("seeds", lambda one: len(one.results.seeds), "d"),
        column("diverged", lambda one: one.results.diverged, "d"),
        column("avoid", lambda one: "; ".join(one.avoid) or None, None),
    ]
    return Table(name="ranking", columns=columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The policies of one recipe of a study, which differ in the schedule alone."""

    folder: str
    cells: tuple[CellResults, ...]

    @property
    def recipe(self) -> Recipe:
        """The recipe, with the schedule of the first policy."""
        return self.cells[0].recipe

    @property
    def batch(self) -> int:
        """Global batch in samples at the start of the runs."""
        return self.recipe.batch.global_batch

    @property
    def name(self) -> str:
        """Study and recipe."""
        return f"{self.cells[0].cell.study}/{self.cells[0].configuration}"

    @property
    def described(self) -> str:
        """Data, model, batch, optimizer."""
        recipe = self.recipe
        return (
            f"{recipe.name}, {recipe.model.name}, batch {self.batch:,}, {recipe.optimizer.kind} "
            f"(study {self.name})"
        )

    def is_of(self, dataset: str) -> bool:
        """Return True if the group is of a data set, by its names.

        A recipe for a folder of images does not name them. So its name, that of the recipe in the
        study or that of the study must begin with the data set's, whole words, case and
        punctuation ignored. ImageNet is also known by its numbers.
        """
        data = self.recipe.data
        own = data.train_samples, data.val_samples, data.classes
        imagenet = IMAGENET.samples, IMAGENET.val_samples, IMAGENET.classes
        if dataset == ("imagenet" if own == imagenet else data.source):
            return True
        names = (self.recipe.name, self.cells[0].configuration, self.cells[0].cell.study)
        return any("".join(_words(dataset)) in _beginnings(name) for name in names)


def groups_of(folder: str, cells: Iterable[CellResults]) -> list[Group]:
    """Return the cells of a folder by study and recipe."""
    found: dict[tuple[str, str], list[CellResults]] = {}
    for cell in cells:
        found.setdefault((cell.cell.study, cell.configuration), []).append(cell)
    return [Group(folder=folder, cells=tuple(each)) for each in found.values()]


def read_groups(folders: Sequence[Path]) -> list[Group]:
    """Read the policies of folders of studies, those in runs/ if none is given.

    Raises StudyError if there is none.
    """
    paths = folders or sorted(path for path in Path("runs").glob("*") if path.is_dir())
    groups = []
    for path in paths:
        cells = [cell for there in read_folder(path) if (cell := read_policy(there)) is not None]
        groups += groups_of(str(path), cells)
    if not groups:
        where = ", ".join(map(str, folders)) or "runs/*"
        raise StudyError(
            f"{where}: no study of policies; measure one with: largebatch lab study STUDY.yaml"
        )
    return groups


def _words(name: str) -> list[str]:
    return "".join(one if one.isalnum() else " " for one in name.lower()).split()


def _beginnings(name: str) -> set[str]:
    words = _words(name)
    return {"".join(words[:number]) for number in range(1, len(words) + 1)}


def choose(
    groups: Sequence[Group],
    *,
    dataset: str | None = None,
    model: str | None = None,
    optimizer: str | None = None,
    batch: int | None = None,
) -> list[Group]:
    """Return the groups that fit a question; of other batches the nearest on either side.

    Raises StudyError, with the groups that exist, if there is none.
    """
    found = [
        group
        for group in groups
        if (dataset is None or group.is_of(dataset))
        and (model is None or group.recipe.model.name == model)
        and (optimizer is None or group.recipe.optimizer.kind == optimizer)
    ]
    if not found:
        wanted = [one for one in (dataset, model, optimizer) if one is not None]
        there = shorten([group.described for group in groups], between="; ")
        raise StudyError(f"no study of {', '.join(wanted)}; measured are {there}")
    if batch is None:
        return found
    measured = {group.batch for group in found}
    below = max((one for one in measured if one <= batch), default=None)
    above = min((one for one in measured if one >= batch), default=None)
    return [group for group in found if group.batch in {below, above}]


def schedule_yaml(cell: CellResults) -> str:
    """Return the schedule with the values found, as a section of a recipe; others as comments."""
    recipe = cell.cell.at(cell.values)
    others = (f"# {key}: {value:g}\n" for key, value in cell.values.items()
              if not key.startswith("schedule."))  # fmt: skip
    return f"{''.join(others)}schedule:\n" + textwrap.indent(dump_yaml(recipe.schedule), "  ")


def as_json(group: Group, found: Ranking) -> dict[str, Any]:
    """Return a ranking for another program; numbers that are not finite are null."""
    content = {
        "folder": group.folder,
        "study": group.name,
        "recipe": group.recipe.name,
        "model": group.recipe.model.name,
        "batch": group.batch,
        "optimizer": group.recipe.optimizer.kind,
        "by": found.by,
        "target": found.target,
        "recommended": found.recommended and found.recommended.policy,
        "first": found.first and found.first.policy,
        "level": [one.policy for one in found.level],
        "insufficient_data": found.gaps + found.doubts,
        "policies": [
            {
                "policy": one.policy,
                "values": one.results.values,
                "schedule": one.results.cell.at(one.results.values).schedule.model_dump(),
                "top1": one.results.top1,
                "costs": one.costs and asdict(one.costs),
                "within_noise": one.is_level,
                "avoid": one.avoid,
                "diverged": one.results.diverged,
                "runs": [run.folder for run in one.results.seeds],
            }
            for one in found.ranked
        ],
    }
    return json.loads(to_json(content, inf_nan_mode="null"))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Shape:
    """The schedule of a measured policy at a suggested peak, or None, and its source."""

    schedule: Schedule | None
    words: str


def shape_for(found: Suggestion, groups: Sequence[Group]) -> Shape | None:
    """Return the most accurate measured schedule for a suggested recipe; None if none fits.

    It is of the same model and the same number of images and classes, of the nearest measured
    batch by ratio, and None beyond them. Warm-up and decay are taken over as parts of the run; the
    rate is not, because it depends on the optimizer.
    """
    data = found.data
    same = [
        group
        for group in groups
        if group.recipe.model.name == found.model
        and (group.recipe.data.train_samples, group.recipe.data.val_samples) == (
            data.samples, data.val_samples)
        and group.recipe.data.classes == data.classes
    ]  # fmt: skip
    if not same:
        return None
    smallest, largest = (pick(group.batch for group in same) for pick in (min, max))
    kept = "policy: the planner's;"
    if not smallest <= found.batch <= largest:
        return Shape(
            None,
            f"{kept} policies were measured for {found.model} in batches of {smallest:,} to "
            f"{largest:,}, not in {found.batch:,}",
        )
    nearest = min(same, key=lambda group: abs(math.log(group.batch / found.batch)))
    answer = rank(nearest.cells, by="accuracy")
    if answer.gaps or answer.first is None:
        return Shape(None, f"{kept} {nearest.described} has insufficient data: {answer.gaps[0]}")
    cell = answer.first.results
    recipe = cell.recipe
    epochs = recipe.duration.epochs
    if epochs is None:
        assert recipe.duration.steps is not None
        epochs = recipe.duration.steps * nearest.batch / recipe.train_samples
    part = found.epochs / epochs
    longer = shortened(recipe, part, steps=part * nearest.batch / found.batch)
    level = ", ".join(one.policy for one in answer.level)
    words = (
        f"policy: the shape of {cell.variant}, which has the highest top-1 of "
        f"{plural(len(nearest.cells), 'policy', 'policies')} in {nearest.described}"
        + f"; within its noise: {level}"
        * bool(level)
    )
    return Shape(scaled(longer, found.peak_lr / recipe.schedule.peak_lr).schedule, words)

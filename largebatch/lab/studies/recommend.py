"""Rank measured policies: the best one, how sure the order is, and what is missing.

Policies are compared within one recipe of one study, where all else is the same, and by seed.
Differences within the noise of seeds are reported as such.
"""

import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from largebatch.errors import StudyError, shorten
from largebatch.formatting import plural
from largebatch.lab.studies.metrics import ENOUGH_SEEDS, Interval, difference, ratio
from largebatch.lab.studies.store import read_folder
from largebatch.lab.studies.study import Slot
from largebatch.lab.studies.trained import CellResults, read_policy
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_yaml
from largebatch.report.pages import Table, columns_over

Criterion = Literal["cost", "accuracy", "robustness"]
"""cost: updates to the target. accuracy: top-1 at the rate found. robustness: top-1 over multiples
of the rate found, as metrics.Robustness.areas has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One policy, and how it compares with the first one."""

    results: CellResults
    scores: Mapping[int, float | None]
    """By seed, of the criterion; None: the target was not reached."""

    against: Interval | None = None
    """Its cost over that of the first policy, or the accuracy of that one minus its own."""

    is_level: bool = False
    """True if it is within the noise of seeds of the first policy."""

    @property
    def policy(self) -> str:
        """Its name."""
        return self.results.variant

    @property
    def known(self) -> dict[int, float]:
        """Its scores."""
        return {seed: score for seed, score in self.scores.items() if score is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The policies of one recipe of a study, the best first; those without a score last."""

    by: Criterion
    target: float | None
    ranked: tuple[Ranked, ...]

    @property
    def first(self) -> Ranked | None:
        """The best policy; None if none has a score, or none reached the target."""
        return self.ranked[0] if self.ranked[0].known else None

    @property
    def level(self) -> tuple[Ranked, ...]:
        """The others within its noise."""
        return tuple(one for one in self.ranked[1:] if one.is_level)

    @property
    def doubts(self) -> list[str]:
        """What is missing, and what speaks against the best policy."""
        cells, first, found = [one.results for one in self.ranked], self.first, []
        unfinished = [cell.variant for cell in cells if not cell.finished]
        if unfinished:
            found.append(f"not finished: {', '.join(unfinished)}")
        if len(cells) == 1:
            found.append("only one policy was measured")
        if first is None:
            what = f"reached {self.target:.2%}" if self.by == "cost" else f"has {self.by}"
            return [*found, f"no policy {what}"]
        if len(first.known) < ENOUGH_SEEDS:
            found.append(
                f"{plural(len(first.known), 'seed')}: the noise of seeds is hardly known; "
                f"{ENOUGH_SEEDS} or more are needed"
            )
        cell = first.results
        if cell.diverged:
            found.append(f"{cell.diverged} of {len(cell.seeds)} seeds of {first.policy} diverged")
        if cell.edge:
            found.append(
                f"{first.policy}: peak_lr {cell.rate:g} is the {cell.edge} tried: a better one may "
                "be beyond"
            )
        if self.level:
            names = ", ".join(one.policy for one in (first, *self.level))
            found.append(f"within the noise of each other, so in no order: {names}")
        return found

    @property
    def recommended(self) -> Ranked | None:
        """The best policy, if nothing speaks against it."""
        return None if self.doubts else self.first


def rank(cells: Sequence[CellResults], *, by: Criterion, target: float | None = None) -> Ranking:
    """Rank the policies of one recipe; `target` is a fraction, whose cost may be the criterion.

    The order is by divergence, then by the number of seeds that reached the target, then by the
    mean. Raises ValueError for the cost without a target.
    """

    def scored(cell: CellResults) -> Ranked:
        scores: Mapping[int, float | None]
        if by == "cost":
            if target is None:
                raise ValueError("the cost is that of a target: give one")
            reached = {one.seed: one.cost(target) for one in cell.seeds}
            scores = {seed: one.step if one else None for seed, one in reached.items()}
        elif by == "accuracy":
            scores = {one.seed: one.top1 for one in cell.seeds}
        else:
            scores = cell.robustness.areas if cell.robustness else {}
        return Ranked(results=cell, scores=scores)

    def order(one: Ranked) -> tuple[bool, bool, float, float]:
        known = one.known.values()
        mean = statistics.fmean(known) if known else 0.0
        share = len(known) / len(one.scores) if known else 0.0
        return not known, one.results.diverged > 0, -share, mean if by == "cost" else -mean

    first, *others = sorted(map(scored, cells), key=order)
    compared = [_compared(one, first, by=by, together=len(others)) for one in others]
    return Ranking(by=by, target=target, ranked=(first, *compared))


def _compared(one: Ranked, first: Ranked, *, by: Criterion, together: int) -> Ranked:
    """Compare a policy with the first one, over the seeds in which both have a score.

    It is one of `together` comparisons, whose intervals hold jointly (Bonferroni). Without a score,
    or if only it diverged, it is worse; else it is level unless the interval excludes equality.
    """
    if by == "cost":
        against, equal = ratio(one.known, first.known, together=together), 1.0
    else:
        against, equal = difference(first.known, one.known, together=together), 0.0
    is_sure = against is not None and against.low > equal
    only_it_diverged = one.results.diverged > 0 and not first.results.diverged
    is_level = bool(one.known) and not only_it_diverged and not is_sure
    return replace(one, against=against, is_level=is_level)


def sentences(found: Ranking) -> Iterator[str]:
    """Yield the best policy with its rate, and what is missing."""
    first = found.first
    if first is not None:
        head = "recommended" if found.recommended else "tentative"
        to = "" if found.target is None or found.by != "cost" else f" to {found.target:.2%}"
        rate = "" if first.results.rate is None else f", peak_lr {first.results.rate:g}"
        yield f"{head} by {found.by}{to}: {first.policy}{rate}"
    yield from (f"insufficient data: {missing}" for missing in found.doubts)


def ranking_table(found: Ranking) -> Table:
    """Return a row for each policy, the best first; costs are means over the seeds that have it."""
    column = columns_over(found.ranked)

    def against(one: Ranked) -> str | None:
        if one.against is None:
            return None
        if found.by == "cost":
            return f"{one.against.with_ends('.2f', ' times')} the updates"
        return f"{one.against.scaled(100).with_ends('.2f', ' points')} below"

    def updates(one: Ranked) -> float | None:
        return statistics.fmean(one.known.values()) if found.by == "cost" and one.known else None

    columns = [
        column("policy", lambda one: one.policy, None),
        column("top-1, %", lambda one: (it := one.results.top1) and 100 * it.mean, ".2f"),
        column("±", lambda one: (it := one.results.top1) and it.scaled(100).reach, ".2f"),
        column("updates", updates, ",.0f"),
        column("seeds with it", lambda one: f"{len(one.known)} of {len(one.scores)}", None),
        column(f"against {found.ranked[0].policy}", against, None),
        column("within noise", lambda one: one.against and ("no", "yes")[one.is_level], None),
        column("diverged", lambda one: one.results.diverged, "d"),
    ]
    return Table(name="ranking", columns=columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The policies of one recipe of a study, which differ in the schedule alone."""

    folder: Path
    cells: tuple[CellResults, ...]

    @property
    def recipe(self) -> Recipe:
        """The recipe, with the schedule of the first policy."""
        return self.cells[0].cell.recipe

    @property
    def batch(self) -> int:
        """Global batch in samples at the start of the runs."""
        return self.recipe.batch.global_batch

    @property
    def described(self) -> str:
        """Data, model, batch, optimizer."""
        recipe = self.recipe
        return (
            f"{recipe.name}, {recipe.model.name}, batch {self.batch:,}, {recipe.optimizer.kind} "
            f"({self.folder}, {self.cells[0].configuration})"
        )


def read_groups(folders: Sequence[Path]) -> list[Group]:
    """Read the policies of folders of studies, those in runs/ if none is given.

    Raises StudyError if there is none.
    """
    groups = []
    for folder in folders or sorted(path for path in Path("runs").glob("*") if path.is_dir()):
        cells = [cell for there in read_folder(folder) if (cell := read_policy(there)) is not None]
        for name in dict.fromkeys(cell.configuration for cell in cells):
            own = tuple(cell for cell in cells if cell.configuration == name)
            groups.append(Group(folder=folder, cells=own))
    if not groups:
        where = ", ".join(map(str, folders)) or "runs/*"
        raise StudyError(
            f"{where}: no study of policies; measure one with: largebatch lab study STUDY.yaml"
        )
    return groups


def choose(
    groups: Sequence[Group],
    *,
    dataset: str | None = None,
    model: str | None = None,
    batch: int | None = None,
) -> list[Group]:
    """Return the groups that fit a question; `dataset` is the start of the recipe's name.

    Raises StudyError, with the groups that exist, if there is none.
    """
    found = [
        group
        for group in groups
        if (dataset is None or group.recipe.name.startswith(dataset))
        and (model is None or group.recipe.model.name == model)
        and (batch is None or group.batch == batch)
    ]
    if not found:
        wanted = ", ".join(str(one) for one in (dataset, model, batch) if one is not None)
        there = shorten([group.described for group in groups], between="; ")
        raise StudyError(f"no study of {wanted}; measured are {there}")
    return found


def schedule_yaml(cell: CellResults) -> str:
    """Return the schedule at the rate found, as a section of a recipe."""
    recipe = cell.cell.recipe_of(Slot(name="seed-1", seed=1), cell.rate)
    return "schedule:\n" + textwrap.indent(dump_yaml(recipe.schedule), "  ")

"""The ranking of the policies of a study, by accuracy and by the cost of an accuracy.

Policies are compared within one recipe, where all else is the same, and by seed. Differences within
the noise of seeds are reported as such. A cost to a target is the mean of the seeds that reached
it; the cost of the others is only known to be higher than what was run.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from largebatch.formatting import plural
from largebatch.lab.studies.metrics import (
    ENOUGH_SEEDS,
    Interval,
    Measurement,
    cost,
    difference,
    ratio,
)
from largebatch.lab.studies.study import Slot
from largebatch.lab.studies.trained import CellResults, Result
from largebatch.recipe.writing import dump_yaml
from largebatch.report.pages import Code


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One policy, and how it compares with the first one."""

    results: CellResults
    scores: Mapping[int, float]
    """By seed, updates to the target, without seeds that did not reach it; else top-1."""

    against: Interval | None = None
    """Its cost over that of the first policy, or the accuracy of that one minus its own."""

    is_level: bool = False
    """True if it is within the noise of seeds of the first policy."""

    @property
    def policy(self) -> str:
        """Its name."""
        return self.results.cell.variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The policies of one recipe of a study, the best first; those without a score last."""

    target: float | None
    """The accuracy whose cost ranks them; None: they are ranked by their accuracy."""

    ranked: tuple[Ranked, ...]

    @property
    def doubts(self) -> list[str]:
        """What is missing, and what speaks against the best policy; none recommend it."""
        first, found = self.ranked[0], []
        unfinished = [one.policy for one in self.ranked if not one.results.finished]
        if unfinished:
            found.append(f"not finished: {', '.join(unfinished)}")
        if not first.scores:
            what = "has a seed" if self.target is None else f"reached {self.target:.2%}"
            return [*found, f"no policy {what}"]
        if len(self.ranked) == 1:
            found.append("only one policy was measured")
        if len(first.scores) < ENOUGH_SEEDS:
            found.append(f"{plural(len(first.scores), 'seed')}, of {ENOUGH_SEEDS} that are needed")
        cell = first.results
        if cell.diverged:
            found.append(f"{cell.diverged} of {len(cell.seeds)} seeds of {first.policy} diverged")
        if cell.edge:
            found.append(
                f"{first.policy}: peak_lr {cell.rate:g} is the {cell.edge} tried: a better one may "
                "be beyond"
            )
        level = [one.policy for one in self.ranked if one.is_level]
        if level:
            names = ", ".join([first.policy, *level])
            found.append(f"within the noise of each other, so in no order: {names}")
        return found

    @property
    def finding(self) -> str:
        """The best policy with its rate, and what is missing."""
        first, doubts = self.ranked[0], self.doubts
        parts = [f"insufficient data: {missing}" for missing in doubts]
        if first.scores:
            head = "tentative" if doubts else "recommended"
            by = "accuracy" if self.target is None else f"cost to {self.target:.2%}"
            rate = "" if first.results.rate is None else f", peak_lr {first.results.rate:g}"
            parts = [f"{head} by {by}: {first.policy}{rate}", *parts]
        return "; ".join(parts)


def rank(cells: Sequence[CellResults], *, target: float | None = None) -> Ranking:
    """Rank the policies of one recipe by the cost of a target, a fraction, else by accuracy.

    The order is by divergence, then by the number of seeds that reached the target, then by the
    mean. A policy without a score, or that alone diverged, is worse than the first; another is
    level with it unless the interval of their difference, over the seeds of both, excludes
    equality. These intervals hold jointly (Bonferroni).
    """

    def score(run: Result) -> float | None:
        if target is None:
            return run.top1
        reached = reached_at(run, target)
        return None if reached is None else reached.step

    def order(one: Ranked) -> tuple[bool, bool, float, float]:
        known = one.scores.values()
        mean = fmean(known) if known else 0.0
        share = len(known) / len(one.results.seeds) if known else 0.0
        return not known, one.results.diverged > 0, -share, -mean if target is None else mean

    scored = []
    for cell in cells:
        scores = {run.seed: score(run) for run in cell.seeds}
        known = {seed: value for seed, value in scores.items() if value is not None}
        scored.append(Ranked(results=cell, scores=known))
    first, *others = sorted(scored, key=order)
    compared = []
    for one in others:
        if target is None:
            against, equal = difference(first.scores, one.scores, together=len(others)), 0.0
        else:
            against, equal = ratio(one.scores, first.scores, together=len(others)), 1.0
        is_sure = against is not None and against.low > equal
        only_it_diverged = one.results.diverged > 0 and not first.results.diverged
        is_level = bool(one.scores) and not only_it_diverged and not is_sure
        compared.append(replace(one, against=against, is_level=is_level))
    return Ranking(target=target, ranked=(first, *compared))


def reached_at(run: Result, target: float) -> Measurement | None:
    """Return the cost of a run up to a top-1 accuracy (a fraction).

    None if the run did not reach it, or diverged and so did not keep it.
    """
    return None if run.diverged else cost(run.evaluations, target)


def costs(cell: CellResults, target: float) -> list[Measurement]:
    """Return the costs of the seeds that reached a target."""
    found = (reached_at(run, target) for run in cell.seeds)
    return [one for one in found if one is not None]


def schedule(best: CellResults) -> Code:
    """Return the schedule of a policy at its rate, as a section of a recipe."""
    recipe = best.cell.recipe_of(Slot(name="seed-1", seed=1), best.rate)
    text = "schedule:\n" + textwrap.indent(dump_yaml(recipe.schedule), "  ")
    return Code(name=f"schedule of {best.cell.variant}", text=text)

"""Which policy a database recommends: measured policies in order, and how sure that order is.

Policies are compared within one configuration of one study, where all else is the same, and by
seed. What differs by less than the seeds do is in no order, and is reported so.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from largebatch.formatting import plural
from largebatch.lab.studies.metrics import (
    CONFIDENCE,
    ENOUGH_SEEDS,
    Cost,
    Costs,
    Interval,
    Ratio,
    Robustness,
    costs,
    difference,
    interval,
    ratio,
    ratio_of_updates,
)
from largebatch.lab.studies.policies.groups import Group
from largebatch.lab.studies.queue.results import CellResults

Criterion = Literal["cost", "accuracy", "robustness"]
"""cost: updates to the target. accuracy: top-1 at the rate found. robustness: top-1 over multiples
of the rate found, as metrics.Robustness.area has it."""

Scores = Mapping[int, float | None]
"""By seed; None: the target was not reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One policy, and how it compares with the first one."""

    cell: CellResults
    top1: Interval | None
    """Over the seeds; None before one is done."""

    reached: Mapping[int, Cost | None]
    """What each seed took to the target, None where it was not reached; empty without a target."""

    robustness: Robustness | None
    """None without runs at other rates."""

    scores: Scores
    """By seed, of the criterion."""

    against: Ratio | Interval | None = None
    """Its cost over that of the first policy, or the accuracy of that one minus its own."""

    is_level: bool = False
    """Whether it is within the noise of seeds of the first policy."""

    avoid: tuple[str, ...] = ()
    """Why it is to be avoided, if it is."""

    @property
    def costs(self) -> Costs | None:
        """Costs over all seeds; None without a target."""
        return costs(list(self.reached.values())) if self.reached else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What a group of policies says about a question."""

    group: Group
    by: Criterion
    target: float | None
    standings: tuple[Standing, ...]
    """The best first; those without a score last."""

    gaps: tuple[str, ...] = ()
    """What was not measured, and would have to be for a recommendation."""

    doubts: tuple[str, ...] = ()
    """What the measurements leave open: the order of policies, a rate at the edge."""

    @property
    def too_little(self) -> tuple[str, ...]:
        """Why this is not enough for a recommendation; empty where it is."""
        return self.gaps + self.doubts

    @property
    def first(self) -> Standing | None:
        """The policy that leads; None where none has a score, or none reached the target."""
        return self.standings[0] if _scored(self.standings[0]) else None

    @property
    def level(self) -> tuple[Standing, ...]:
        """The others that are within the noise of it."""
        return tuple(one for one in self.standings[1:] if one.is_level)


def recommend(
    group: Group, *, by: Criterion, target: float | None = None, batch: int | None = None
) -> Recommendation:
    """Rank the policies of a group; `target` is a fraction of 1, whose cost may be the criterion.

    `batch` is the requested batch, which may differ from the group's. Raises ValueError for the
    cost without a target.
    """
    if by == "cost" and target is None:
        raise ValueError("the cost is that of a target: give one")
    ranked = sorted((_standing(cell, by, target) for cell in group.cells), key=_rank(by))
    first = ranked[0]
    others = len(ranked) - 1
    compared = [_compared(one, first, by, together=others) for one in ranked[1:]]
    behind = (replace(one, avoid=tuple(_reasons(one, first))) for one in compared)
    standings = (first, *behind)
    found = Recommendation(group=group, by=by, target=target, standings=standings)
    return replace(found, gaps=tuple(_gaps(found)), doubts=tuple(_doubts(found, batch)))


def _standing(cell: CellResults, by: Criterion, target: float | None) -> Standing:
    top1 = [one.top1 for one in cell.seeds]
    each = {}
    if target is not None:
        each = {one.seed: one.cost(target) for one in cell.seeds}
    scores: Scores
    match by:
        case "cost":
            scores = {seed: None if one is None else one.updates for seed, one in each.items()}
        case "accuracy":
            scores = {one.seed: one.top1 for one in cell.seeds}
        case "robustness":
            scores = cell.areas
        case _:
            assert_never(by)
    return Standing(
        cell=cell,
        top1=interval(top1) if top1 else None,
        reached=each,
        robustness=cell.robustness,
        scores=scores,
    )


def _scored(one: Standing) -> list[float]:
    return [score for score in one.scores.values() if score is not None]


def _rank(by: Criterion) -> Callable[[Standing], tuple[float, float, float]]:
    """Return a key to sort by: none diverged, then the most seeds at the target, then the mean."""

    def key(one: Standing) -> tuple[float, float, float]:
        scores = _scored(one)
        if not scores:
            return 2.0, 0.0, -one.top1.mean if one.top1 else math.inf
        mean = statistics.fmean(scores)
        share = len(scores) / len(one.scores)
        return float(one.cell.diverged > 0), -share, mean if by == "cost" else -mean

    return key


def _compared(one: Standing, first: Standing, by: Criterion, *, together: int) -> Standing:
    """Compare a policy with the first one, over the seeds that both have.

    It is one of `together` comparisons, whose intervals hold jointly with 95 %.
    """
    if not _scored(first) or not one.scores.keys() & first.scores.keys():
        return one
    only_it_diverged = one.cell.diverged > 0 and not first.cell.diverged
    if by == "cost":
        times = ratio_of_updates(one.reached, first.reached, together=together)
        costlier = _is_rarer(one, first, together) or _is_longer(one, first, times, together)
        return replace(one, against=times, is_level=not only_it_diverged and not costlier)
    if not _scored(one):
        return one
    scores = (
        {seed: score for seed, score in each.scores.items() if score is not None}
        for each in (first, one)
    )
    below = difference(*scores, together=together)
    is_level = not only_it_diverged and below.low <= 0 <= below.high
    return replace(one, against=below, is_level=is_level)


def _is_longer(one: Standing, first: Standing, times: Ratio, together: int) -> bool:
    """Return whether a policy surely takes more updates to the target than the first one.

    By the seeds that both bring there, whose ratio is `times`, or by all that the first one does,
    of which those that it does not take more than their whole run. Where a seed reached the target
    that did not with the first policy, which of the two takes more is open.
    """
    least: dict[int, float | None] = {}
    for run in one.cell.seeds:
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


def _is_rarer(one: Standing, first: Standing, together: int) -> bool:
    """Return whether fewer seeds of a policy surely reached the target, by Fisher's exact test."""
    from scipy.stats import fisher_exact

    reached = [(len(_scored(each)), len(each.scores)) for each in (one, first)]
    table = [(number, runs - number) for number, runs in reached]
    return bool(fisher_exact(table, alternative="less").pvalue < (1 - CONFIDENCE) / 2 / together)


def _reasons(one: Standing, first: Standing) -> Iterator[str]:
    """Yield why a policy is to be avoided, and what might speak against that."""
    reasons = list(_shortcomings(one, first))
    yield from reasons
    if reasons:
        yield from _ends_tried(one.cell)


def _ends_tried(cell: CellResults) -> Iterator[str]:
    """Yield the values found at an end of what was tried."""
    for key, end in cell.edges.items():
        yield f"{key} {cell.values[key]:g} is the {end} tried: a better one may lie beyond"


def _shortcomings(one: Standing, first: Standing) -> Iterator[str]:
    """Yield what a policy is behind by."""
    if one.cell.diverged:
        yield f"{one.cell.diverged} of {len(one.cell.seeds)} seeds diverged"
    match one.against:
        case Ratio(interval=times) as both if not one.is_level:
            if both.reached < both.reached_other:
                yield f"{both.reached or 'none'} of {both.seeds} seeds reached the target"
            if times is not None and times.low > 1:
                yield f"{describe_ratio(times)} the updates of {first.cell.policy}"
        case Interval(low=low) as points if low > 0:
            yield f"{describe_points(points)} below {first.cell.policy}"
        case _:
            pass


def describe_ratio(times: Interval) -> str:
    """Return a ratio in words: 1.50 times (1.20 to 1.88)."""
    return times.with_ends(".2f", " times")


def describe_points(points: Interval) -> str:
    """Return a difference of accuracies in words: 1.50 points (1.20 to 1.80)."""
    return points.scaled(100).with_ends(".2f", " points")


def _gaps(found: Recommendation) -> Iterator[str]:
    """Yield what is missing for a recommendation."""
    cells, first = found.group.cells, found.first
    unfinished = [cell.policy for cell in cells if not cell.finished]
    if unfinished:
        yield f"not finished: {', '.join(unfinished)}"
    if len(cells) == 1:
        yield "one policy was measured: there is no other to compare with"
    if first is None:
        yield _nothing(found)
        return
    seeds = min(len(one.scores) for one in (first, *found.level))
    reached = len(_scored(first))
    if min(seeds, reached) < ENOUGH_SEEDS:
        few = plural(seeds, "seed")
        if reached < seeds:
            few = f"{reached} of {len(first.scores)} seeds reached the target"
        yield (
            f"{few}: the noise of seeds is hardly known; {ENOUGH_SEEDS} or more tell policies apart"
        )


def _doubts(found: Recommendation, batch: int | None) -> Iterator[str]:
    """Yield what is open although it was measured."""
    group, first = found.group, found.first
    if batch is not None and batch != group.batch:
        yield (
            f"batch {batch:,} was not measured: this is of {group.batch:,}, and neither the order "
            "of policies nor a rate need be the same there"
        )
    if first is None:
        return
    if first.cell.diverged:
        yield (
            f"{first.cell.policy} comes first although {first.cell.diverged} of "
            f"{len(first.cell.seeds)} seeds diverged"
        )
    yield from (f"{first.cell.policy}: {end}" for end in _ends_tried(first.cell))
    if found.level:
        names = ", ".join(one.cell.policy for one in (first, *found.level))
        yield f"within the noise of each other, so in no order: {names}"


def _nothing(found: Recommendation) -> str:
    best = found.standings[0]
    if found.by == "robustness":
        return "no seed has runs at other rates: give the study robustness_seeds"
    if best.top1 is None:
        return "no policy has a seed that is done"
    assert found.target is not None
    return (
        f"no policy reached {found.target:.2%}: the best of them, {best.cell.policy}, ended at "
        f"{best.top1.mean:.2%}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodValues:
    """The values of a search that are as good as the one found, as far as the noise lets see."""

    ranges: Mapping[str, tuple[float, float]]
    """The lowest and the highest, by key."""

    number: int
    trials: int
    """How many are as good, and how many there were."""


def good_values(cell: CellResults) -> GoodValues:
    """Return what is within the noise of the best trial.

    The noise of a trial has two parts, of the images that judge (binomial) and of the seed (the
    spread of top-1 over the seeds at the end); two trials differ by the root of 2 times that.
    Trials that were stopped early or diverged are none of the good ones.
    """
    value = cell.settings.value_of
    whole = [one for one in cell.search if one.pruned_after is None and one.diverged is None]
    if not whole:
        return GoodValues(ranges={}, number=0, trials=len(cell.search))
    best = max(map(value, whole))
    variance = best * (1 - best) / cell.settings.held_out
    ends = [value(one) for one in cell.seeds]
    variance += statistics.variance(ends) if len(ends) > 1 else 0.0
    width = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(2 * variance)
    good = [one for one in whole if value(one) >= best - width]
    return GoodValues(
        ranges={
            key: (min(one.values[key] for one in good), max(one.values[key] for one in good))
            for key in good[0].values
        },
        number=len(good),
        trials=len(cell.search),
    )

"""What the page of a study has of each cell: means over seeds with intervals, costs, fronts.

A cost to a target is the mean of the seeds that reached it. A cell in which not all of them did is
on no front: the cost of the others is only known to be higher than what was run.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from largebatch.errors import shorten
from largebatch.formatting import plural
from largebatch.lab.studies.metrics import (
    ENOUGH_SEEDS,
    Cost,
    Costs,
    Interval,
    Robustness,
    costs,
    difference,
    interval,
    ratio_of_updates,
)
from largebatch.lab.studies.queue.results import CellResults, Result, describe_machines

Unit = Literal["updates", "images", "seconds"]
UNITS: tuple[Unit, ...] = ("updates", "images", "seconds")

_TARGETS = (*range(10, 90, 5), *range(90, 99), 99, 99.5, 99.7, 99.9)
"""In percent; what is looked at where a study has no targets."""

_NAMED = 4
"""Policies that a sentence names at most."""


class Axis(NamedTuple):
    """What accuracy is set against: a cost to a target, or that of the whole run."""

    unit: Unit
    target: float | None
    """A part of 1; None: the whole run."""

    @property
    def title(self) -> str:
        """Its title.

        >>> Axis("updates", 0.95).title, Axis("seconds", None).title
        ('Updates to 95 %', 'Seconds of the run')
        """
        to = "of the run" if self.target is None else f"to {100 * self.target:g} %"
        return f"{self.unit.capitalize()} {to}"

    @property
    def column(self) -> str:
        """Its name in the data of charts."""
        return self.unit if self.target is None else f"{self.unit}_to_{1e6 * self.target:.0f}"


@dataclass(frozen=True)
class Standing:
    """A cell with at least one trial, and what its runs have reached."""

    found: CellResults
    configuration: int
    """Its place among the configurations of the page."""

    policy: int
    """Its place among the policies of the page."""

    _costs: dict[float | None, Costs] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def top1(self) -> Interval | None:
        """The mean accuracy over seeds; a run that diverged counts as chance."""
        return self.found.mean(lambda one: one.top1)

    def costs(self, target: float | None) -> Costs:
        """Return the costs over seeds; without a target, those of the runs that did not diverge."""
        if target not in self._costs:
            seeds = self.found.seeds
            spent = (_whole(one) if target is None else one.cost(target) for one in seeds)
            self._costs[target] = costs(list(spent))
        return self._costs[target]

    def cost(self, axis: Axis) -> float:
        """Return the mean cost; NaN where it is unknown."""
        spent: Interval | None = getattr(self.costs(axis.target), axis.unit)
        return math.nan if spent is None else spent.mean

    def competes(self, axis: Axis) -> bool:
        """Return whether every seed has this cost, so that means compare."""
        spent = self.costs(axis.target)
        return spent.reached == spent.runs > 0 and math.isfinite(self.cost(axis))

    @cached_property
    def robustness(self) -> Robustness | None:
        """Top-1 by multiples of the rate, over the seeds that were run at every one."""
        return self.found.robustness

    @property
    def status(self) -> str | None:
        """What is missing; None where nothing is."""
        if self.found.finished:
            return None
        return "unfinished" if self.found.seeds else "being searched"


def _whole(one: Result) -> Cost | None:
    if one.diverged is not None or not one.evaluations:
        return None
    last = one.evaluations[-1]
    return Cost(
        updates=last.step, updates_before=last.step, images=last.images, seconds=last.seconds
    )


@dataclass(frozen=True)
class Standings:
    """All cells of a page, those of each configuration from the most accurate down."""

    configurations: tuple[str, ...]
    policies: tuple[str, ...]
    cells: tuple[Standing, ...]
    targets: tuple[float, ...]

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The costs that any cell has, first those to the target that compares the most cells."""

        def compared(target: float) -> tuple[int, float]:
            axis = Axis("updates", target)
            return sum(one.competes(axis) for one in self.cells), target

        targets = sorted(self.targets, key=compared, reverse=True)
        every = (Axis(unit, target) for target in (*targets, None) for unit in UNITS)
        return tuple(
            axis for axis in every if any(math.isfinite(one.cost(axis)) for one in self.cells)
        )

    @cached_property
    def fronts(self) -> dict[Axis, frozenset[tuple[int, int]]]:
        """The configuration and policy of the cells on each Pareto front, by configuration."""
        return {axis: frozenset(self._front(axis)) for axis in self.axes}

    def _front(self, axis: Axis) -> Iterator[tuple[int, int]]:
        for configuration in range(len(self.configurations)):
            some = [one for one in self.of(configuration) if one.competes(axis)]
            values = [one.top1.mean for one in some if one.top1 is not None]
            for place in pareto_front([one.cost(axis) for one in some], values):
                yield configuration, some[place].policy

    def on_front(self, one: Standing, axis: Axis) -> bool:
        """Return whether no cell of its configuration is as good at less, or better at as much."""
        return (one.configuration, one.policy) in self.fronts[axis]

    @cached_property
    def has_enough_seeds(self) -> bool:
        """True if every policy has the seeds to be compared with the others of its recipe."""
        ranked = [
            [one.top1.number for one in self.of(place) if one.top1 is not None]
            for place in range(len(self.configurations))
        ]
        return all(min(numbers) >= ENOUGH_SEEDS for numbers in ranked if len(numbers) > 1)

    def of(self, configuration: int) -> list[Standing]:
        """Return the cells of a configuration."""
        return [one for one in self.cells if one.configuration == configuration]


def stand(found: Sequence[CellResults], targets: Iterable[float] = ()) -> Standings:
    """Return the standings of cells; without targets they are chosen by what was reached.

    Configurations of several studies are named with their study.
    """
    several = len({cell.study for cell in found}) > 1
    names = [
        f"{cell.study}/{cell.configuration}" if several else cell.configuration for cell in found
    ]
    configurations = tuple(dict.fromkeys(names))
    policies = tuple(dict.fromkeys(cell.policy for cell in found))
    cells = [
        Standing(cell, configurations.index(name), policies.index(cell.policy))
        for name, cell in zip(names, found, strict=True)
    ]
    cells.sort(key=lambda one: (one.configuration, -one.top1.mean if one.top1 else math.inf))
    chosen = tuple(sorted(set(targets))) or _choose_targets(cells)
    return Standings(configurations, policies, tuple(cells), chosen)


def _choose_targets(cells: Sequence[Standing]) -> tuple[float, ...]:
    """Return round accuracies that all seeds of half of the cells, and of the best one, reached."""
    lowest = sorted(
        min(max((each.top1 for each in seed.evaluations), default=0.0) for seed in one.found.seeds)
        for one in cells
        if one.found.seeds
    )
    if not lowest:
        return ()
    reached = (lowest[len(lowest) // 2], lowest[-1])
    below = [[target / 100 for target in _TARGETS if target <= 100 * one] for one in reached]
    return tuple(sorted({max(found) for found in below if found}))


def pareto_front(spent: Sequence[float], values: Sequence[float]) -> list[int]:
    """Return the places that no other one dominates: as good at less, or better at as much.

    Those that are equal in both are all on it.

    >>> pareto_front([1.0, 2.0, 2.0, 3.0], [0.8, 0.9, 0.9, 0.9])
    [0, 1, 2]
    """
    front: list[int] = []
    for place in sorted(range(len(spent)), key=lambda one: (spent[one], -values[one])):
        last = front[-1] if front else place
        equal = (spent[place], values[place]) == (spent[last], values[last])
        if equal or values[place] > values[last]:
            front.append(place)
    return front


def describe(standings: Standings) -> Iterator[str]:
    """Yield what a study has found, a sentence each."""
    for place, name in enumerate(standings.configurations):
        ranked = [one for one in standings.of(place) if one.top1 is not None]
        if ranked:
            where = f"{name}: " if len(standings.configurations) > 1 else ""
            yield where + _leads(ranked)
            targets = (axis.target for axis in standings.axes[:1])
            yield from (where + text for target in targets for text in _cheapest(ranked, target))
            yield from (where + text for text in _robustness(ranked))
    yield from _counts(standings)


def _leads(ranked: Sequence[Standing]) -> str:
    best, *others = ranked
    assert best.top1 is not None
    lead = f"{best.found.policy} has the highest top-1, {describe_interval(best.top1)}"
    if not others:
        return f"{lead}; it is the only policy with seeds."
    apart = {one.found.policy: _behind(best, one, together=len(others)) for one in others}
    few = [name for name, gap in apart.items() if gap is None or gap.number < ENOUGH_SEEDS]
    if few:
        return (
            f"{lead}; too few seeds to compare with {shorten(few, most=_NAMED)}: {ENOUGH_SEEDS} or "
            "more tell policies apart."
        )
    close = [name for name, gap in apart.items() if gap is None or gap.low <= 0]
    if close:
        named = shorten(close, most=_NAMED)
        return f"{lead}; within the noise of seeds of it: {named}."
    name, gap = next(iter(apart.items()))
    assert gap is not None
    above = gap.scaled(100)
    return (
        f"{lead}, {above.mean:.2f} points above {name} ({above.low:.2f} to {above.high:.2f}): more "
        "than the noise of seeds."
    )


def _behind(best: Standing, one: Standing, *, together: int) -> Interval | None:
    """Return how far a cell is behind over the seeds of both; None where they share none.

    `together` as in metrics.interval.
    """
    top1 = [{each.seed: each.top1 for each in cell.found.seeds} for cell in (best, one)]
    shared = top1[0].keys() & top1[1].keys()
    return difference(*top1, together=together) if shared else None


def _cheapest(ranked: Sequence[Standing], target: float | None) -> Iterator[str]:
    axis = Axis("updates", target)
    some = [one for one in ranked if one.competes(axis)]
    if target is None or not some or len(ranked) < 2:
        return
    least = min(some, key=lambda one: one.cost(axis))
    others = [one for one in some if one is not least]
    spent = {one.policy: {run.seed: run.cost(target) for run in one.found.seeds} for one in some}
    times = {
        one.found.policy: ratio_of_updates(
            spent[one.policy], spent[least.policy], together=len(others)
        ).interval
        for one in others
    }
    close = [name for name, found in times.items() if found is None or found.low <= 1]
    level = f"; within the noise of it: {shorten(close, most=_NAMED)}" if close else ""
    yield (
        f"{100 * target:g} % takes the fewest updates with {least.found.policy}, "
        f"{least.cost(axis):,.0f}{level}; all seeds reach it with {len(some)} of {len(ranked)} "
        "policies."
    )


def _robustness(cells: Sequence[Standing]) -> Iterator[str]:
    """Yield how robust the policies of one configuration are, and how confident."""
    areas = {one.found.policy: found for one in cells if (found := one.found.areas)}
    if areas:
        yield _most_robust(areas, cells)
    yield from _confident(cells)


def _most_robust(areas: Mapping[str, Mapping[int, float]], cells: Sequence[Standing]) -> str:
    scales = next(list(one.robustness.by_scale) for one in cells if one.robustness is not None)
    means = {name: interval(each.values()) for name, each in areas.items()}
    best, *others = sorted(means, key=lambda name: -means[name].mean)
    lead = (
        f"At {scales[0]:g} to {scales[-1]:g} times the rate found, {best} has the highest top-1 on "
        f"average, {describe_interval(means[best])}"
    )
    if not others:
        return f"{lead}."
    worst = others[-1]
    lead += f", {worst} the lowest, {describe_interval(means[worst])}"
    if min(len(each) for each in areas.values()) < ENOUGH_SEEDS:
        return f"{lead}; too few seeds to compare."
    close = [
        name
        for name in others
        if not areas[name].keys() & areas[best].keys()
        or difference(areas[best], areas[name], together=len(others)).low <= 0
    ]
    noise = f"; within the noise of {best}: {shorten(close, most=_NAMED)}" if close else ""
    return f"{lead}{noise}."


def _confident(cells: Sequence[Standing]) -> Iterator[str]:
    def known(value: Callable[[Result], float]) -> list[tuple[float, str]]:
        found = ((one.found.mean(value), one.found.policy) for one in cells)
        return sorted((each.mean, name) for each, name in found if each is not None)

    sure = known(lambda run: run.average_confidence)
    apart = known(lambda run: run.class_confidence_deviation)
    if len(sure) > 1 and apart:
        (low, first), *_, (high, last) = sure
        yield (
            f"The probability of right answers (AC) is {100 * low:.2f} % ({first}) to "
            f"{100 * high:.2f} % ({last}) on average; between classes it deviates (CDAC) by "
            f"{100 * apart[0][0]:.2f} ({apart[0][1]}) to {100 * apart[-1][0]:.2f} points "
            f"({apart[-1][1]})."
        )


def _counts(standings: Standings) -> Iterator[str]:
    cells = [one.found for one in standings.cells]
    runs = [run for cell in cells for run in (*cell.search, *cell.seeds, *cell.scaled)]
    trials, seeds = sum(len(cell.search) for cell in cells), sum(len(cell.seeds) for cell in cells)
    others = len(runs) - trials - seeds
    parts = [f"{plural(trials, 'trial')} of the search", f"{plural(seeds, 'run')} with seeds"]
    parts += [f"{others:,} at other rates"] if others else []
    machines = describe_machines(runs, hardware=True, most=_NAMED)
    yield f"{plural(len(runs), 'run')}: {', '.join(parts)}{machines}."
    waiting = [one.found.policy for one in standings.cells if one.status]
    if waiting:
        yield f"Not finished: {shorten(list(dict.fromkeys(waiting)), most=_NAMED)}."


def describe_interval(found: Interval) -> str:
    """Return a mean of parts of 1 in percent, and of enough seeds how far its interval reaches.

    >>> describe_interval(Interval(0.91, 0.8852, 0.9348, 3))
    '91.00 % ± 2.48 (3 seeds)'
    >>> describe_interval(Interval(0.91, 0.78, 1.04, 2))
    '91.00 % (2 seeds)'
    """
    return f"{found.scaled(100).text('.2f', ' %')} ({plural(found.number, 'seed')})"

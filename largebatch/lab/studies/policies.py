"""A study of policies: their ranking, and a page of accuracy and cost.

Policies are compared within one recipe, where all else is the same, and by seed. Differences within
the noise of seeds are reported as such. A cost to a target is the mean of the seeds that reached
it; the cost of the others is only known to be higher than what was run.
"""

import math
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from largebatch.formatting import plural
from largebatch.lab.studies.metrics import (
    ENOUGH_SEEDS,
    Interval,
    Measurement,
    difference,
    interval_line,
    ratio,
)
from largebatch.lab.studies.runner import Records
from largebatch.lab.studies.study import Slot, Study
from largebatch.lab.studies.trained import CellResults, Result, cells_of, results_of
from largebatch.recipe.writing import dump_yaml
from largebatch.report.pages import (
    Chart,
    Code,
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

__all__ = ["cells_of", "make_page"]

_NOTE = (
    "Means over seeds with Student's interval of 95 %; two policies compare by the differences of "
    "the same seeds. Of many policies the best one is best by luck, too. A run that diverged "
    "counts as chance."
)
_TABLE = (
    "peak_lr is that which the search chose by held-out images; all else is of the validation "
    "images. A cost is that at the first evaluation at or above the target, of the seeds that "
    "reached it; seconds are those of updates and evaluations."
)


Criterion = Literal["cost", "accuracy"]
"""cost: updates to the target. accuracy: top-1 at the rate found."""


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
        return self.results.cell.variant

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
        unfinished = [cell.cell.variant for cell in cells if not cell.finished]
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
        else:
            scores = {one.seed: one.top1 for one in cell.seeds}
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


def spent(cell: CellResults, target: float | None, value: Callable[[Measurement], float]) -> float:
    """Return the mean cost over the seeds that reached a target, or of whole runs without one.

    NaN if there is none.
    """
    reached = [
        (run.evaluations[-1] if run.evaluations and not run.diverged else None)
        if target is None
        else run.cost(target)
        for run in cell.seeds
    ]
    known = [value(one) for one in reached if one is not None]
    return statistics.fmean(known) if known else math.nan


def make_page(study: Study, folder: Path, records: Records) -> Page:
    """Return the page of a study whose file is in `folder`, from its records."""
    found = [
        results_of(cell, records[cell.name])
        for cell in cells_of(study, folder)
        if cell.name in records
    ]
    return draw(study.name, found, targets=study.targets)


def draw(name: str, cells: Sequence[CellResults], *, targets: Sequence[float] = ()) -> Page:
    """Return the page of the cells; `targets` are fractions."""
    names = list(dict.fromkeys(cell.cell.configuration for cell in cells))
    variants = list(dict.fromkeys(cell.cell.variant for cell in cells))
    looks = {variant: series(place, variant) for place, variant in enumerate(variants)}
    inside = [[cell for cell in cells if cell.cell.configuration == each] for each in names]
    ranked = [one for some in inside for one in rank(some, by="accuracy").ranked]
    return Page(
        title=name,
        subtitle=", ".join(names),
        findings=[text for some in inside for text in _findings(some, targets)],
        is_sound=all(cell.finished and len(cell.seeds) >= ENOUGH_SEEDS for cell in cells),
        note=_NOTE,
        legend=("Policies", list(looks.values())),
        sections=[
            Section(
                title="Policies",
                parts=[_table(ranked, targets, looks)],
                notes=[_TABLE],
            ),
            *(
                Section(
                    title=some[0].cell.configuration,
                    parts=[_chart(some, targets, looks), _schedule(some, targets)],
                )
                for some in inside
            ),
        ],
        source="the records of a study",
    )


def _findings(cells: Sequence[CellResults], targets: Sequence[float]) -> Iterator[str]:
    """Yield the rankings of one recipe by accuracy and cost."""
    name = cells[0].cell.configuration
    rankings = [rank(cells, by="accuracy")]
    rankings += [rank(cells, by="cost", target=target) for target in targets]
    for ranking in rankings:
        yield f"{name}: {'; '.join(sentences(ranking))}."


def _schedule(cells: Sequence[CellResults], targets: Sequence[float]) -> Code:
    """Return the schedule of the best policy as a section of a recipe."""
    by: Criterion = "cost" if targets else "accuracy"
    best = rank(cells, by=by, target=max(targets, default=None)).ranked[0]
    recipe = best.results.cell.recipe_of(Slot(name="seed-1", seed=1), best.results.rate)
    text = "schedule:\n" + textwrap.indent(dump_yaml(recipe.schedule), "  ")
    return Code(name=f"schedule of {best.policy}", text=text)


def _table(ranked: Sequence[Ranked], targets: Sequence[float], looks: dict[str, Series]) -> Table:
    cells = [one.results for one in ranked]
    column = columns_over(cells)

    def mean(title: str, value: Callable[[Result], float | None], form: str) -> Column:
        return column(title, lambda cell: (it := cell.mean(value)) and it.mean, form)

    def costs(target: float | None) -> Iterator[Column]:
        of = "of the run" if target is None else f"to {100 * target:g} %"
        yield column(f"Updates {of}", lambda cell: spent(cell, target, lambda e: e.step), ",.0f")
        yield column(f"Seconds {of}", lambda cell: spent(cell, target, lambda e: e.seconds), ",.1f")
        if target is not None:
            yield column(
                f"reached {100 * target:g} %",
                lambda cell: (
                    f"{sum(run.cost(target) is not None for run in cell.seeds)} of "
                    f"{len(cell.seeds)}"
                ),
                None,
            )

    below = [one.against and one.against.scaled(100).with_ends(".2f") for one in ranked]
    columns = [
        column("Policy", lambda cell: cell.cell.variant, None),
        column("Recipe", lambda cell: cell.cell.configuration, None),
        mean("Top-1, %", lambda run: 100 * run.top1, ".2f"),
        column("±", lambda cell: cell.top1 and cell.top1.scaled(100).reach, ".2f"),
        Column("Points below the best", below),
        column("peak_lr", lambda cell: cell.rate, ",.8g"),
        *(one for target in (*targets, None) for one in costs(target)),
        mean("Loss: validation − training", lambda run: run.loss_difference, ".4f"),
        column("Seeds", lambda cell: len(cell.seeds), "d"),
        column("Diverged", lambda cell: cell.diverged, "d"),
    ]
    rows = [looks[cell.cell.variant] for cell in cells]
    printed = {one.title for one in columns[:6] + columns[-2:]}
    return Table(name="policies", columns=columns, series=rows, printed=printed)


def _chart(
    cells: Sequence[CellResults], targets: Sequence[float], looks: dict[str, Series]
) -> Chart:
    """Return accuracy against cost of one recipe."""
    name, target = cells[0].cell.configuration, max(targets, default=None)
    of = "of the run" if target is None else f"to {100 * target:g} %"
    costs = list[Line]()
    for cell in cells:
        updates = spent(cell, target, lambda one: one.step)
        if cell.top1 and math.isfinite(updates):
            costs.append(
                interval_line(looks[cell.cell.variant], [updates], [cell.top1.scaled(100)])
            )
    return line_chart(f"cost-{name}", Panel(lines=costs, x=f"Updates {of}", y="Top-1, %"))

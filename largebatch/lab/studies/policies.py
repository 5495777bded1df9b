"""The page of a study of policies: accuracy, cost, confidence and robustness of each.

A cost to a target is the mean of the seeds that reached it. A cell in which not all of them did is
on no Pareto front: the cost of the others is only known to be higher than what was run.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from largebatch.formatting import plural
from largebatch.lab.studies.lines import interval_line
from largebatch.lab.studies.metrics import ENOUGH_SEEDS, Cost, Costs, Interval, costs
from largebatch.lab.studies.recommend import rank, sentences
from largebatch.lab.studies.trained import CellResults, Result
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.report.pages import (
    Chart,
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
from largebatch.schedules.build import follow

Unit = Literal["updates", "images", "seconds"]
UNITS: tuple[Unit, ...] = ("updates", "images", "seconds")

_TARGETS = (*range(10, 90, 5), *range(90, 99), 99, 99.5, 99.7, 99.9)
"""In percent; candidates if a study has no targets."""

_POINTS = 300
"""Points of the line of a schedule."""

_NOTE = (
    "Means over seeds with Student's interval of 95 %; two policies compare by the differences of "
    "the same seeds. Of many policies the best one is best by luck, too. A run that diverged "
    "counts as chance."
)
_TABLE = (
    "The values are those that the search chose by held-out images; all else is of the validation "
    "images. A cost is that at the first evaluation at or above the target, of the seeds that "
    "reached it; seconds are those of updates and evaluations. AC is the average confidence of "
    "correct images, CD its deviation over these images, and CDAC that of the averages of the "
    "classes, as in LRBench (arXiv:1908.06477). The worst drop is how far top-1 falls at the worst "
    "of the other multiples of the rate. A policy is on a Pareto front if no other of its recipe "
    "has the accuracy for less, or more for as much."
)


class Axis(NamedTuple):
    """A cost: to a target, or of the whole run."""

    unit: Unit
    target: float | None
    """A fraction; None: the whole run."""

    @property
    def title(self) -> str:
        """Title of the axis.

        >>> Axis("updates", 0.95).title, Axis("seconds", None).title
        ('Updates to 95 %', 'Seconds of the run')
        """
        to = "of the run" if self.target is None else f"to {100 * self.target:g} %"
        return f"{self.unit.capitalize()} {to}"


def spent(cell: CellResults, target: float | None) -> Costs:
    """Return the costs over seeds; without a target, those of the runs that did not diverge."""
    return costs([_whole(run) if target is None else run.cost(target) for run in cell.seeds])


def _whole(run: Result) -> Cost | None:
    if run.diverged is not None or not run.evaluations:
        return None
    last = run.evaluations[-1]
    return Cost(
        updates=last.step, updates_before=last.step, images=last.images, seconds=last.seconds
    )


def cost_of(cell: CellResults, axis: Axis) -> float:
    """Return the mean cost; NaN if it is unknown."""
    found: Interval | None = getattr(spent(cell, axis.target), axis.unit)
    return math.nan if found is None else found.mean


def competes(cell: CellResults, axis: Axis) -> bool:
    """Return True if every seed has this cost, so that means compare."""
    found = spent(cell, axis.target)
    return found.reached == found.runs > 0 and math.isfinite(cost_of(cell, axis))


def pareto_front(cost: Sequence[float], values: Sequence[float]) -> list[int]:
    """Return the places that no other one dominates: as good at less, or better at as much.

    Those that are equal in both are all on it.

    >>> pareto_front([1.0, 2.0, 2.0, 3.0], [0.8, 0.9, 0.9, 0.9])
    [0, 1, 2]
    """
    front: list[int] = []
    for place in sorted(range(len(cost)), key=lambda one: (cost[one], -values[one])):
        last = front[-1] if front else place
        equal = (cost[place], values[place]) == (cost[last], values[last])
        if equal or values[place] > values[last]:
            front.append(place)
    return front


def choose_targets(cells: Iterable[CellResults]) -> tuple[float, ...]:
    """Return round accuracies that all seeds of half of the cells, and of the best one, reached."""
    lowest = sorted(
        min(max((each.top1 for each in run.evaluations), default=0.0) for run in cell.seeds)
        for cell in cells
        if cell.seeds
    )
    if not lowest:
        return ()
    reached = (lowest[len(lowest) // 2], lowest[-1])
    below = [[target / 100 for target in _TARGETS if target <= 100 * one] for one in reached]
    return tuple(sorted({max(found) for found in below if found}))


def make_page(name: str, cells: Sequence[CellResults], *, targets: Iterable[float] = ()) -> Page:
    """Return the page of the cells; `targets` are fractions, by default chosen by the results."""
    names = list(dict.fromkeys(cell.configuration for cell in cells))
    order = {cell.variant: place for place, cell in reversed(list(enumerate(cells)))}
    cells = sorted(
        cells,
        key=lambda one: (
            names.index(one.configuration),
            -one.top1.mean if one.top1 else math.inf,
        ),
    )
    variants = sorted({cell.variant for cell in cells}, key=lambda one: order[one])
    looks = {variant: series(place, variant) for place, variant in enumerate(variants)}
    chosen = sorted(set(targets) or choose_targets(cells), reverse=True)
    inside = [[cell for cell in cells if cell.configuration == each] for each in names]
    counts = [len(cell.seeds) for cell in cells]
    return Page(
        title=name,
        subtitle=", ".join(names),
        findings=[text for some in inside for text in _findings(some, chosen)],
        is_sound=min(counts) >= ENOUGH_SEEDS and all(cell.finished for cell in cells),
        note=_NOTE,
        legend=("Policies", list(looks.values())),
        sections=[
            Section(title="Policies", parts=[_table(inside, chosen, looks)], notes=[_TABLE]),
            *(
                Section(
                    title=f"Charts: {some[0].configuration}", parts=_charts(some, chosen, looks)
                )
                for some in inside
            ),
        ],
        source="the records of a study",
    )


def _findings(cells: Sequence[CellResults], targets: Sequence[float]) -> Iterator[str]:
    """Yield the rankings of one recipe by accuracy, cost and robustness."""
    name = cells[0].configuration
    rankings = [rank(cells, by="accuracy")]
    rankings += [rank(cells, by="cost", target=target) for target in targets[:1]]
    if any(cell.by_scale for cell in cells):
        rankings.append(rank(cells, by="robustness"))
    for ranking in rankings:
        yield f"{name}: {'; '.join(sentences(ranking))}."
    runs = [run for cell in cells for run in (*cell.trials, *cell.seeds, *cell.scaled)]
    hosts = dict.fromkeys(f"{run.host} ({run.hardware})" for run in runs if run.host)
    yield f"{name}: {plural(len(runs), 'run')}{' on ' * bool(hosts)}{', '.join(hosts)}."


def _table(
    groups: Sequence[Sequence[CellResults]], targets: Sequence[float], looks: dict[str, Series]
) -> Table:
    cells = [cell for some in groups for cell in some]
    column = columns_over(cells)
    keys = list(dict.fromkeys(key for cell in cells for key in cell.values))
    axes = [Axis(unit, target) for target in (*targets, None) for unit in UNITS]
    fronts = {cell.cell.name: list[str]() for cell in cells}
    for axis in axes:
        for some in groups:
            on = [cell for cell in some if competes(cell, axis) and cell.top1 is not None]
            tops = [cell.top1.mean for cell in on if cell.top1 is not None]
            for place in pareto_front([cost_of(cell, axis) for cell in on], tops):
                fronts[on[place].cell.name].append(axis.title)

    def mean(title: str, value: Callable[[Result], float | None], form: str) -> Column:
        return column(title, lambda cell: (it := cell.mean(value)) and it.mean, form)

    def cost(axis: Axis) -> Column:
        form = ",.1f" if axis.unit == "seconds" else ",.0f"
        return column(axis.title, lambda cell: cost_of(cell, axis), form)

    def reached(target: float) -> Column:
        def text(cell: CellResults) -> str:
            found = spent(cell, target)
            return f"{found.reached} of {found.runs}"

        return column(f"reached {100 * target:g} %", text, None)

    def value(key: str) -> Column:
        title = key.rpartition(".")[2]
        return column(title, lambda cell: cell.values.get(key), ",.8g")

    columns = [
        column("Policy", lambda cell: cell.variant, None),
        mean("Top-1, %", lambda run: 100 * run.top1, ".2f"),
        column("±", lambda cell: cell.top1 and cell.top1.scaled(100).reach, ".2f"),
        *(value(key) for key in keys),
        *(cost(axis) for axis in axes[:1]),
        *(reached(target) for target in targets),
        mean("Top-5, %", lambda run: 100 * run.top5, ".2f"),
        column("Pareto front", lambda cell: "; ".join(fronts[cell.cell.name]) or None, None),
        column(
            "At the end of the range",
            lambda cell: ", ".join(f"{key.rpartition('.')[2]} {end}" for key, end in
                                   cell.edges.items()) or None,
            None,
        ),
        *(cost(axis) for axis in axes[1:]),
        mean("AC", lambda run: run.average_confidence, ".4f"),
        mean("CD", lambda run: run.confidence_deviation, ".4f"),
        mean("CDAC", lambda run: run.class_confidence_deviation, ".4f"),
        mean("Loss: validation − training", lambda run: run.loss_difference, ".4f"),
        mean("Classes never correct", lambda run: run.classes_never_correct, ".1f"),
        column(
            "Worst drop, points",
            lambda cell: (it := cell.robustness) and 100 * it.worst_drop, ".2f",
        ),
        column("Seeds", lambda cell: len(cell.seeds), "d"),
        column("Diverged", lambda cell: cell.diverged, "d"),
        column("Recipe", lambda cell: cell.configuration, None),
        column("Status", lambda cell: None if cell.finished else "unfinished", None),
    ]  # fmt: skip
    printed = {one.title for one in columns[: 4 + len(keys)]}
    printed |= {"At the end of the range", "Worst drop, points", "Seeds", "Diverged", "Recipe"}
    printed |= {one.title for one in columns if one.title.startswith("reached")}
    rows = [looks[cell.variant] for cell in cells]
    return Table(name="policies", columns=columns, series=rows, printed=printed)


def _charts(
    cells: Sequence[CellResults], targets: Sequence[float], looks: dict[str, Series]
) -> list[Chart]:
    """Return accuracy against cost, schedules, the search, and robustness of one recipe."""
    some = [cell for cell in cells if cell.top1 is not None]
    name = cells[0].configuration
    charts: list[Chart] = []
    for axis in (Axis("updates", target) for target in (*targets[:1], None)):
        lines = [interval_line(looks[cell.variant], [cost_of(cell, axis)], [cell.top1.scaled(100)])
                 for cell in some if cell.top1 and math.isfinite(cost_of(cell, axis))]  # fmt: skip
        caption = "Mean of each policy with its interval of 95 %."
        panel = Panel(lines=lines, x=axis.title, y="Top-1, %")
        charts.append(line_chart(f"cost-{name}-{len(charts)}", panel, caption=caption))
    rates = []
    for cell in cells:
        recipe = cell.cell.seed_recipe(cell.values, seed=1)
        course = follow(recipe.schedule, make_plan(recipe.mathematics))
        steps = np.unique(np.linspace(0, len(course.rates) - 1, _POINTS).astype(int)).tolist()
        epochs, values = [course.epoch(n) for n in steps], [course.rates[n] for n in steps]
        rates.append(Line(series=looks[cell.variant], x=epochs, y=values, points=False))
    charts.append(line_chart(f"rates-{name}", Panel(lines=rates, x="Epoch", y="Learning rate")))
    for key in dict.fromkeys(key for cell in cells for key in cell.values):
        lines = [_trials_line(looks[cell.variant], cell, key) for cell in cells]
        panel = Panel(lines=lines, x=key, y="Accuracy on held-out images, %", log="x")
        caption = "Trials of the search; hollow: stopped early."
        charts.append(line_chart(f"search-{name}-{key}", panel, caption=caption))
    scales = [
        interval_line(
            looks[cell.variant],
            list(it.by_scale),
            [mean.scaled(100) for mean in it.by_scale.values()],
        )
        for cell in cells
        if (it := cell.robustness) is not None
    ]
    if scales:
        panel = Panel(lines=scales, x="Times the rate found", y="Top-1, %", log="x")
        charts.append(line_chart(f"scales-{name}", panel))
    return charts


def _trials_line(look: Series, cell: CellResults, key: str) -> Line:
    trials = [one for one in cell.trials if key in one.values and one.diverged is None]
    trials.sort(key=lambda one: one.values[key])
    assert cell.cell.search is not None
    return Line(
        series=look, x=[one.values[key] for one in trials],
        y=[100 * cell.cell.search.value_of(one) for one in trials], line=False,
        hollow=[one.pruned_after is not None for one in trials],
    )  # fmt: skip

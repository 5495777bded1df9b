"""The page of a study of policies: its findings, table and charts.

A policy has one colour in all charts; filters choose the configuration, the kinds of policies and
the Pareto front alone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from largebatch.errors import StudyError
from largebatch.lab.studies.metrics import ENOUGH_SEEDS
from largebatch.lab.studies.policies.by_class import MOST_CLASSES, by_class, classes_table
from largebatch.lab.studies.policies.robustness import confidence_chart, scales_chart
from largebatch.lab.studies.policies.standings import (
    Axis,
    Standing,
    Standings,
    describe,
    describe_interval,
    stand,
)
from largebatch.lab.studies.queue.results import CellResults, Result
from largebatch.recipe.arithmetic.plan import plan_updates
from largebatch.report.interactive import Column, Filter, Page, Section, Table, columns_over, tag_at
from largebatch.report.interactive_charts import DOTTED, Chart, Curve, Series, by_column, series
from largebatch.report.rates import WIDE
from largebatch.report.run import FloatArray
from largebatch.report.style import MUTED
from largebatch.schedules.build import follow

PAGE = "study.html"
"""Name of the page in the folder of a study."""

_POINTS = 300
"""Parts of a long shape, each drawn by its lowest and its highest rate."""

_SEEDS = (
    "Means over seeds with Student's interval of 95 %; two policies compare by the differences of "
    "the same seeds. Of many policies the best one is best by luck, too. "
)
_DIVERGED = "A run that diverged counts as chance."
_TABLE = (
    "The values found are those that the search chose by images held "
    "out; all else is of the validation images, the mean over seeds. A cost is that at the first "
    "evaluation at or above the target, of the seeds that reached it; seconds are those of updates "
    "and evaluations. AC is the average confidence, that is the probability of the images that are "
    "right, CD its deviation over these images, and CDAC that of the averages of the classes, as "
    "in LRBench (arXiv:1908.06477). The worst drop is how far top-1 falls at the worst of the "
    "other multiples of the rate. A policy is on a Pareto front if no other of its recipe has the "
    "accuracy for less, or more for as much."
)
_CLASSES = (
    "The more images of a class are wrong, the stronger the colour. Of more than "
    f"{MOST_CLASSES} classes those are listed in which the policies differ most."
)


class Drawn(NamedTuple):
    """A cell, and how it looks in all charts."""

    look: Series
    one: Standing


def make_page(found: Sequence[CellResults], *, targets: Iterable[float] = ()) -> Page:
    """Return the page of these cells, of one study or several.

    Without `targets`, accuracies as parts of 1, they are chosen by what was reached. Raises
    StudyError if no run has ended.
    """
    if not any(cell.search for cell in found):
        raise StudyError("the database holds no run that has ended: there is nothing to show yet")
    standings = stand(found, targets)
    drawn = [Drawn(_look(standings, one), one) for one in standings.cells]
    configurations = {
        f"configuration {place}": name for place, name in enumerate(standings.configurations)
    }
    kinds = {f"kind {kind}": kind for kind in sorted({_kind(one) for one in standings.cells})}
    front = Filter("", {"dominated": "Only the Pareto front"}, "without")
    compared = any(one.top1 and one.top1.number >= ENOUGH_SEEDS for one in standings.cells)
    return Page(
        title=", ".join(dict.fromkeys(cell.found.study for cell in standings.cells)),
        subtitle=", ".join(standings.configurations),
        findings=list(describe(standings)),
        is_sound=standings.has_enough_seeds and not any(one.status for one in standings.cells),
        note=_SEEDS * compared + _DIVERGED,
        legend=("Policies", [series(*each) for each in enumerate(standings.policies)]),
        filters=[
            Filter("Recipe", configurations),
            Filter("Kind", kinds, "several"),
            *([front] if standings.axes else []),
        ],
        sections=[
            Section(title="Policies", parts=[_table(standings, drawn)], notes=[_TABLE]),
            *_charts(standings, drawn),
        ],
        source="a database of studies",
    )


def _look(standings: Standings, one: Standing) -> Series:
    beside = [axis for axis in standings.axes if not standings.on_front(one, axis)]
    tags = (
        f"configuration {one.configuration}",
        f"kind {_kind(one)}",
        *(f"dominated {axis.column}" for axis in beside),
    )
    return series(one.policy, standings.policies[one.policy], tags=tags)


def _kind(one: Standing) -> str:
    """Return the kind of a policy as recipes name it."""
    return one.found.recipe.schedule.decay.kind


def _keys(standings: Standings) -> list[str]:
    """Return the keys that were searched."""
    return list(dict.fromkeys(key for one in standings.cells for key in one.found.settings.keys))


def _table(standings: Standings, drawn: Sequence[Drawn]) -> Table:
    """Return a row for each cell, the most accurate of each configuration first."""
    column = columns_over([one for _, one in drawn])

    def mean(title: str, value: Callable[[Result], float | None], form: str) -> Column:
        return column(title, lambda one: (it := one.found.mean(value)) and it.mean, form)

    several = len(standings.configurations) > 1
    names = [standings.configurations[one.configuration] for _, one in drawn]
    columns = [
        Column("Policy", [look.label for look, _ in drawn]),
        mean("Top-1, %", lambda one: 100 * one.top1, ".2f"),
        column("±", lambda one: one.top1 and one.top1.scaled(100).reach, ".2f"),
        *(each for axis in standings.axes[:1] for each in _cost_columns(axis, column)),
        mean("Top-5, %", lambda one: 100 * one.top5, ".2f"),
        column("Pareto front", partial(_fronts, standings), None),
        *(
            column(key.rpartition(".")[2], partial(_value, key=key), ",.8g")
            for key in _keys(standings)
        ),
        column("At the end of the range", _edges, None),
        *(each for axis in standings.axes[1:] for each in _cost_columns(axis, column)),
        mean("AC", lambda one: one.average_confidence, ".4f"),
        mean("CD", lambda one: one.confidence_deviation, ".4f"),
        mean("CDAC", lambda one: one.class_confidence_deviation, ".4f"),
        mean("Loss: validation − training", lambda one: one.loss_difference, ".4f"),
        mean("Classes never correct", lambda one: one.classes_never_correct, ".1f"),
        column(
            "Worst drop, points", lambda one: (it := one.robustness) and 100 * it.worst_drop, ".2f"
        ),
        column("Seeds", lambda one: len(one.found.seeds), "d"),
        column("Diverged", lambda one: one.found.diverged, "d"),
        *([Column("Recipe", names)] if several else []),
        column("Kind", _kind, None),
        column("Status", lambda one: one.status, None),
    ]
    printed = {
        *("Policy", "Top-1, %", "±", "reached", "At the end of the range", "Worst drop, points"),
        *("Seeds", "Diverged", "Recipe"),
        *(key.rpartition(".")[2] for key in _keys(standings)),
        *(Axis("updates", target).title for target in standings.targets),
    }
    looks = [look for look, _ in drawn]
    return Table(name="policies", columns=columns, series=looks, printed=printed)


def _value(one: Standing, *, key: str) -> float | None:
    return one.found.values.get(key)


def _cost_columns(axis: Axis, column: Callable[..., Column]) -> Iterator[Column]:
    def reached(one: Standing) -> str | None:
        found = one.costs(axis.target)
        return f"{found.reached} of {found.runs}" if found.runs else None

    form = ",.1f" if axis.unit == "seconds" else ",.0f"
    yield column(axis.title, lambda one: one.cost(axis), form)
    if axis.unit == "updates" and axis.target is not None:
        yield column("reached", reached, None)


def _fronts(standings: Standings, one: Standing) -> str | None:
    """Return the Pareto fronts that a cell is on, by target; None if there is none."""
    units: dict[str, list[str]] = {}
    for axis in standings.axes:
        if standings.on_front(one, axis):
            target = "run" if axis.target is None else f"{100 * axis.target:g} %"
            units.setdefault(target, []).append(axis.unit)
    return "; ".join(f"{target}: {', '.join(found)}" for target, found in units.items()) or None


def _edges(one: Standing) -> str | None:
    """Return the best values that are the lowest or the highest tried."""
    ends = (f"{key.rpartition('.')[2]} {end}" for key, end in one.found.edges.items())
    return ", ".join(ends) or None


def _charts(standings: Standings, drawn: Sequence[Drawn]) -> Iterator[Section]:
    """Yield the charts for which there is something."""
    if standings.axes:
        against = Filter("Against", {axis.column: axis.title for axis in standings.axes}, "axis")
        yield Section(
            title="Accuracy against cost", parts=[_costs_chart(standings, drawn)], filters=[against]
        )
    yield Section(title="Learning rates", parts=[_shapes_chart(drawn)])
    for place, key in enumerate(_keys(standings)):
        chart = _search_chart(drawn, key, name=f"search_{place}")
        yield Section(title=f"The search over {key}", parts=[chart])
    if any(one.robustness for _, one in drawn):
        yield Section(title="How much the rate matters", parts=[scales_chart(drawn)])
    if (confidence := confidence_chart(drawn)) is not None:
        yield Section(title="Confidence", parts=[confidence])
    for place, name in enumerate(standings.configurations):
        of = [(*each, by_class(each.one)) for each in drawn if each.one.configuration == place]
        known = [(look, found) for look, _, found in of if found is not None]
        if known:
            yield Section(
                title="By class" + f": {name}" * (len(standings.configurations) > 1),
                parts=[classes_table(known, name=f"classes_{place}")],
                notes=[_CLASSES],
                tags=(f"configuration {place}",),
            )


def _costs_chart(standings: Standings, drawn: Sequence[Drawn]) -> Chart:
    """Return top-1 against each cost: every seed, the mean with its interval, and the fronts."""
    titles = [title for title, _ in _costs(standings, drawn[0].one)]
    hover = [("top-1", "@text"), *((title, f"@cost_{k}") for k, title in enumerate(titles))]
    curves = [
        curve
        for axis in standings.axes
        for place in range(len(standings.configurations))
        for curve in _front(standings, axis, place)
    ]
    means = []
    for look, one in drawn:
        if one.top1 is None:
            continue
        cost = {axis.column: one.cost(axis) for axis in standings.axes}
        seeds = [
            {**cost, "top1": 100 * run.top1, "fill": 0.0, "size": 5} for run in one.found.seeds
        ]
        curves.append(Curve(series=look, data=by_column(seeds), line=False))
        top1 = one.top1.scaled(100)
        mean = {**cost, "top1": top1.mean, **top1.ends, "size": 11,
                "text": describe_interval(one.top1)}  # fmt: skip
        mean |= {f"cost_{place}": text for place, (_, text) in enumerate(_costs(standings, one))}
        means.append(Curve(series=look, data=by_column([mean]), line=False, hover=hover))
    return Chart(
        name="costs", x=standings.axes[0].column, y="top1", moves=True, height=440,
        x_title=standings.axes[0].title, y_title="Top-1, %",
        curves=[*curves, *means],
        caption="The mean of each policy (large), its seeds (small) and the interval of 95 % "
        "(line), which may leave the chart. The dotted line is the Pareto front: the accuracy to "
        "be had for a cost. Where some seeds never reached a target, the cost is that of the "
        "others, and the policy is not on the front.",
    )  # fmt: skip


def _front(standings: Standings, axis: Axis, configuration: int) -> Iterator[Curve]:
    """Yield the best accuracy at each cost, which rises in steps."""
    some = [one for one in standings.of(configuration) if standings.on_front(one, axis)]
    places = sorted({(one.cost(axis), 100 * one.top1.mean) for one in some if one.top1})
    if places:
        cost, top1 = np.array(places).T
        steps = {axis.column: np.repeat(cost, 2)[1:], "top1": np.repeat(top1, 2)[:-1]}
        tags = (f"configuration {configuration}", tag_at(axis.column))
        front = Series(-1, "Pareto front", MUTED, DOTTED, tags=tags)
        yield Curve(series=front, data=steps, points=False, x=axis.column)


def _costs(standings: Standings, one: Standing) -> Iterator[tuple[str, str]]:
    """Yield what a cell takes to each target and for the whole run, with its title."""
    for target in (*sorted(standings.targets, reverse=True), None):
        found = one.costs(target)
        title = "whole run" if target is None else f"to {100 * target:g} %"
        if found.updates is None or found.images is None or found.seconds is None:
            yield title, f"none of {found.runs} seeds"
            continue
        seconds = found.seconds.mean
        time = f", {seconds:,.1f} s" if math.isfinite(seconds) else ""
        spent = f"{found.updates.mean:,.0f} updates, {found.images.mean:,.0f} images{time}"
        yield title, f"{spent}; {found.reached} of {found.runs} seeds"


def _shapes_chart(drawn: Sequence[Drawn]) -> Chart:
    """Return the rate of every policy at the values found; of one being searched, its own rate."""
    recipes = [one.found.cell.seed_recipe(one.found.values, seed=1) for _, one in drawn]
    courses = [follow(recipe.schedule, plan_updates(recipe)) for recipe in recipes]
    peaks = [max(course.rates) for course in courses]
    log = max(peaks) > WIDE * min(peaks)
    hover = [("epoch", "@epoch{0,0.00}"), ("rate", "@rate{0.[00000000]}")]
    curves = []
    for (look, _), course in zip(drawn, courses, strict=True):
        rates = np.array(course.rates)
        places = thinned(rates)
        data = {
            "epoch": [course.epoch(int(place)) for place in places],
            "rate": np.where(rates[places] > 0, rates[places], math.nan) if log else rates[places],
        }
        curves.append(Curve(series=look, data=data, points=False, hover=hover))
    searched = any(one.status for _, one in drawn)
    return Chart(
        name="shapes", x="epoch", y="rate", height=400, log="y" if log else "",
        x_title="Epoch", y_title="Learning rate", curves=curves,
        caption="The rate of every policy at the values found"
        + "; of one that is being searched, the recipe's own" * searched
        + ".",
    )  # fmt: skip


def thinned(rates: FloatArray) -> npt.NDArray[np.intp]:
    """Return the places of rates that a line needs: all, or the extremes of equal parts."""
    if len(rates) <= 2 * _POINTS:
        return np.arange(len(rates))
    ends = np.linspace(0, len(rates), _POINTS + 1).astype(int)
    kept = {0, len(rates) - 1}
    for begin, end in pairwise(ends):
        part = rates[begin:end]
        kept |= {int(begin + part.argmin()), int(begin + part.argmax())}
    return np.array(sorted(kept))


def _search_chart(drawn: Sequence[Drawn], key: str, *, name: str) -> Chart:
    """Return the trials of every search over a key."""
    searches = [
        sorted(
            (_trial(one.found, trial, key) for trial in one.found.search if key in trial.values),
            key=lambda row: row["value"],
        )
        for _, one in drawn
    ]
    known = [row["accuracy"] for rows in searches for row in rows if not row["has_diverged"]]
    lowest = min(known, default=0.0)
    rate = (key.rpartition(".")[2], "@value{0.[00000000]}")
    hover = [rate, ("accuracy", "@accuracy{0.00} %"), ("trial", "@state")]
    placed = [
        [row | {"place": lowest if row["has_diverged"] else row["accuracy"]} for row in rows]
        for rows in searches
    ]
    return Chart(
        name=name, x="value", y="place", height=400, log="x",
        x_title=key, y_title="Accuracy on images held out, %",
        curves=[
            Curve(series=look, data=by_column(rows), line=False, hover=hover)
            for (look, _), rows in zip(drawn, placed, strict=True)
        ],
        caption="Every trial of the search, on training images held out. A star is what was found, "
        "a hollow circle a trial that was stopped early, at the accuracy it had there, a cross at "
        "the bottom one that diverged.",
    )  # fmt: skip


def _trial(found: CellResults, trial: Result, key: str) -> dict[str, Any]:
    """Return a point of a search: the trial found is a star, one that was stopped is hollow.

    One that diverged has no place of its own, for it would flatten the others.
    """
    look: dict[str, Any] = {"state": "whole", "marker": "circle", "size": 8, "fill": 1.0}
    if trial.diverged is not None:
        look |= {"state": "diverged: counts as chance", "marker": "x", "size": 10}
    elif trial.pruned_after is not None:
        look |= {"state": f"stopped after {trial.pruned_after:,} updates", "fill": 0.0}
    elif dict(trial.values) == dict(found.values):
        look |= {"state": "found", "marker": "star", "size": 18}
    return {
        "value": trial.values[key],
        "accuracy": 100 * found.settings.value_of(trial),
        "has_diverged": trial.diverged is not None,
        **look,
    }

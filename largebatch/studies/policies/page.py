"""The page of a study: what it has found, its table and its charts, in one file.

Words and layout stand in page.html. A policy has one colour in all charts, and a button that hides
it; further filters choose the configuration, the kinds of policies and the Pareto front alone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from largebatch.errors import StudyError
from largebatch.recipe.arithmetic.plan import plan_updates
from largebatch.report.interactive import (
    Series,
    add_hover,
    add_line,
    add_points,
    make_interactive_page,
    new_chart,
    new_source,
    only_at,
    series,
)
from largebatch.report.run import FloatArray
from largebatch.report.style import MUTED
from largebatch.report.table import Column, new_table
from largebatch.schedules.build import follow
from largebatch.storage import write_html
from largebatch.studies.metrics import ENOUGH_SEEDS, Costs, Interval
from largebatch.studies.policies.by_class import MOST_CLASSES, by_class, draw_classes
from largebatch.studies.policies.standings import (
    Axis,
    Standing,
    Standings,
    describe,
    describe_interval,
    stand,
)
from largebatch.studies.queue.results import CellResults, Result

if TYPE_CHECKING:
    from largebatch.report.interactive import Chart, Model
    from largebatch.report.table import Table

PAGE = "study.html"
"""What the page is called in the folder of a study."""

_POINTS = 300
"""Of a shape at most, twice: the lowest and the highest rate of so many parts."""

_WIDE = 30.0
"""From this ratio of two peaks on the axis of rates is logarithmic."""


class Drawn(NamedTuple):
    """A cell, and how it looks in all charts."""

    look: Series
    one: Standing


def write_page(found: Sequence[CellResults], path: Path, *, targets: Iterable[float] = ()) -> Path:
    """Write the page of these cells, of one study or several; return its path.

    Without `targets`, accuracies as parts of 1, they are chosen by what was reached. Raises
    StudyError where no run has ended, LargebatchError where the page cannot be written,
    MissingPackageError without Bokeh.
    """
    if not any(cell.search for cell in found):
        raise StudyError("the database holds no run that has ended: there is nothing to show yet")
    return write_html(path, make_page(stand(found, targets)))


def make_page(standings: Standings) -> str:
    """Return the HTML of the page. Raises MissingPackageError without Bokeh."""
    drawn = [Drawn(_look(standings, one), one) for one in standings.cells]
    models: dict[str, Model] = {"policies": _table(standings, drawn)}
    models |= dict(_charts(standings, drawn))
    configurations = {
        f"configuration {place}": name for place, name in enumerate(standings.configurations)
    }
    along = [only_at(axis.column) for axis in standings.axes[1:]]
    studies = dict.fromkeys(cell.found.study for cell in standings.cells)
    return make_interactive_page(
        Path(__file__).with_name("page.html"),
        models,
        hidden=[*list(configurations)[1:], *along],
        title=", ".join(studies),
        subtitle=", ".join(standings.configurations),
        sentences=list(describe(standings)),
        good=standings.has_enough_seeds and not any(one.status for one in standings.cells),
        legend_of=[series(place, name) for place, name in enumerate(standings.policies)],
        configurations=configurations,
        kinds={f"kind {kind}": kind for kind in sorted({_kind(one) for one in standings.cells})},
        axes={axis.column: axis.title for axis in standings.axes},
        searches={f"search_{place}": key for place, key in enumerate(_keys(standings))},
        compared=any(one.top1 and one.top1.number >= ENOUGH_SEEDS for one in standings.cells),
        maps={f"classes_{place}": tag for place, tag in enumerate(configurations)},
        most_classes=MOST_CLASSES,
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


def _percent(found: Interval | None) -> float | None:
    return None if found is None else 100 * found.mean


def _reach(found: Interval | None) -> float | None:
    """Return half the width of an interval in points; None of too few seeds."""
    return None if found is None or found.number < ENOUGH_SEEDS else 100 * (found.high - found.mean)


def _table(standings: Standings, drawn: Sequence[Drawn]) -> "Table":
    """Return a row for each cell, the most accurate of each configuration first."""

    def column(title: str, value: Callable[[Standing], object], form: str | None) -> Column:
        return Column(title, [value(one) for _, one in drawn], form)

    def mean(title: str, value: Callable[[Result], float | None], form: str) -> Column:
        return column(title, lambda one: (found := one.mean(value)) and found.mean, form)

    several = len(standings.configurations) > 1
    names = [standings.configurations[one.configuration] for _, one in drawn]
    columns = [
        Column("Policy", [look.label for look, _ in drawn]),
        column("Top-1, %", lambda one: _percent(one.top1), "0.00"),
        column("±", lambda one: _reach(one.top1), "0.00"),
        *(each for axis in standings.axes[:1] for each in _cost_columns(axis, column)),
        mean("Top-5, %", lambda one: 100 * one.top5, "0.00"),
        column("Pareto front", partial(_fronts, standings), None),
        *(
            column(key.rpartition(".")[2], partial(_value, key=key), "0.[00000000]")
            for key in _keys(standings)
        ),
        *(each for axis in standings.axes[1:] for each in _cost_columns(axis, column)),
        mean("AC", lambda one: one.average_confidence, "0.0000"),
        mean("CD", lambda one: one.confidence_deviation, "0.0000"),
        mean("CDAC", lambda one: one.class_confidence_deviation, "0.0000"),
        mean("Loss: validation − training", lambda one: one.loss_difference, "0.0000"),
        mean("Classes never correct", lambda one: one.classes_never_correct, "0.0"),
        column("Worst drop, points", _worst_drop, "0.00"),
        column("Seeds", lambda one: len(one.found.seeds), "0"),
        column("Diverged", lambda one: one.diverged, "0"),
        *([Column("Recipe", names)] if several else []),
        column("Kind", _kind, None),
        column("Status", lambda one: one.status, None),
    ]
    return new_table(
        columns,
        colours=[look.colour for look, _ in drawn],
        tags=[(f"series {look.place}", *look.tags) for look, _ in drawn],
    )


def _cost_columns(axis: Axis, column: Callable[..., Column]) -> Iterator[Column]:
    def spent(one: Standing) -> float:
        return one.cost(axis)

    yield column(axis.title, spent, "0,0.0" if axis.unit == "seconds" else "0,0")
    if axis.unit == "updates" and axis.target is not None:
        target = axis.target
        yield column("reached", lambda one: _reached(one.costs(target)), None)


def _fronts(standings: Standings, one: Standing) -> str | None:
    """Return on which Pareto fronts a cell is, by target; None where on none."""
    units: dict[str, list[str]] = {}
    for axis in standings.axes:
        if standings.on_front(one, axis):
            target = "run" if axis.target is None else f"{100 * axis.target:g} %"
            units.setdefault(target, []).append(axis.unit)
    return "; ".join(f"{target}: {', '.join(found)}" for target, found in units.items()) or None


def _value(one: Standing, *, key: str) -> float | None:
    return one.found.values.get(key)


def _reached(found: Costs) -> str | None:
    return f"{found.reached} of {found.runs}" if found.runs else None


def _worst_drop(one: Standing) -> float | None:
    return None if one.robustness is None else 100 * one.robustness.worst_drop


def _charts(standings: Standings, drawn: Sequence[Drawn]) -> "Iterator[tuple[str, Chart]]":
    """Yield those charts by name for which there is something."""
    if standings.axes:
        yield "costs", _draw_costs(standings, drawn)
    yield "shapes", _draw_shapes(drawn)
    for place, key in enumerate(_keys(standings)):
        yield f"search_{place}", _draw_search(drawn, key)
    if any(one.robustness for _, one in drawn):
        yield "scales", _draw_scales(drawn)
    for place in range(len(standings.configurations)):
        of = [(*each, by_class(each.one)) for each in drawn if each.one.configuration == place]
        known = [(look, one, found) for look, one, found in of if found is not None]
        if known:
            yield f"classes_{place}", draw_classes(known)


def _draw_costs(standings: Standings, drawn: Sequence[Drawn]) -> "Chart":
    """Draw top-1 against each cost: every seed, the mean with its interval, and the fronts."""
    first = standings.axes[0].column
    chart = new_chart(x=standings.axes[0].title, y="Top-1, %", height=440)
    for axis in standings.axes:
        for place in range(len(standings.configurations)):
            _add_front(chart, standings, axis, place)
    marks, seeds = [], []
    for look, one in drawn:
        if one.top1 is None:
            continue
        cost = {axis.column: one.cost(axis) for axis in standings.axes}
        if one.top1.number >= ENOUGH_SEEDS:
            ends = [100 * one.top1.low, 100 * one.top1.high]
            twice = {name: [value] * 2 for name, value in cost.items()}
            add_line(chart, look, new_source({**twice, "top1": ends}), first, "top1", moves=True)
        each = [100 * run.top1 for run in one.found.seeds]
        many = {name: [value] * len(each) for name, value in cost.items()}
        dots = {**many, "top1": each, "fill": [0.0] * len(each), "size": [5] * len(each)}
        seeds.append(add_points(chart, look, new_source(dots), first, "top1", moves=True))
        mean: dict[str, list[Any]] = {name: [value] for name, value in cost.items()}
        mean |= {"top1": [100 * one.top1.mean], "size": [11], "text": [describe_interval(one.top1)]}
        mean |= {f"cost_{place}": [text] for place, (_, text) in enumerate(_costs(standings, one))}
        marks.append(add_points(chart, look, new_source(mean), first, "top1", moves=True))
    chart.y_range.update(renderers=[*marks, *seeds])
    titles = [title for title, _ in _costs(standings, drawn[0].one)]
    rows = [(title, f"@cost_{place}") for place, title in enumerate(titles)]
    add_hover(chart, marks, [("top-1", "@text"), *rows])
    return chart


def _add_front(chart: "Chart", standings: Standings, axis: Axis, configuration: int) -> None:
    """Draw the best accuracy at each cost, which rises step by step."""
    some = [one for one in standings.of(configuration) if standings.on_front(one, axis)]
    places = sorted({(one.cost(axis), 100 * one.top1.mean) for one in some if one.top1})
    if not places:
        return
    cost, top1 = np.array(places).T
    steps = {axis.column: np.repeat(cost, 2)[1:], "top1": np.repeat(top1, 2)[:-1]}
    tags = (f"configuration {configuration}", only_at(axis.column))
    front = Series(-1, "Pareto front", MUTED, (2, 4), tags=tags)
    add_line(chart, front, new_source(steps), axis.column, "top1")


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
        yield (
            title,
            (
                f"{found.updates.mean:,.0f} updates, {found.images.mean:,.0f} images{time}; "
                f"{found.reached} of {found.runs} seeds"
            ),
        )


def _draw_shapes(drawn: Sequence[Drawn]) -> "Chart":
    """Draw the rate of every policy at the values found; of one being searched, its own rate."""
    recipes = [one.found.cell.seed_recipe(one.found.values, seed=1) for _, one in drawn]
    courses = [follow(recipe.schedule, plan_updates(recipe)) for recipe in recipes]
    peaks = [max(course.rates) for course in courses]
    log = max(peaks) > _WIDE * min(peaks)
    chart = new_chart(x="Epoch", y="Learning rate", height=400, log="y" if log else "")
    lines = []
    for (look, _), course in zip(drawn, courses, strict=True):
        rates = np.array(course.rates)
        places = thinned(rates)
        data = {
            "epoch": [course.epoch(int(place)) for place in places],
            "rate": np.where(rates[places] > 0, rates[places], math.nan) if log else rates[places],
        }
        lines.append(add_line(chart, look, new_source(data), "epoch", "rate"))
    add_hover(chart, lines, [("epoch", "@epoch{0,0.00}"), ("rate", "@rate{0.[00000000]}")])
    return chart


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


def _draw_search(drawn: Sequence[Drawn], key: str) -> "Chart":
    """Draw the trials of every search over a key."""
    name = key.rpartition(".")[2]
    chart = new_chart(x=key, y="Accuracy on images held out, %", height=400, log="x")
    searches = [_search_columns(one.found, key) for _, one in drawn]
    known = [place for data in searches for place in data["place"] if math.isfinite(place)]
    marks = []
    for (look, _), data in zip(drawn, searches, strict=True):
        places = [
            place if math.isfinite(place) else min(known, default=0) for place in data["place"]
        ]
        source = new_source({**data, "place": places})
        marks.append(add_points(chart, look, source, "value", "place"))
    rows = [(name, "@value{0.[00000000]}"), ("accuracy", "@accuracy{0.00} %"), ("trial", "@state")]
    add_hover(chart, marks, rows)
    return chart


def _search_columns(found: CellResults, key: str) -> dict[str, list[Any]]:
    """Return the data of a search by the values of a key; empty columns without a trial."""
    trials = [trial for trial in found.search if key in trial.values]
    rows = [_trial(found, trial, key) for trial in sorted(trials, key=lambda one: one.values[key])]
    columns = ("value", "accuracy", "place", "state", "marker", "size", "fill")
    return {name: [row[name] for row in rows] for name in columns}


def _trial(found: CellResults, trial: Result, key: str) -> dict[str, object]:
    """Return a row of the data of a search: the trial found is a star, one stopped is hollow.

    One that diverged has no place of its own, for it would flatten the others.
    """
    accuracy = 100 * found.settings.value_of(trial)
    state, marker, size, fill = "whole", "circle", 8, 1.0
    if trial.diverged is not None:
        state, marker, size = "diverged: counts as chance", "x", 10
    elif trial.pruned_after is not None:
        state, fill = f"stopped after {trial.pruned_after:,} updates", 0.0
    elif dict(trial.values) == dict(found.values):
        state, marker, size = "found", "star", 18
    return {
        "value": trial.values[key],
        "accuracy": accuracy,
        "place": accuracy if trial.diverged is None else math.nan,
        "state": state,
        "marker": marker,
        "size": size,
        "fill": fill,
    }


def _scales(one: Standing) -> Iterable[float]:
    return () if one.robustness is None else one.robustness.by_scale


def _draw_scales(drawn: Sequence[Drawn]) -> "Chart":
    """Draw top-1 over multiples of the rate found."""
    chart = new_chart(x="Times the rate found", y="Top-1, %", height=360, log="x")
    marks = []
    for look, one in drawn:
        if one.robustness is not None:
            means = one.robustness.by_scale
            source = new_source({
                "scale": list(means),
                "top1": [100 * found.mean for found in means.values()],
                "text": [describe_interval(found) for found in means.values()],
            })  # fmt: skip
            add_line(chart, look, source, "scale", "top1")
            marks.append(add_points(chart, look, source, "scale", "top1"))
    chart.xaxis.ticker = sorted({scale for _, one in drawn for scale in _scales(one)})
    add_hover(chart, marks, [("rate", "@scale{0.[00]} times"), ("top-1", "@text")])
    return chart

"""The page of a study of policies: accuracy, cost, confidence and robustness of each.

A cost to a target is the mean of the seeds that reached it; the cost of the others is only known to
be higher than what was run.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from largebatch.formatting import plural
from largebatch.lab.studies.metrics import ENOUGH_SEEDS, Measurement, interval, interval_line
from largebatch.lab.studies.recommend import rank, sentences
from largebatch.lab.studies.runner import Records
from largebatch.lab.studies.study import Slot, Study
from largebatch.lab.studies.trained import CellResults, Result, cells_of, results_of
from largebatch.recipe.arithmetic.plan import plan_updates
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

__all__ = ["cells_of", "make_page"]

_POINTS = 300
"""Points of the line of a schedule."""

_NOTE = (
    "Means over seeds with Student's interval of 95 %; two policies compare by the differences of "
    "the same seeds. Of many policies the best one is best by luck, too. A run that diverged "
    "counts as chance."
)
_TABLE = (
    "peak_lr is that which the search chose by held-out images; all else is of the validation "
    "images. A cost is that at the first evaluation at or above the target, of the seeds that "
    "reached it; seconds are those of updates and evaluations. AC is the average confidence of "
    "correct images, CD its deviation over these images, and CDAC that of the averages of the "
    "classes, as in LRBench (arXiv:1908.06477). The worst drop is how far top-1 falls at the worst "
    "of the other multiples of the rate."
)


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
    return interval(known).mean if known else math.nan


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
    names = list(dict.fromkeys(cell.configuration for cell in cells))
    variants = list(dict.fromkeys(cell.variant for cell in cells))
    looks = {variant: series(place, variant) for place, variant in enumerate(variants)}
    inside = [
        sorted(
            (cell for cell in cells if cell.configuration == each),
            key=lambda one: -one.top1.mean if one.top1 else math.inf,
        )
        for each in names
    ]
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
                parts=[_table([cell for some in inside for cell in some], targets, looks)],
                notes=[_TABLE],
            ),
            *(
                Section(title=some[0].configuration, parts=_charts(some, targets, looks))
                for some in inside
            ),
        ],
        source="the records of a study",
    )


def _findings(cells: Sequence[CellResults], targets: Sequence[float]) -> Iterator[str]:
    """Yield the rankings of one recipe by accuracy, cost and robustness."""
    name = cells[0].configuration
    rankings = [rank(cells, by="accuracy")]
    rankings += [rank(cells, by="cost", target=target) for target in targets]
    if any(cell.robustness for cell in cells):
        rankings.append(rank(cells, by="robustness"))
    for ranking in rankings:
        yield f"{name}: {'; '.join(sentences(ranking))}."
    runs = [run for cell in cells for run in (*cell.trials, *cell.seeds, *cell.scaled)]
    hosts = dict.fromkeys(f"{run.host} ({run.hardware})" for run in runs if run.host)
    yield f"{name}: {plural(len(runs), 'run')}{' on ' * bool(hosts)}{', '.join(hosts)}."


def _table(
    cells: Sequence[CellResults], targets: Sequence[float], looks: dict[str, Series]
) -> Table:
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

    columns = [
        column("Policy", lambda cell: cell.variant, None),
        column("Recipe", lambda cell: cell.configuration, None),
        mean("Top-1, %", lambda run: 100 * run.top1, ".2f"),
        column("±", lambda cell: cell.top1 and cell.top1.scaled(100).reach, ".2f"),
        column("peak_lr", lambda cell: cell.rate, ",.8g"),
        column("At the end of the range", lambda cell: cell.edge, None),
        *(one for target in (*targets, None) for one in costs(target)),
        mean("AC", lambda run: run.average_confidence, ".4f"),
        mean("CD", lambda run: run.confidence_deviation, ".4f"),
        mean("CDAC", lambda run: run.class_confidence_deviation, ".4f"),
        mean("Loss: validation − training", lambda run: run.loss_difference, ".4f"),
        column(
            "Worst drop, points",
            lambda cell: (it := cell.robustness) and 100 * it.worst_drop, ".2f",
        ),
        column("Seeds", lambda cell: len(cell.seeds), "d"),
        column("Diverged", lambda cell: cell.diverged, "d"),
        column("Status", lambda cell: None if cell.finished else "unfinished", None),
    ]  # fmt: skip
    rows = [looks[cell.variant] for cell in cells]
    return Table(name="policies", columns=columns, series=rows)


def _charts(
    cells: Sequence[CellResults], targets: Sequence[float], looks: dict[str, Series]
) -> list[Chart]:
    """Return accuracy against cost, schedules, the search, and robustness of one recipe."""
    name, target = cells[0].configuration, max(targets, default=None)
    of = "of the run" if target is None else f"to {100 * target:g} %"
    costs, rates, trials, scales = list[Line](), list[Line](), list[Line](), list[Line]()
    for cell in cells:
        look, found = looks[cell.variant], cell.robustness
        updates = spent(cell, target, lambda one: one.step)
        if cell.top1 and math.isfinite(updates):
            costs.append(interval_line(look, [updates], [cell.top1.scaled(100)]))
        recipe = cell.cell.recipe_of(Slot(name="seed-1", seed=1), cell.rate)
        course = follow(recipe.schedule, plan_updates(recipe))
        steps = np.unique(np.linspace(0, len(course.rates) - 1, _POINTS).astype(int)).tolist()
        epochs, values = [course.epoch(n) for n in steps], [course.rates[n] for n in steps]
        rates.append(Line(series=look, x=epochs, y=values, points=False))
        tried = [(one.rate, 100 * one.top1) for one in cell.trials if not one.diverged]
        if tried:
            x, y = zip(*sorted(tried), strict=True)
            trials.append(Line(series=look, x=x, y=y, line=False))
        if found is not None:
            means = [mean.scaled(100) for mean in found.by_scale.values()]
            scales.append(interval_line(look, list(found.by_scale), means))
    panels = {
        "cost": Panel(lines=costs, x=f"Updates {of}", y="Top-1, %"),
        "rates": Panel(lines=rates, x="Epoch", y="Learning rate"),
        "search": Panel(lines=trials, x="peak_lr", y="Held-out accuracy of trials, %", log="x"),
        "scales": Panel(lines=scales, x="Times the rate found", y="Top-1, %", log="x"),
    }
    return [line_chart(f"{key}-{name}", panel) for key, panel in panels.items() if panel.lines]

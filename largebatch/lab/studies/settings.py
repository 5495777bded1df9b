"""A study of settings: what each costs, and whether the best one transfers to other recipes.

After GTDLBench (arXiv:1810.12210), which carries the settings that are best for one data set over
to others, and looks at processor and memory use along with hyper-parameters.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from largebatch.formatting import MISSING
from largebatch.lab.studies.metrics import (
    ENOUGH_SEEDS,
    Interval,
    difference,
    interval,
    ratio,
    trade_off,
)
from largebatch.lab.studies.runner import Records
from largebatch.lab.studies.study import Study
from largebatch.lab.studies.trained import CellResults, Result, cells_of, results_of
from largebatch.report.pages import (
    Column,
    Page,
    Section,
    Series,
    Table,
    columns_over,
    series,
)

__all__ = ["cells_of", "make_page"]

_NOTE = (
    "Means over seeds with Student's interval of 95 %; two settings compare by pairs of the same "
    "seeds. A run that diverged has the accuracy of chance, and its costs do not count."
)
_TABLE = (
    "Training is the time of the updates. The rest is of all workers, from their set-up to the last"
    " update; memory that they share is counted in each. Times need a quiet machine."
)
_TRANSFER = (
    "Below each value is its distance from the own best setting of the recipe of the column, over "
    "pairs of seeds, with the interval of 95 % of all settings together: in points, or as a ratio "
    "of costs."
)


class Measure(NamedTuple):
    """A metric that chooses the best setting of a recipe."""

    title: str
    unit: str
    factor: float
    """Factor from recorded values to the unit."""

    form: str
    best: str
    """What the best setting is called: `the highest top-1`."""

    usage: str | None
    """Its name in the usage of a run; None: top-1, of which the highest is best."""

    def of(self, run: Result) -> float:
        """Return the value of a run; NaN where it was not measured."""
        return run.top1 if self.usage is None else run.used(self.usage)


MEASURES = (
    Measure("Top-1", "%", 100, ".2f", "the highest top-1", None),
    Measure("Training time", "s", 1, ",.1f", "the shortest training", "train_seconds"),
    Measure("Processor time", "s", 1, ",.1f", "the least processor time", "cpu_seconds"),
    Measure("Peak memory", "MB", 1e-6, ",.0f", "the least memory", "peak_memory_bytes"),
)


class Transfer(NamedTuple):
    """A recipe with the best setting of a recipe, which may be itself."""

    best_of: str
    used_on: str
    setting: str | None
    """The best one of `best_of`; None if none has a value for every seed."""

    value: Interval | None
    """Value of `used_on` with this setting."""

    gap: Interval | None
    """`value` minus that of its own best setting by seed, or the ratio of costs. None if seeds are
    missing, and for a cost of 0. Its interval holds for the own best one against all other settings
    together, for it was chosen among them."""

    def describe(self, measure: Measure) -> str:
        """Return the gap: a difference in points, or a ratio of costs."""
        if self.best_of == self.used_on:
            return "its own best"
        if self.gap is None:
            return "not measured with every seed"
        if measure.usage:
            return f"× {self.gap.with_ends('.2f')}"
        return self.gap.scaled(measure.factor).with_ends("+.2f").replace("-", "−")


def best_setting(settings: Mapping[str, Mapping[int, float]], *, higher: bool) -> str | None:
    """Return the setting with the best mean, of those with a value for every seed; None without."""
    seeds = {seed for found in settings.values() for seed in found}
    means = {
        name: interval(found.values()).mean
        for name, found in settings.items()
        if found and found.keys() == seeds
    }
    return (max if higher else min)(means, key=lambda name: means[name], default=None)


def transfer_matrix(
    values: Mapping[str, Mapping[str, Mapping[int, float]]], *, higher: bool
) -> list[list[Transfer]]:
    """Return a row for each recipe whose best setting is used, a column for each it is used on.

    `values` are by recipe, setting and seed. `higher`: the best value is the highest, as of an
    accuracy; else the lowest, as of a cost.
    """
    best = {recipe: best_setting(settings, higher=higher) for recipe, settings in values.items()}

    def transfer(best_of: str, used_on: str) -> Transfer:
        settings = values[used_on]
        value, own = (settings.get(best[name] or "", {}) for name in (best_of, used_on))
        gap, together = None, max(1, len(settings) - 1)
        if own and value.keys() == own.keys():
            if higher:
                gap = difference(value, own, together=together)
            elif min(*value.values(), *own.values()) > 0:
                gap = ratio(value, own, together=together)
        return Transfer(
            best_of=best_of,
            used_on=used_on,
            setting=best[best_of],
            value=interval(value.values()) if value else None,
            gap=gap,
        )

    return [[transfer(best_of, used_on) for used_on in values] for best_of in values]


def lost(matrix: Sequence[Sequence[Transfer]], *, higher: bool) -> list[Transfer]:
    """Return where the best setting of another recipe is worse than the own one, beyond noise."""
    return [
        one
        for row in matrix
        for one in row
        if one.gap is not None
        and one.best_of != one.used_on
        and (one.gap.high < 0 if higher else one.gap.low > 1)
    ]


def _matrix_of(cells: Sequence[CellResults], measure: Measure) -> list[list[Transfer]]:
    """Return the transfer matrix over the seeds that all settings of a recipe have run.

    Else a setting of an unfinished study that has more seeds would win by that alone.
    """
    values: dict[str, dict[str, dict[int, float]]] = {}
    for cell in cells:
        own = [one for one in cells if one.cell.configuration == cell.cell.configuration]
        common = set.intersection(*({run.seed for run in one.seeds} for one in own))
        values.setdefault(cell.cell.configuration, {})[cell.cell.variant] = {
            run.seed: value
            for run in cell.seeds
            if run.seed in common and math.isfinite(value := measure.of(run))
        }
    return transfer_matrix(values, higher=not measure.usage)


def findings(cells: Sequence[CellResults]) -> Iterator[str]:
    """Yield the best setting of each recipe by each measure, and what is lost by transfer."""
    for measure in MEASURES:
        matrix = _matrix_of(cells, measure)
        parts = [
            f"{row[0].setting} on {row[0].best_of}, {own.text(measure.form, f' {measure.unit}')}"
            for place, row in enumerate(matrix)
            if (value := row[place].value) and (own := value.scaled(measure.factor))
        ]
        parts += [
            f"on {one.used_on} that of {one.best_of} is {one.describe(measure)}"
            for one in lost(matrix, higher=not measure.usage)
        ]
        if parts:
            yield f"{measure.best.capitalize()}: {'; '.join(parts)}."


def make_page(study: Study, folder: Path, records: Records) -> Page:
    """Return the page of a study whose file is in `folder`, from its records."""
    found = [results_of(cell, records.get(cell.name, {})) for cell in cells_of(study, folder)]
    return draw(study.name, [one for one in found if one.seeds])


def draw(name: str, cells: Sequence[CellResults]) -> Page:
    """Return the page of the cells, which have at least one seed each."""
    recipes = list(dict.fromkeys(one.cell.configuration for one in cells))
    settings = list(dict.fromkeys(one.cell.variant for one in cells))
    looks = {setting: series(place, setting) for place, setting in enumerate(settings)}
    charts = []
    for recipe in recipes:
        points = [
            (looks[one.cell.variant], time.mean, one.top1.scaled(100))
            for one in cells
            if one.cell.configuration == recipe and one.top1
            and (time := one.mean(MEASURES[1].of)) is not None
        ]  # fmt: skip
        charts.append(trade_off(f"cost-{recipe}", "Training time, s", points, recipe))
    several = len(recipes) > 1 and len(settings) > 1
    return Page(
        title=name,
        subtitle=", ".join(recipes),
        findings=list(findings(cells)),
        is_sound=all(one.finished and len(one.seeds) >= ENOUGH_SEEDS for one in cells),
        note=_NOTE,
        legend=("Settings", list(looks.values())),
        sections=[
            Section(title="Settings", parts=[_table(cells, looks), *charts], notes=[_TABLE]),
            Section(
                title="Does the best setting transfer?",
                parts=[_matrix(cells, measure) for measure in MEASURES] if several else [],
                notes=[_TRANSFER] * several,
            ),
        ],
        source="the records of a study",
    )


def _table(cells: Sequence[CellResults], looks: Mapping[str, Series]) -> Table:
    column = columns_over(cells)

    def mean(title: str, value: Callable[[Result], float | None], form: str) -> Column:
        return column(title, lambda one: (it := one.mean(value)) and it.mean, form)

    def used(title: str, name: str, form: str, factor: float = 1.0) -> Column:
        return mean(title, lambda run: factor * run.used(name), form)

    def reach(title: str, measure: Measure) -> Column:
        def value(one: CellResults) -> float | None:
            found = one.mean(measure.of)
            return found and found.scaled(measure.factor).reach

        return column(title, value, measure.form)

    columns = [
        column("Setting", lambda one: one.cell.variant, None),
        column("Recipe", lambda one: one.cell.configuration, None),
        mean("Top-1, %", lambda run: 100 * run.top1, ".2f"),
        reach("±", MEASURES[0]),
        used("Training, s", "train_seconds", ",.1f"),
        reach("± s", MEASURES[1]),
        mean("Images/s", lambda run: run.images_per_second, ",.0f"),
        used("Processor, s", "cpu_seconds", ",.1f"),
        used("Cores used", "cores", ".2f"),
        used("Peak memory, MB", "peak_memory_bytes", ",.0f", 1e-6),
        used("GPU, %", "gpu_percent", ".0f"),
        used("GPU memory, MB", "gpu_memory_bytes", ",.0f", 1e-6),
        column("peak_lr", lambda one: one.rate, ",.8g"),
        column("Seeds", lambda one: len(one.seeds), "d"),
        column("Diverged", lambda one: one.diverged, "d"),
    ]
    rows = [looks[one.cell.variant] for one in cells]
    printed = {one.title for one in columns[:10]}
    return Table(name="settings", columns=columns, series=rows, printed=printed)


def _matrix(cells: Sequence[CellResults], measure: Measure) -> Table:
    matrix = _matrix_of(cells, measure)
    settings = [row[0].setting or MISSING for row in matrix]
    columns = [Column("Best setting of", [row[0].best_of for row in matrix], details=settings)]
    columns += [
        Column(
            f"used on {column[0].used_on}",
            [one.value and measure.factor * one.value.mean for one in column],
            measure.form,
            unit=f" {measure.unit}",
            details=[one.describe(measure) for one in column],
        )
        for column in zip(*matrix, strict=True)
    ]
    caption = f"{measure.title} of each recipe with the setting that has {measure.best} for another"
    return Table(
        name=f"transfer-{measure.title.lower().replace(' ', '-')}", columns=columns, caption=caption
    )

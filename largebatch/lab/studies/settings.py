"""The transfer of the settings of a study: whether the best one is best for other recipes, too.

After GTDLBench (arXiv:1810.12210), which carries the settings that are best for one data set over
to others, and looks at processor and memory use along with hyper-parameters.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from largebatch.formatting import MISSING
from largebatch.lab.studies.metrics import Interval, difference, interval, ratio
from largebatch.lab.studies.trained import CellResults, Result
from largebatch.report.pages import Column, Table


class Measure(NamedTuple):
    """A metric that chooses the best setting of a recipe."""

    title: str
    unit: str
    form: str
    best: str
    """What the best setting is called: `the highest top-1`."""

    of: Callable[[Result], float]
    """Its value of a run, in the unit; NaN where it was not measured."""

    higher: bool = False
    """True if the highest value is best."""


def used(name: str, factor: float = 1.0) -> Callable[[Result], float]:
    """Return the function of a run that is its usage of this name, times a factor."""
    return lambda run: factor * run.used(name)


TOP1 = Measure("Top-1", "%", ".2f", "the highest top-1", lambda run: 100 * run.top1, higher=True)
TRAINING = Measure("Training time", "s", ",.1f", "the shortest training", used("train_seconds"))
CPU = Measure("Processor time", "s", ",.1f", "the least processor time", used("cpu_seconds"))
MEMORY = Measure("Peak memory", "MB", ",.0f", "the least memory", used("peak_memory_bytes", 1e-6))
MEASURES = TOP1, TRAINING, CPU, MEMORY


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
        if measure.higher:
            return self.gap.with_ends("+.2f").replace("-", "−")
        return f"× {self.gap.with_ends('.2f')}"


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
    return transfer_matrix(values, higher=measure.higher)


def findings(cells: Sequence[CellResults]) -> Iterator[str]:
    """Yield the best setting of each recipe by each measure, and what is lost by transfer."""
    for measure in MEASURES:
        matrix = _matrix_of(cells, measure)
        form, unit = measure.form, f" {measure.unit}"
        parts = [
            f"{row[0].setting} on {row[0].best_of}, {own.with_ends(form, unit)}"
            for place, row in enumerate(matrix)
            if (own := row[place].value)
        ]
        parts += [
            f"on {one.used_on} that of {one.best_of} is {one.describe(measure)}"
            for one in lost(matrix, higher=measure.higher)
        ]
        if parts:
            yield f"{measure.best.capitalize()}: {'; '.join(parts)}."


def matrix(cells: Sequence[CellResults], measure: Measure) -> Table:
    """Return the table of a measure, for the best setting of a recipe on each other one."""
    rows = _matrix_of(cells, measure)
    settings = [row[0].setting or MISSING for row in rows]
    columns = [Column("Best setting of", [row[0].best_of for row in rows], details=settings)]
    columns += [
        Column(
            f"used on {column[0].used_on}, {measure.unit}",
            [one.value and one.value.mean for one in column],
            measure.form,
            details=[one.describe(measure) for one in column],
        )
        for column in zip(*rows, strict=True)
    ]
    caption = f"{measure.title} of each recipe with the setting that has {measure.best} for another"
    return Table(
        name=f"transfer-{measure.title.lower().replace(' ', '-')}", columns=columns, caption=caption
    )

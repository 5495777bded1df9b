"""Rank correlations of settings with results, over the settings of one recipe.

GTDLBench (arXiv:1810.12210) asks which hyper-parameters and which use of processor, memory and disk
go with training time and accuracy. Spearman's correlation asks only whether one rises with the
other. Settings are chosen and not drawn, so a correlation is no cause.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from largebatch.lab.studies.doubts import StudyFinding, doubts_about
from largebatch.lab.studies.trained import CellResults, TrainedRecord, value_at
from largebatch.optional import require_scipy
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import differences
from largebatch.report.pages import Column, PageSection, Table
from largebatch.report.seeds import CONFIDENCE

_NOTE = (
    "Spearman's rank correlations of means over seeds, over the settings of a recipe that did not "
    "diverge, with intervals of 95 % that hold together (Bonett and Wright 2000, Bonferroni). "
    "Settings are chosen and not drawn, so a correlation is no cause."
)

ENOUGH_SETTINGS = 5
"""With fewer no correlation is shown: its interval would hold nearly everything."""

Results = Mapping[str, Callable[[TrainedRecord], float]]
"""Values of a run by their titles; NaN where one was not measured."""


class Correlation(NamedTuple):
    """Spearman's correlation with its interval, and the number of settings."""

    rho: float
    low: float
    high: float
    number: int

    @property
    def is_sure(self) -> bool:
        """True if the interval excludes 0."""
        return self.low > 0 or self.high < 0


def correlation(
    first: Sequence[float], second: Sequence[float], *, together: int = 1
) -> Correlation | None:
    """Return the correlation of pairs of numbers; None for few pairs or constant values.

    Pairs with a NaN are left out. The interval is that of Bonett and Wright 2000 (Psychometrika
    65, doi 10.1007/BF02294183); `together` as in metrics.interval.

    >>> found = correlation([1, 2, 3, 4, 5], [1, 4, 9, 16, 25])
    >>> found.rho, found.number
    (1.0, 5)
    """
    pairs = [pair for pair in zip(first, second, strict=True) if all(map(math.isfinite, pair))]
    if len(pairs) < ENOUGH_SETTINGS:
        return None
    first, second = zip(*pairs, strict=True)
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    stats = require_scipy("scipy.stats")
    rho = round(float(stats.spearmanr(first, second).statistic), 12)  # 1, not 1 - 2e-16
    number = len(pairs)
    # A correlation of 1 has no interval on Fisher's scale. It gets that of an order with one pair
    # of neighbours exchanged, the closest one to it.
    most = 1 - 12 / (number**3 - number)
    bounded = max(-most, min(most, rho))
    level = 1 - (1 - CONFIDENCE) / together / 2
    reach = float(stats.norm.ppf(level)) * math.sqrt((1 + bounded**2 / 2) / (number - 3))
    low, high = math.tanh(math.atanh(bounded) - reach), math.tanh(math.atanh(bounded) + reach)
    return Correlation(rho, min(low, rho), max(high, rho), number)


def numbers_of(cells: Sequence[CellResults]) -> dict[str, list[float]]:
    """Return the numbers in which the settings differ, by dotted key, one for each cell.

    Besides keys of the recipe they are `workers`, `threads` and `device_batch`, that of the plan.
    A key counts if all cells have a number there.
    """
    trees = []
    for cell in cells:
        recipe = cell.cell.recipe
        setting = cell.cell.setting
        plan = make_plan(recipe, workers=setting.workers)
        outside = {
            "workers": setting.workers,
            "threads": setting.threads,
            "device_batch": plan.device_batch,
        }
        trees.append({**recipe.model_dump(mode="json"), **outside})
    keys: dict[str, None] = {}
    for tree in trees[1:]:
        keys |= dict.fromkeys(key for key, _, _ in differences(trees[0], tree))
    numbers = {}
    for key in keys:
        try:
            values = [value_at(tree, key) for tree in trees]
        except LookupError:  # a setting has another kind of optimizer, or no such section
            continue
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            numbers[key] = [float(value) for value in values]
    return numbers


def correlations(
    cells: Sequence[CellResults], results: Results
) -> dict[tuple[str, str], Correlation]:
    """Return the correlations of a recipe by pairs of titles: settings with results, and results.

    Values are means over seeds; settings with a run that diverged are left out. All intervals hold
    together.
    """
    sound = [cell for cell in cells if cell.seeds and not cell.diverged]
    if len(sound) < ENOUGH_SETTINGS:
        return {}
    settings = numbers_of(sound)
    measured = {}
    for title, value in results.items():
        means = [cell.mean(value) for cell in sound]
        measured[title] = [math.nan if mean is None else mean.mean for mean in means]
    titles = list(measured)
    pairs = [(setting, result) for setting in settings for result in titles]
    pairs += [(one, other) for place, one in enumerate(titles) for other in titles[place + 1 :]]
    values = {**settings, **measured}
    by_pair = {}
    for pair in pairs:
        first, second = (values[title] for title in pair)
        result = correlation(first, second, together=len(pairs))
        if result is not None:
            by_pair[pair] = result
    return by_pair


def findings(
    recipes: Mapping[str, Sequence[CellResults]], results: Results, *, timed: Collection[str]
) -> Iterator[StudyFinding]:
    """Yield the correlations of each recipe whose intervals exclude 0.

    Those of results in `timed` are times, which need a quiet machine.
    """
    runs_of_study = [run for cells in recipes.values() for cell in cells for run in cell.seeds]
    for recipe, cells in recipes.items():
        by_pair = correlations(cells, results)
        number = max((result.number for result in by_pair.values()), default=0)
        for of_time, kind in ((False, "without times"), (True, "with times")):
            chosen = {
                pair: result
                for pair, result in by_pair.items()
                if of_time == any(title in timed for title in pair)
            }
            if not chosen:
                continue
            sure = [
                f"{one} with {other} {result.rho:+.2f} ({result.low:+.2f} to {result.high:+.2f})"
                for (one, other), result in chosen.items()
                if result.is_sure
            ]
            yield StudyFinding(
                about=f"{recipe}, rank correlations over {number} settings, {kind}",
                text="; ".join(sure) or "no interval excludes 0",
                doubts=doubts_about(
                    [cell.runs for cell in cells if not cell.diverged],
                    study=runs_of_study,
                    of_time=of_time,
                ),
            )


def section_of(recipes: Mapping[str, Sequence[CellResults]], results: Results) -> PageSection:
    """Return a table of correlations for each recipe, with their intervals; empty without any."""
    tables = []
    for recipe, cells in recipes.items():
        by_pair = correlations(cells, results)
        if not by_pair:
            continue
        rows = list(dict.fromkeys(one for one, _ in by_pair))
        columns = [Column(recipe, rows)]
        for other in dict.fromkeys(other for _, other in by_pair):
            column = [by_pair.get((one, other)) for one in rows]
            ends = [
                f"{result.low:+.2f} to {result.high:+.2f}" if result else "" for result in column
            ]
            columns.append(
                Column(other, [result and result.rho for result in column], "+.2f", details=ends)
            )
        tables.append(Table(name=f"correlations-{recipe}", columns=columns))
    notes = [_NOTE] if tables else []
    return PageSection(title="Correlations", parts=tables, notes=notes)

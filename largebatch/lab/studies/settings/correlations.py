"""Correlations of costs with settings and with each other, over the settings of a recipe.

GTDLBench (arXiv:1810.12210) looks at processor and memory use along with hyper-parameters. Here a
correlation is Spearman's, of the means over seeds: any cost that only rises counts as 1.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from largebatch.errors import shorten
from largebatch.lab.studies.metrics import CONFIDENCE
from largebatch.lab.studies.queue.results import Result
from largebatch.lab.studies.settings.settings import Findings, Measured
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.report.interactive import Column, Section, Table

ENOUGH_SETTINGS = 5
"""With fewer no correlation is shown: its interval would hold nearly everything."""

_SHOWN = 3
"""Correlations that a sentence names at most."""

_NOTE = (
    "Spearman's rank correlations of means over seeds, over the settings of a recipe that did not "
    "diverge, with the interval of 95 % (Bonett and Wright 2000), each by itself. Colours: the "
    "stronger, the farther from 0; none where the interval holds 0. Settings are chosen and not "
    "drawn, so a correlation says how these lie, and not what causes what."
)


MEASURES: dict[str, Callable[[Result], float]] = {
    "Top-1": lambda run: run.top1,
    "Images/s": lambda run: math.nan if run.diverged else run.images_per_second or math.nan,
    "Training time": lambda run: run.used("train_seconds"),
    "Processor time": lambda run: run.used("cpu_seconds"),
    "Cores used": lambda run: run.used("cores"),
    "Peak memory": lambda run: run.used("peak_memory_bytes"),
    "Read from disk": lambda run: run.used("read_bytes"),
}


class Correlation(NamedTuple):
    """Spearman's correlation, its interval and the number of settings."""

    rho: float
    low: float
    high: float
    number: int

    @property
    def is_sure(self) -> bool:
        """True if the interval excludes 0."""
        return self.low > 0 or self.high < 0


def correlation(one: Sequence[float], other: Sequence[float]) -> Correlation | None:
    """Return the correlation of pairs of finite numbers; None for few pairs or constant values.

    >>> found = correlation([1, 2, 3, 4, 5], [1, 4, 9, 16, 25])
    >>> found.rho, found.number
    (1.0, 5)
    """
    both = zip(one, other, strict=True)
    pairs = [pair for pair in both if all(map(math.isfinite, pair))]
    if len(pairs) < ENOUGH_SETTINGS or any(len(set(each)) < 2 for each in zip(*pairs, strict=True)):
        return None
    from scipy.stats import norm, spearmanr

    rho = round(float(spearmanr(*zip(*pairs, strict=True)).statistic), 12)
    number = len(pairs)
    most = 1 - 12 / (number**3 - number)  # that of orders with one pair of neighbours exchanged
    bounded = max(-most, min(most, rho))
    reach = float(norm.ppf((1 + CONFIDENCE) / 2))
    reach *= math.sqrt((1 + bounded**2 / 2) / (number - 3))
    low, high = (math.tanh(math.atanh(bounded) + end) for end in (-reach, reach))
    return Correlation(rho, min(low, rho), max(high, rho), number)


def _columns(findings: Findings, cells: Sequence[Measured]) -> dict[str, list[float]]:
    """Return the numeric keys and the measures of cells, by name."""
    keys = {
        key.rpartition(".")[2]: [float(one.at(key)) for one in cells]
        for key in findings.numeric_keys
    }

    def mean(one: Measured, value: Callable[[Result], float]) -> float:
        found = one.found.mean(value)
        return math.nan if found is None else found.mean

    batches = [make_plan(one.found.recipe, workers=one.found.workers).device_batch for one in cells]
    keys["device_batch"] = list(map(float, batches))
    measures = {name: [mean(one, value) for one in cells] for name, value in MEASURES.items()}
    return keys | measures


def correlations(findings: Findings, place: int) -> dict[tuple[str, str], Correlation]:
    """Return the correlations of a recipe: of each key and measure with each other measure."""
    cells = [one for one in findings.of(place) if not one.found.diverged]
    columns = _columns(findings, cells)
    names = list(columns)
    found = {
        (one, other): correlation(columns[one], columns[other])
        for one in names
        for other in MEASURES
        if one != other
    }
    return {pair: each for pair, each in found.items() if each is not None}


def describe(findings: Findings) -> Iterator[str]:
    """Yield the strongest sure correlations of each recipe, one of each pair."""
    for place, name in enumerate(findings.recipes):
        every = correlations(findings, place)
        sure = {frozenset(pair): (pair, found) for pair, found in every.items() if found.is_sure}
        ordered = sorted(sure.values(), key=lambda each: -abs(each[1].rho))
        shown = [
            f"{one.lower()} with {other.lower()} {found.rho:+.2f} ({found.low:+.2f} to "
            f"{found.high:+.2f})"
            for (one, other), found in ordered
        ]
        if every:
            number = max(found.number for found in every.values())
            words = shorten(shown, most=_SHOWN, between="; ") if shown else "none excludes 0"
            yield f"{name}: rank correlations over {number} settings: {words}."


def sections(findings: Findings) -> Iterator[Section]:
    """Yield the section of the page, if any recipe has enough settings."""
    tables = [
        _table(name, correlations(findings, place), place)
        for place, name in enumerate(findings.recipes)
    ]
    known = [table for table in tables if table is not None]
    if known:
        yield Section(title="Correlations", parts=known, notes=[_NOTE])


def _table(name: str, found: dict[tuple[str, str], Correlation], place: int) -> Table | None:
    rows = list(dict.fromkeys(one for one, _ in found))
    others = [other for other in MEASURES if any(pair[1] == other for pair in found)]
    if not found:
        return None

    def column(other: str) -> Column:
        cells = [found.get((one, other)) for one in rows]
        return Column(
            other,
            [each and each.rho for each in cells],
            "+.2f",
            details=[f"{each.low:+.2f} to {each.high:+.2f}" if each else "" for each in cells],
            strengths=[abs(each.rho) if each and each.is_sure else 0.0 for each in cells],
        )

    number = max(each.number for each in found.values())
    return Table(
        name=f"correlations_{place}",
        columns=[Column(f"{name}, {number} settings", rows), *map(column, others)],
    )

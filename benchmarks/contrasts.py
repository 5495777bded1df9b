"""Differences between cells that share seeds, with intervals by the noise of all cells.

A difference of two cells with three seeds has two degrees of freedom of its own, and an interval of
more than four standard errors. What cells and seeds leave of the values of all cells has (cells -
1)(seeds - 1), if noise is as large in all of them: cells that fail are to be left out of it. Values
of one run that go together, as before and after a stage, make the intervals too wide, not narrow.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from scipy.stats import t

from largebatch.lab.studies.metrics import CONFIDENCE, Interval

BySeed = Mapping[int, float]
"""Value of every seed of a cell."""

FAILS = 0.15
"""Top-1 of ten classes below which a run failed."""


class Noise(NamedTuple):
    """Residuals of values without the means of their cells and of their seeds."""

    deviation: float
    freedom: int


def no_run_fails(*cells: BySeed) -> bool:
    """Return True if every cell has runs, none of which failed.

    >>> no_run_fails({1: 0.8}, {1: 0.7}), no_run_fails({1: 0.8}, {1: 0.1}), no_run_fails({})
    (True, False, False)
    """
    return all(cell and min(cell.values()) >= FAILS for cell in cells)


def none_fails(cells: Iterable[BySeed]) -> list[BySeed]:
    """Return the cells of which no run failed; a cell without runs is none of them.

    >>> none_fails([{1: 0.8, 2: 0.1}, {1: 0.8, 2: 0.7}, {}])
    [{1: 0.8, 2: 0.7}]
    """
    return [cell for cell in cells if no_run_fails(cell)]


def noise_of(cells: Sequence[BySeed]) -> Noise:
    """Return the standard deviation of the residuals of cells that all have the same seeds.

    Raises SystemExit for fewer than two cells or seeds, which have no residuals.

    >>> noise_of([{1: 0.0, 2: 2.0}, {1: 3.0, 2: 3.0}])
    Noise(deviation=1.0, freedom=1)
    """
    seeds = list(cells[0]) if cells else []
    if min(len(cells), len(seeds)) < 2:
        raise SystemExit("an interval needs two cells without failures, and two seeds of each")
    by_seed = {seed: statistics.fmean(cell[seed] for cell in cells) for seed in seeds}
    whole = statistics.fmean(by_seed.values())
    squares = math.fsum(
        (cell[seed] - mean - by_seed[seed] + whole) ** 2
        for cell in cells
        for mean in [statistics.fmean(cell.values())]
        for seed in seeds
    )
    freedom = (len(cells) - 1) * (len(seeds) - 1)
    return Noise(math.sqrt(squares / freedom), freedom)


def contrast(terms: Sequence[tuple[float, BySeed]], noise: Noise, *, together: int = 1) -> Interval:
    """Return a weighted sum of means, with weights that sum up to zero, and its interval.

    So many intervals `together` hold the true values with CONFIDENCE (Bonferroni).
    """
    mean = math.fsum(weight * statistics.fmean(cell.values()) for weight, cell in terms)
    error = math.sqrt(math.fsum(weight**2 / len(cell) for weight, cell in terms)) * noise.deviation
    reach = error * float(t.ppf(1 - (1 - CONFIDENCE) / 2 / together, noise.freedom))
    number = min(len(cell) for _, cell in terms)
    return Interval(mean, mean - reach, mean + reach, number)

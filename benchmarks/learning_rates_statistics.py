"""Statistics of policies for learning_rates_tables.py: costs, spreads, and agreement of orders.

Policies are the records of one configuration by name, each with the runs of its seeds.
"""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from contrasts import BySeed, Noise, contrast, noise_of
from scipy.stats import spearmanr

from largebatch.lab.studies.metrics import (
    Cost,
    Interval,
    Ratio,
    at_every_scale,
    ratio_of_updates,
    robustness,
)

Policies = Mapping[str, Mapping[str, Any]]


def target_of(policies: Policies, level: float = 1.0) -> float:
    """Return `level` times the best evaluation of the constant rate's worst seed, a whole per cent.

    >>> runs = [{"curve": [[10, 0.815], [20, 0.808]]}, {"curve": [[10, 0.83]]}]
    >>> target_of({"fix": {"seeds": runs}}), target_of({"fix": {"seeds": runs}}, 0.9)
    (0.81, 0.73)
    """
    runs = policies["fix"]["seeds"]
    best = (max((top1 for _, top1 in one["curve"]), default=0) for one in runs)
    return math.floor(100 * level * min(best)) / 100


def top1_of(cell: Mapping[str, Any]) -> BySeed:
    """Return the accuracy at the end by seed."""
    return {one["seed"]: one["top1"] for one in cell["seeds"]}


def costs_of(cell: Mapping[str, Any], target: float) -> dict[int, Cost | None]:
    """Return the updates at the first evaluation at or above a target, by seed.

    None where there is none, or the run diverged after it.
    """
    found: dict[int, Cost | None] = {}
    for one in cell["seeds"]:
        steps = [0, *(step for step, _ in one["curve"])]
        reached = [at for at, (_, top1) in enumerate(one["curve"], start=1) if top1 >= target]
        found[one["seed"]] = None
        if reached and not one["diverged"]:
            step, before = steps[reached[0]], steps[reached[0] - 1]
            found[one["seed"]] = Cost(
                updates=step, updates_before=before, images=0, seconds=math.nan
            )
    return found


def sooner(
    cell: Mapping[str, Any], other: Mapping[str, Any], target: float, *, together: int = 1
) -> Ratio:
    """Return the ratio of the updates of another policy to those of one."""
    return ratio_of_updates(costs_of(other, target), costs_of(cell, target), together=together)


def whole(policies: Policies) -> Policies:
    """Return the policies without a diverged run: chance accuracy would dominate any spread."""
    return {
        name: cell
        for name, cell in policies.items()
        if all(run["diverged"] is None for run in cell["seeds"])
    }


def noise(policies: Policies) -> Noise:
    """Return the noise of top-1, from the policies without a diverged run."""
    return noise_of([top1_of(cell) for cell in whole(policies).values()])


def points(policies: Policies, one: str, other: str, *, together: int = 1) -> Interval:
    """Return the difference in top-1 of one policy to another, in points."""
    terms = [(1.0, top1_of(policies[one])), (-1.0, top1_of(policies[other]))]
    return contrast(terms, noise(policies), together=together).scaled(100)


def areas_of(cell: Mapping[str, Any]) -> BySeed:
    """Return the mean top-1 over the multiples of the best rate, by seed."""
    runs = (*cell["seeds"], *cell["scaled"])
    every = at_every_scale((one["seed"], one["scale"], one["top1"]) for one in runs)
    return {seed: robustness(scales).area for seed, scales in every.items()}


def spread_of(policies: Policies) -> tuple[float, float]:
    """Return the spread of policies' means, and the part of it that is not noise of seeds.

    The standard deviation of the means without that of their errors, and the reliability of the
    means (Spearman 1904), from the analysis of variance of policies and seeds; by the policies of
    which no run diverged.
    """
    cells = [top1_of(cell) for cell in whole(policies).values()]
    error = noise_of(cells).deviation ** 2 / len(cells[0])
    means = [statistics.fmean(cell.values()) for cell in cells]
    variance = statistics.variance(means)
    true = max(0.0, variance - error)
    return math.sqrt(true), true / variance if variance else 0.0


def rank_correlation(one: Policies, other: Policies) -> float:
    """Return Spearman's rho of the mean top-1 of policies that both have.

    By those of which no run diverged. It has no interval: other seeds add their noise to the
    ranks, so that the ends of rho over them lie too low. What is sure of two rankings are `orders`.
    """
    both = whole(one), whole(other)
    names = [name for name in both[0] if name in both[1]]
    means = [[statistics.fmean(top1_of(found[name]).values()) for name in names] for found in both]
    return float(spearmanr(*means).statistic)


def orders(one: Policies, other: Policies) -> tuple[int, int, int]:
    """Return the numbers of pairs of policies with surely another order, and surely the same.

    And how many pairs there are, of policies of which no run diverged. Surely: together for all
    pairs of both.
    """
    one, other = whole(one), whole(other)
    names = [name for name in one if name in other]
    pairs = [(a, b) for at, a in enumerate(names) for b in names[at + 1 :]]
    signs = [
        [_sign(points(found, a, b, together=2 * len(pairs))) for a, b in pairs]
        for found in (one, other)
    ]
    products = [a * b for a, b in zip(*signs, strict=True)]
    return products.count(-1), products.count(1), len(pairs)


def _sign(found: Interval) -> int:
    return (found.low > 0) - (found.high < 0)

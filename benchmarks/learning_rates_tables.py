"""Print the tables of docs/studies/learning-rates.md from the results of learning_rates.py.

    python benchmarks/learning_rates_tables.py

Reads the newest benchmarks/results/learning_rates_<machine>_<date>.json and trains nothing.
Intervals are Student's at 95 % over the seeds, and those of a table hold together (Bonferroni, over
its lines within a configuration or over configurations, as its title says). Ratios are paired by
seed. Differences of policies are by the noise of all policies of their configuration of which no
run diverged (contrasts.py), with that of seeds alone: a rate found by another search is another
rate, which the line of `searched again` shows. Spreads and rank correlations are of those policies,
too, and have no intervals: what is sure of two rankings are the pairs that are reversed or kept.

A configuration has three targets: the highest whole per cent that the best evaluation of every seed
of the constant rate reaches, and 95 and 90 % of it.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from contrasts import BySeed
from learning_rates import AGAIN, CONFIGURATIONS, FACTORIAL, NAME, ONE_RATE, Configuration
from learning_rates_statistics import (
    Policies,
    areas_of,
    costs_of,
    orders,
    points,
    rank_correlation,
    sooner,
    spread_of,
    target_of,
    top1_of,
    whole,
)
from measuring import RESULTS, newest

from largebatch.lab.studies.metrics import Interval, Ratio, difference, interval

CYCLES = ("tri", "tri-tables", "tri2", "triexp", "sin", "sin2", "sinexp", "cos", "composite")
"""LRBench's cyclic policies, and the composite one."""

DEFAULTS = {"digits": "inv", "fashion_mnist": "inv", "cifar10": "nstep"}
"""Policies that frameworks use for such a network: Caffe's LeNet, and the steps of ResNets."""

LEVELS = (1.0, 0.95, 0.9)

CLAIMED = 1.6
"""Least speed-up that counts for LRBench's cyclic and composite policies."""

Measured = dict[Configuration, Policies]


def main() -> None:
    """Print every table."""
    path = newest(NAME, RESULTS)
    if path is None:
        raise SystemExit("there are no results yet: python benchmarks/learning_rates.py")
    found = json.loads(path.read_text(encoding="utf-8"))
    every = {one: found[one.key]["policies"] for one in CONFIGURATIONS if one.key in found}
    measured = {one: policies for one, policies in every.items() if not one.arm}
    for one, policies in measured.items():
        print(*_policies(one, policies), "", sep="\n")
    for table in (_sooner, _factorial, _places, _robust):
        print(*table(measured), "", sep="\n")
    print(*_ranks(every), "", *_searches(every), sep="\n")


def _policies(one: Configuration, policies: Policies) -> Iterator[str]:
    target = target_of(policies)
    yield f"### {one.key}: updates to {target:.0%}; against fix, together for all policies"
    yield "| policy | rate | good rates | top-1, % | points | sooner, times | reached | diverged |"
    yield "|---|---|---|---|---|---|---|---|"
    others = len(policies) - 1
    for name, cell in policies.items():
        edge = f" ({cell['edge']} tried)" if cell["edge"] else ""
        top1 = interval(100 * value for value in top1_of(cell).values())
        against = (
            "" if name == "fix" else _words(points(policies, name, "fix", together=others), "+.2f")
        )
        times = (
            ""
            if name == "fix"
            else _words(sooner(cell, policies["fix"], target, together=others), ".2f")
        )
        costs = costs_of(cell, target).values()
        diverged = sum(run["diverged"] is not None for run in cell["seeds"])
        yield (
            f"| {name} | {cell['rate']:.3g}{edge} | {_good_rates(cell)} | {_words(top1, '.2f')} | "
            f"{against} | {times} | {sum(cost is not None for cost in costs)} of {len(costs)} | "
            f"{diverged} |"
        )


def _good_rates(cell: Mapping[str, Any]) -> str:
    """Return the rates whose trial is within a point of the best trial."""
    best = max(one["top1"] for one in cell["trials"])
    good = [one["rate"] for one in cell["trials"] if one["top1"] >= best - 0.01]
    return f"{min(good):.3g} to {max(good):.3g}" if len(good) > 1 else f"{good[0]:.3g}"


def _sooner(measured: Measured) -> Iterator[str]:
    yield "### Cyclic and composite policies: times sooner at the target, together for the policies"
    yield (
        "| | against | target | slowest | fastest | surely sooner | later | surely 1.6 times | "
        "less | not all seeds |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for one, policies in measured.items():
        bases = [base for base in ("fix", DEFAULTS[one.data]) if base in policies]
        for base in bases:
            for level in LEVELS:
                yield f"| {one.key} | {base} | {_against(policies, base, level)} |"


def _against(policies: Policies, base: str, level: float) -> str:
    names = [name for name in CYCLES if name in policies]
    target = target_of(policies, level)
    ratios = {}
    for name in names:
        found = sooner(policies[name], policies[base], target, together=len(names))
        if found.interval is not None and found.interval.number == found.seeds:
            ratios[name] = found.interval
    order = sorted(ratios, key=lambda name: ratios[name].mean) or [""]
    ends = (f"{name} {_words(ratios.get(name), '.2f')}" for name in (order[0], order[-1]))
    surely = (
        sum(times.low > 1 for times in ratios.values()),
        sum(times.high < 1 for times in ratios.values()),
        sum(times.low > CLAIMED for times in ratios.values()),
        sum(times.high < CLAIMED for times in ratios.values()),
    )
    counts = (f"{number} of {len(names)}" for number in surely)
    rest = ", ".join(name for name in names if name not in ratios) or "none"
    return " | ".join([f"{target:.0%}", *ends, *counts, rest])


def _factorial(measured: Measured) -> Iterator[str]:
    yield "### Decay and warm-up: points of top-1 at the end, together for the configurations"
    yield (
        "| | decay poly2, not fix | decay cosine, not fix | warm-up, not none | "
        "warm-up with fix minus with decays |"
    )
    yield "|---|---|---|---|---|"
    every: list[list[float]] = []
    for one, policies in measured.items():
        fix, poly, cosine, w_fix, w_poly, w_cosine = (top1_of(policies[name]) for name in FACTORIAL)
        effects = (
            [(w_poly, w_fix), (poly, fix)],
            [(w_cosine, w_fix), (cosine, fix)],
            [(w_fix, fix), (w_poly, poly), (w_cosine, cosine)],
        )
        means = [_mean_of(pairs) for pairs in effects]
        alone, with_decay = _mean_of(effects[2][:1]), _mean_of(effects[2][1:])
        means.append({seed: alone[seed] - with_decay[seed] for seed in alone})
        shown = [
            _words(
                interval((100 * value for value in values.values()), together=len(measured)), "+.2f"
            )
            for values in means
        ]
        every.append([100 * statistics.fmean(values.values()) for values in means])
        yield f"| {one.key} | {' | '.join(shown)} |"
    over = [_words(interval(column), "+.2f") for column in zip(*every, strict=True)]
    yield f"| mean over configurations, each interval alone | {' | '.join(over)} |"


def _mean_of(pairs: Sequence[tuple[BySeed, BySeed]]) -> BySeed:
    """Return the mean over pairs of the first minus the second one, by seed."""
    seeds = set.intersection(*({*found} for pair in pairs for found in pair))
    return {
        seed: statistics.fmean(one[seed] - other[seed] for one, other in pairs) for seed in seeds
    }


def _places(measured: Measured) -> Iterator[str]:
    yield "### Points below the best policy; in brackets: surely so, together for the policies"
    yield f"| | {' | '.join(one.key for one in measured)} |"
    yield "|---" * (len(measured) + 1) + "|"
    for name in dict.fromkeys(name for policies in measured.values() for name in policies):
        cells = [_below(policies, name) for policies in measured.values()]
        yield f"| {name} | {' | '.join(cells)} |"


def _below(policies: Policies, name: str) -> str:
    if name not in policies:
        return ""
    best = max(policies, key=lambda other: statistics.fmean(top1_of(policies[other]).values()))
    if name == best:
        return "**best**"
    found = points(policies, best, name, together=len(policies) - 1)
    return f"({found.mean:.2f})" if found.low > 0 else f"{found.mean:.2f}"


def _robust(measured: Measured) -> Iterator[str]:
    yield "### Mean top-1 at a tenth to ten times the rate found, %, and each policy minus fix"
    yield "| | policy | mean | minus fix, together | at the rate found |"
    yield "|---|---|---|---|---|"
    for one, policies in measured.items():
        areas = {name: found for name, cell in policies.items() if (found := areas_of(cell))}
        order = sorted(areas, key=lambda name: -statistics.fmean(areas[name].values()))
        for name in order:
            against = difference(areas[name], areas["fix"], together=len(areas) - 1)
            yield (
                f"| {one.key} | {name} | {100 * statistics.fmean(areas[name].values()):.1f} | "
                f"{'' if name == 'fix' else _words(against.scaled(100), '+.1f')} | "
                f"{100 * statistics.fmean(top1_of(policies[name]).values()):.1f} |"
            )


def _ranks(every: Measured) -> Iterator[str]:
    yield "### Rank correlation of the policies' top-1; two rankings that are the same: the ceiling"
    yield "| between | and | Spearman's rho | ceiling | surely reversed pairs | surely kept pairs |"
    yield "|---|---|---|---|---|---|"
    for at, (one, policies) in enumerate(every.items()):
        for other, others in [*every.items()][at + 1 :]:
            if _are_comparable(one, other):
                rho = rank_correlation(policies, others)
                reversed_pairs, kept, pairs = orders(policies, others)
                ceiling = math.sqrt(spread_of(policies)[1] * spread_of(others)[1])
                yield (
                    f"| {one.key} | {other.key} | {rho:.2f} | {ceiling:.2f} | "
                    f"{reversed_pairs} of {pairs} | {kept} of {pairs} |"
                )


def _are_comparable(one: Configuration, other: Configuration) -> bool:
    """Return True if two configurations differ in one thing alone, or only in the search."""
    keys = ("data", "batch", "optimizer")
    same = sum(getattr(one, key) == getattr(other, key) for key in keys)
    return (same, one.arm, other.arm) in [(2, "", ""), (3, "", AGAIN)]


def _searches(every: Measured) -> Iterator[str]:
    yield "### What the search of each policy's own rate is worth, points"
    yield "| | of | policies' standard deviation | range | own rates gain: mean, lowest, highest |"
    yield "|---|---|---|---|---|"
    for one, policies in every.items():
        gain = ""
        if one.arm:
            main = every[one.main]
            gains = [
                difference(top1_of(main[name]), top1_of(cell)).scaled(100).mean
                for name, cell in policies.items()
            ]
            gain = (
                f"{_words(interval(gains), '+.2f')} on average, {min(gains):+.2f} to "
                f"{max(gains):+.2f}"
            )
        what = {ONE_RATE: "policies at one rate", AGAIN: "another search"}.get(one.arm, "own rates")
        deviation = 100 * spread_of(policies)[0]
        yield f"| {one.key} | {what} | {deviation:.2f} | {_range(policies):.2f} | {gain} |"


def _range(policies: Policies) -> float:
    means = [statistics.fmean(top1_of(cell).values()) for cell in whole(policies).values()]
    return 100 * (max(means) - min(means))


def _words(found: Interval | Ratio | None, form: str) -> str:
    own = found.interval if isinstance(found, Ratio) else found
    return "never" if own is None else own.with_ends(form)


if __name__ == "__main__":
    main()

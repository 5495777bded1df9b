"""The results of learning_rates.py -> the tables of docs/learning-rates.md, on standard output.

    python benchmarks/learning_rates_tables.py

Reads the newest benchmarks/results/learning_rates_<machine>_<date>.json and trains nothing.
Intervals are Student's at 95 % over the seeds, differences and ratios are paired by seed; those of
rank correlations are bootstrapped over the seeds. The target of a configuration is the highest
whole per cent that every seed of the constant rate reaches.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from learning_rates import CONFIGURATIONS, NAME, Configuration
from measuring import RESULTS, newest
from scipy.stats import spearmanr

from largebatch.studies.metrics import Interval, difference, interval, ratio, robustness

CYCLES = ("tri", "tri2", "triexp", "sin", "sin2", "sinexp", "cos", "composite")
"""LRBench's cyclic policies, and the composite one."""

WARM_UPS = {"warmup-fix": "fix", "warmup-poly": "poly"}
RESAMPLES = 2000

Policies = Mapping[str, Mapping[str, Any]]
BySeed = dict[int, float]


def main() -> None:
    """Print every table."""
    path = newest(NAME, RESULTS)
    if path is None:
        raise SystemExit("there are no results yet: python benchmarks/learning_rates.py")
    found: dict[str, Policies] = json.loads(path.read_text(encoding="utf-8"))["configurations"]
    measured = [one for one in CONFIGURATIONS if one.key in found]
    for one in measured:
        print(*_policies(one, found[one.key]), "", sep="\n")
    print(*_sooner(measured, found), "", sep="\n")
    print(*_robust(measured, found), "", sep="\n")
    print(*_ranks(measured, found), "", sep="\n")
    print(*_spreads(measured, found), sep="\n")


def _policies(one: Configuration, policies: Policies) -> Iterator[str]:
    target = target_of(policies)
    yield f"### {one.key}: updates to {target:.0%}"
    yield "| policy | rate | top-1, % | against fix, points | sooner than fix, times | reached |"
    yield "|---|---|---|---|---|---|"
    fix = policies["fix"]
    for name, cell in policies.items():
        edge = f" ({cell['edge']} tried)" if cell["edge"] else ""
        top1 = interval(100 * value for value in top1_of(cell).values())
        against = "" if name == "fix" else _words(points(cell, fix), "+.2f")
        times = "" if name == "fix" else _words(sooner(cell, fix, target), ".2f")
        reached = sum(value is not None for value in costs_of(cell, target).values())
        yield (
            f"| {name} | {cell['rate']:.3g}{edge} | {_words(top1, '.2f')} | {against} | {times} | "
            f"{reached} of {len(cell['seeds'])} |"
        )


def _sooner(measured: list[Configuration], found: Mapping[str, Policies]) -> Iterator[str]:
    yield "### Cyclic and composite policies against the constant rate: times sooner at the target"
    yield "| | slowest | median | fastest | surely sooner | surely later | not reached by all |"
    yield "|---|---|---|---|---|---|---|"
    for one in measured:
        policies = found[one.key]
        target = target_of(policies)
        ratios = {name: sooner(policies[name], policies["fix"], target) for name in CYCLES}
        whole = {
            name: times
            for name, times in ratios.items()
            if times is not None and times.number == len(policies[name]["seeds"])
        }
        order = sorted(whole, key=lambda name: whole[name].mean)
        places = (0, len(order) // 2, -1)
        named = [f"{order[at]} {_words(whole[order[at]], '.2f')}" if order else "" for at in places]
        surely = sum(times.low > 1 for times in whole.values())
        later = sum(times.high < 1 for times in whole.values())
        rest = ", ".join(name for name in CYCLES if name not in whole) or "none"
        yield f"| {one.key} | {' | '.join(named)} | {surely} | {later} | {rest} |"


def _robust(measured: list[Configuration], found: Mapping[str, Policies]) -> Iterator[str]:
    yield "### Warm-up: top-1 with it minus without, points; and accuracy at wrong rates"
    yield "| | " + " | ".join(WARM_UPS) + " | mean top-1 at a tenth to ten times the rate, best 3 |"
    yield "|---|" + "---|" * (len(WARM_UPS) + 1)
    for one in measured:
        policies = found[one.key]
        gains = [_words(points(policies[w], policies[o]), "+.2f") for w, o in WARM_UPS.items()]
        areas = {name: area for name, cell in policies.items() if (area := area_of(cell))}
        best = sorted(areas, key=lambda name: -areas[name])
        named = ", ".join(f"{name} {areas[name]:.1%}" for name in best[:3]) or "not measured"
        if "fix" in areas:
            named += f"; fix {areas['fix']:.1%}; last {best[-1]} {areas[best[-1]]:.1%}"
        yield f"| {one.key} | {' | '.join(gains)} | {named} |"


def _ranks(measured: list[Configuration], found: Mapping[str, Policies]) -> Iterator[str]:
    yield "### Rank correlation of the policies' top-1"
    yield "| between | and | Spearman's rho |"
    yield "|---|---|---|"
    for at, one in enumerate(measured):
        for other in measured[at + 1 :]:
            differ = sum(
                getattr(one, key) != getattr(other, key) for key in ("data", "batch", "optimizer")
            )
            if differ == 1:
                rho = rank_correlation(found[one.key], found[other.key])
                yield f"| {one.key} | {other.key} | {_words(rho, '.2f')} |"


def _spreads(measured: list[Configuration], found: Mapping[str, Policies]) -> Iterator[str]:
    yield "### From the best to the worst policy, points of top-1"
    yield "| | at one base rate (half the run, images held out) | each at its own | on all images |"
    yield "|---|---|---|---|"
    for one in measured:
        cells = found[one.key].values()
        common = [cell["trials"][0][1] for cell in cells]
        own = [max(trial[1] for trial in cell["trials"]) for cell in cells]
        means = [interval(top1_of(cell).values()).mean for cell in cells]
        spans = [f"{100 * (max(values) - min(values)):.1f}" for values in (common, own, means)]
        yield f"| {one.key} | {' | '.join(spans)} |"


def target_of(policies: Policies) -> float:
    """Return the highest whole per cent that every seed of the constant rate reaches.

    >>> run = {"curve": [[10, 0.815], [20, 0.808]]}
    >>> target_of({"fix": {"seeds": {"1": run, "2": {"curve": [[10, 0.83]]}}}})
    0.81
    """
    seeds = policies["fix"]["seeds"].values()
    lowest: float = min(max(top1 for _, top1 in one["curve"]) for one in seeds)
    return math.floor(100 * lowest) / 100


def top1_of(cell: Mapping[str, Any]) -> BySeed:
    """Return the accuracy at the end by seed."""
    return {int(seed): one["top1"] for seed, one in cell["seeds"].items()}


def costs_of(cell: Mapping[str, Any], target: float) -> dict[int, float | None]:
    """Return the updates at the first evaluation at or above a target, by seed."""
    return {
        int(seed): next((step for step, top1 in one["curve"] if top1 >= target), None)
        for seed, one in cell["seeds"].items()
    }


def sooner(cell: Mapping[str, Any], fix: Mapping[str, Any], target: float) -> Interval | None:
    """Return how many times the updates of the constant rate are those of a policy."""
    return ratio(costs_of(fix, target), costs_of(cell, target)).interval


def points(cell: Mapping[str, Any], other: Mapping[str, Any]) -> Interval:
    """Return how much higher top-1 is, in points."""
    mean, low, high, number = difference(top1_of(cell), top1_of(other))
    return Interval(100 * mean, 100 * low, 100 * high, number)


def area_of(cell: Mapping[str, Any]) -> float | None:
    """Return the mean top-1 over rates from a tenth to ten times that found; None: not measured."""
    if not cell["scaled"]:
        return None
    number = len(next(iter(cell["scaled"].values())))
    own = list(top1_of(cell).values())[:number]
    return robustness({1.0: own} | {float(s): found for s, found in cell["scaled"].items()}).area


def rank_correlation(one: Policies, other: Policies) -> Interval:
    """Return Spearman's rho of the mean top-1, with its interval by seeds drawn anew."""
    draw = random.Random(0)
    values = sorted(_rho(one, other, _drawn(draw)) for _ in range(RESAMPLES))
    low, high = (values[round(share * (RESAMPLES - 1))] for share in (0.025, 0.975))
    return Interval(_rho(one, other, lambda found: found), low, high, len(one["fix"]["seeds"]))


def _drawn(draw: random.Random) -> Callable[[list[float]], list[float]]:
    return lambda found: draw.choices(found, k=len(found))


def _rho(one: Policies, other: Policies, chosen: Callable[[list[float]], list[float]]) -> float:
    means = [
        [sum(chosen(list(top1_of(cell).values()))) for cell in policies.values()]
        for policies in (one, {name: other[name] for name in one})
    ]
    return float(spearmanr(*means).statistic)


def _words(found: Interval | None, form: str) -> str:
    """Return a mean with its ends.

    >>> _words(Interval(1.0, 0.5, 1.5, 5), "+.1f")
    '+1.0 (+0.5 to +1.5)'
    """
    if found is None:
        return "never"
    if found.number == 1:
        return f"{found.mean:{form}} (one seed)"
    return f"{found.mean:{form}} ({found.low:{form}} to {found.high:{form}})"


if __name__ == "__main__":
    main()

"""Print the tables of learning_rates_shapes.py and draw them.

    python benchmarks/learning_rates_shapes_tables.py [--figure PNG]

Reads the newest results of learning_rates_shapes.py and of learning_rates.py, whose runs at the
rate found are compared, and trains nothing. Differences are paired by seed, with Student's
interval of 95 % that holds together for the lines of a table (Bonferroni). Confidence is of
learning_rates.py alone: AC is the mean probability of right answers, CD its deviation over images,
CDAC that of the means of classes (arXiv:1908.06477).
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from learning_rates import CONFIGURATIONS, Configuration
from learning_rates import NAME as SEARCHED
from learning_rates_shapes import BOUNDED, FACTORS, NAME, SCALED
from learning_rates_statistics import Policies, top1_of, whole
from measuring import RESULTS, newest, with_ends
from scipy.stats import spearmanr

from largebatch.report.style import COLOURS
from largebatch.studies.metrics import Interval, difference, interval, robustness

Runs = Mapping[tuple[str, str, str], dict[int, float]]
"""Top-1 by group, policy, what was changed, and seed."""

FIGURE = Path(__file__).parent.parent / "docs" / "learning-rate-scales.png"


def main() -> None:
    """Print every table, and draw the robustness and the shapes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", type=Path, default=FIGURE, metavar="PNG", help="what to draw")
    args = parser.parse_args()
    every, found = (_read(name) for name in (SEARCHED, NAME))
    measured = {
        one: (every[one.key]["policies"], found[one.key])
        for one in CONFIGURATIONS
        if one.key in found
    }
    for one, (policies, result) in measured.items():
        runs = by_seed(result)
        for table in (_scales, _shapes):
            print(*table(one, policies, runs), "", sep="\n")
        print(*_bounds(one, policies, result), "", sep="\n")
    print(*_confidence({one: every[one.key]["policies"] for one in CONFIGURATIONS}), sep="\n")
    _draw(args.figure, {one: (of, by_seed(result)) for one, (of, result) in measured.items()})
    print(args.figure)


def _read(name: str) -> dict[str, Any]:
    path = newest(name, RESULTS)
    if path is None:
        raise SystemExit(f"there are no results yet: python benchmarks/{name}.py")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def by_seed(result: Mapping[str, Any]) -> Runs:
    """Return top-1 of the runs of a configuration."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for one in result["runs"]:
        key = one["group"], one["policy"], one["what"]
        found.setdefault(key, {})[one["seed"]] = one["top1"]
    return found


def scales_of(policies: Policies, runs: Runs, name: str) -> dict[float, dict[int, float]]:
    """Return top-1 of a policy by multiple of its rate and seed, of the seeds that have all."""
    scaled = {factor: runs["scales", name, f"{factor:g}"] for factor in FACTORS}
    own = top1_of(policies[name])
    seeds = set.intersection(*(set(each) for each in (own, *scaled.values())))
    every = {1.0: own, **scaled}
    return {
        factor: {seed: every[factor][seed] for seed in sorted(seeds)} for factor in sorted(every)
    }


def areas_of(scales: Mapping[float, Mapping[int, float]]) -> dict[int, float]:
    """Return the mean top-1 over the logarithm of the multiples, by seed."""
    return {
        seed: robustness({scale: [each[seed]] for scale, each in scales.items()}).area
        for seed in scales[1.0]
    }


def _scales(one: Configuration, policies: Policies, runs: Runs) -> Iterator[str]:
    titles = " | ".join(f"{factor:g}" for factor in sorted({1.0, *FACTORS}))
    yield f"### {one.key}: top-1 in % at multiples of the rate found; mean, and minus that of fix"
    yield f"| policy | {titles} | mean | minus fix | lost at the worst |"
    yield "|---" * (len(FACTORS) + 5) + "|"
    areas = {name: areas_of(scales_of(policies, runs, name)) for name in SCALED}
    for name in SCALED:
        scales = scales_of(policies, runs, name)
        means = [100 * statistics.fmean(each.values()) for each in scales.values()]
        against = difference(areas[name], areas["fix"], together=len(SCALED) - 1).scaled(100)
        yield (
            f"| {name} | {' | '.join(f'{mean:.1f}' for mean in means)} | "
            f"{100 * statistics.fmean(areas[name].values()):.1f} | "
            f"{'' if name == 'fix' else with_ends(against, '+.1f')} | "
            f"{100 * statistics.fmean(scales[1.0].values()) - min(means):.1f} |"
        )


def shapes_of(policies: Policies, runs: Runs) -> dict[tuple[str, str], Interval]:
    """Return the points that each changed shape is above its policy's own."""
    changed = {key[1:]: top1 for key, top1 in runs.items() if key[0] == "shapes"}
    return {
        (name, what): difference(top1, top1_of(policies[name]), together=len(changed)).scaled(100)
        for (name, what), top1 in changed.items()
    }


def _shapes(one: Configuration, policies: Policies, runs: Runs) -> Iterator[str]:
    yield f"### {one.key}: changed shapes at the rate found, points above the policy's own"
    yield "| policy | change | points, together |"
    yield "|---|---|---|"
    for (name, what), points in shapes_of(policies, runs).items():
        yield f"| {name} | {what} | {with_ends(points, '+.2f')} |"


def _bounds(one: Configuration, policies: Policies, result: Mapping[str, Any]) -> Iterator[str]:
    low, high = (result["range"][end]["value"] for end in ("lower", "upper"))
    rates = {name: cell["rate"] / high for name, cell in policies.items()}
    order = sorted(rates, key=lambda name: rates[name])
    yield f"### {one.key}: the range test finds {low:.3g} to {high:.3g}"
    yield "Rates found, as multiples of the upper bound: " + ", ".join(
        f"{name} {rates[name]:.2f}" for name in order
    )
    yield "| policy | between the bounds, % | at the rate found, % | points, together |"
    yield "|---|---|---|---|"
    runs = by_seed(result)
    known = [name for name in BOUNDED if name in policies]
    for name in known:
        between, own = runs["bounds", name, "between the bounds"], top1_of(policies[name])
        points = difference(between, own, together=len(known)).scaled(100)
        means = (f"{100 * statistics.fmean(each.values()):.2f}" for each in (between, own))
        yield f"| {name} | {' | '.join(means)} | {with_ends(points, '+.2f')} |"


def _confidence(every: Mapping[Configuration, Policies]) -> Iterator[str]:
    yield "### Confidence of the policies of which no seed diverged: lowest and highest mean, in %"
    yield "| | AC | CD | CDAC | rank correlation, AC with top-1 | loss on test - training images |"
    yield "|---|---|---|---|---|---|"
    for one, policies in every.items():
        if one.arm:
            continue
        cells = whole(policies)
        keys = ("average_confidence", "confidence_deviation", "class_confidence_deviation")
        ends = [_ends(cells, _mean_of(key), factor=100) for key in keys]
        gaps = _ends(cells, _mean_of("loss_difference"))
        pairs = [(_mean_of(keys[0])(it), _mean_of("top1")(it)) for it in cells.values()]
        rho = float(spearmanr(*zip(*pairs, strict=True)).statistic)
        yield f"| {one.key} | {' | '.join(ends)} | {rho:+.2f}, {len(pairs)} policies | {gaps} |"


def _mean_of(key: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda cell: statistics.fmean(run[key] for run in cell["seeds"])


def _ends(
    cells: Policies, value: Callable[[Mapping[str, Any]], float], *, factor: float = 1.0
) -> str:
    means = {name: factor * value(cell) for name, cell in cells.items()}
    first, last = (choose(means, key=lambda name: means[name]) for choose in (min, max))
    return f"{first} {means[first]:.2f}, {last} {means[last]:.2f}"


def _draw(path: Path, measured: Mapping[Configuration, tuple[Policies, Runs]]) -> None:
    """Draw top-1 over multiples of the rate, and the points of changed shapes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4 * len(measured)), layout="constrained")
    grid = figure.subplots(len(measured), 2, squeeze=False)
    for (one, (policies, runs)), (left, right) in zip(measured.items(), grid, strict=True):
        for name, colour in zip(SCALED, COLOURS.values(), strict=False):
            scales = scales_of(policies, runs, name)
            means = {at: interval(100 * it for it in each.values()) for at, each in scales.items()}
            reach = [mean.high - mean.mean for mean in means.values()]
            left.errorbar(
                list(means), [mean.mean for mean in means.values()], reach,
                marker="o", capsize=3, color=colour, label=name,
            )  # fmt: skip
        left.set_xscale("log", base=2)
        left.set_xticks(sorted({1.0, *FACTORS}), [f"{it:g}" for it in sorted({1.0, *FACTORS})])
        left.set(title=one.key, xlabel="times the rate found", ylabel="top-1, %", ylim=(None, 100))
        left.legend()
        points = shapes_of(policies, runs)
        places = range(len(points))
        right.errorbar(
            [it.mean for it in points.values()], places,
            xerr=[it.high - it.mean for it in points.values()], fmt="o", capsize=3,
            color=next(iter(COLOURS.values())),
        )  # fmt: skip
        right.axvline(0, color="grey", linewidth=0.8)
        right.set_yticks(places, [f"{name}: {what}" for name, what in points])
        right.invert_yaxis()
        right.set(title="a changed shape", xlabel="points above the policy's own shape")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()

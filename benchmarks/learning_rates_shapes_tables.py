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
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learning_rates import CONFIGURATIONS, SEEDS, Configuration
from learning_rates import NAME as SEARCHED
from learning_rates_shapes import BOUNDED, FACTORS, NAME, SCALED
from learning_rates_statistics import Policies, top1_of, whole
from measuring import RESULTS, newest
from scipy.stats import spearmanr

from largebatch.report.style import COLOURS
from largebatch.studies.metrics import Interval, difference, interval, robustness

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = Mapping[tuple[str, str, str], dict[int, float]]
"""Top-1 by group, policy, what was changed, and seed."""

CHANCE = 0.1
"""Top-1 of a run that diverged, in ten classes."""

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
    yield (
        f"### {one.key}: top-1 in % at multiples of the rate found, and of seeds that did not "
        "diverge; mean up to 1, and minus that of fix"
    )
    yield f"| policy | {titles} | mean of 1/4 to 1 | minus fix, together |"
    yield "|---" * (len(FACTORS) + 4) + "|"
    below = {
        name: areas_of({at: it for at, it in scales_of(policies, runs, name).items() if at <= 1})
        for name in SCALED
    }
    for name in SCALED:
        cells = [_of_whole(each.values()) for each in scales_of(policies, runs, name).values()]
        against = difference(below[name], below["fix"], together=len(SCALED) - 1).scaled(100)
        yield (
            f"| {name} | {' | '.join(cells)} | {100 * statistics.fmean(below[name].values()):.1f} "
            f"| {'' if name == 'fix' else against.with_ends('+.1f')} |"
        )


def _of_whole(top1: Collection[float]) -> str:
    """Return the mean of runs that did not diverge, and how many these are if not all."""
    left = [100 * value for value in top1 if value > CHANCE]
    mean = f"{statistics.fmean(left):.1f}" if left else "diverges"
    return mean if len(left) in {0, len(top1)} else f"{mean}, {len(left)} of {len(top1)} seeds"


def shapes_of(policies: Policies, runs: Runs) -> dict[tuple[str, str], Interval | int]:
    """Return the points of changed shapes above the policy's own, or how many seeds diverged."""
    changed = {key[1:]: top1 for key, top1 in runs.items() if key[0] == "shapes"}
    found: dict[tuple[str, str], Interval | int] = {}
    for (name, what), top1 in changed.items():
        points = difference(top1, top1_of(policies[name]), together=len(changed)).scaled(100)
        diverged = sum(value <= CHANCE for value in top1.values())
        found[name, what] = diverged or points
    return found


def _shapes(one: Configuration, policies: Policies, runs: Runs) -> Iterator[str]:
    yield f"### {one.key}: changed shapes at the rate found, points above the policy's own"
    yield "| policy | change | points, together |"
    yield "|---|---|---|"
    for (name, what), points in shapes_of(policies, runs).items():
        words = f"diverges, {points} seeds" if isinstance(points, int) else points.with_ends("+.2f")
        yield f"| {name} | {what} | {words} |"


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
        yield f"| {name} | {' | '.join(means)} | {points.with_ends('+.2f')} |"


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
        _draw_scales(left, policies, runs)
        left.set_title(f"{one.key}: robustness")
        _draw_shapes(right, shapes_of(policies, runs))
    figure.savefig(path, dpi=110)


def _draw_scales(axes: "Axes", policies: Policies, runs: Runs) -> None:
    """Draw the means where no seed diverged; a cross where some did."""
    lowest = min(value for top1 in runs.values() for value in top1.values() if value > CHANCE)
    for place, (name, colour) in enumerate(zip(SCALED, COLOURS.values(), strict=False)):
        scales = scales_of(policies, runs, name)
        means = {
            at: interval(100 * it for it in each.values())
            for at, each in scales.items()
            if min(each.values()) > CHANCE
        }
        reach = [mean.high - mean.mean for mean in means.values()]
        tops = [mean.mean for mean in means.values()]
        axes.errorbar(list(means), tops, reach, marker="o", capsize=3, color=colour, label=name)
        gone = [at * 1.03**place for at in scales if at not in means]
        axes.plot(gone, [100 * lowest - 6] * len(gone), "x", color=colour)
    ticks = sorted({1.0, *FACTORS})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{it:g}" for it in ticks])
    axes.set(xlabel="times the rate found; crosses: one or more seeds diverged", ylabel="top-1, %")
    axes.set_ylim(100 * lowest - 8, 100)
    axes.legend()


def _draw_shapes(axes: "Axes", found: Mapping[tuple[str, str], Interval | int]) -> None:
    """Draw the points of changed shapes, and how many seeds diverged."""
    for place, points in enumerate(found.values()):
        if isinstance(points, int):
            axes.text(0, place, f"{points} of {SEEDS} seeds diverge", ha="center", va="center")
        else:
            reach, colour = points.high - points.mean, COLOURS["train"]
            axes.errorbar(points.mean, place, xerr=reach, fmt="o", capsize=3, color=colour)
    axes.axvline(0, color="grey", linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(found)), [f"{name}: {what}" for name, what in found])
    axes.invert_yaxis()
    axes.set(title="a changed shape", xlabel="points of top-1 above the own shape")


if __name__ == "__main__":
    main()

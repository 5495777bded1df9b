"""Print the tables of learning_rates_shapes.py and draw them.

    python benchmarks/learning_rates_shapes_tables.py [--figure PNG]

Reads the newest results of learning_rates_shapes.py and, for the confidence of all policies, of
learning_rates.py, and trains nothing. Differences are paired by seed; their intervals of 95 % hold
together for the lines of a table (Bonferroni), by the noise of all its cells of which no run fails
(contrasts.py). Confidence: AC is the mean probability of right answers, CD its deviation over
images, CDAC that of the means of classes (arXiv:1908.06477).
"""

import argparse
import json
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from contrasts import FAILS, BySeed, contrast, no_run_fails, noise_of, none_fails
from learning_rates import CONFIGURATIONS, SEEDS, Configuration
from learning_rates import NAME as SEARCHED
from learning_rates_shapes import BETWEEN, BOUNDED, FACTORS, MARGIN, NAME, SCALED, SHAPES
from learning_rates_statistics import Policies, top1_of, whole
from measuring import RESULTS, newest
from scipy.stats import spearmanr

from largebatch.lab.studies.metrics import Interval, interval
from largebatch.report.style import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = Mapping[str, Any]
"""What was measured of a configuration."""

Runs = Mapping[tuple[str, str], dict[int, float]]

LOW, HIGH = 0.25, 1.4
"""Multiples of the rate whose changes are compared."""

FIGURE = Path(__file__).parent.parent / "docs" / "learning-rate-scales.png"


def main() -> None:
    """Print every table, and draw the robustness and the shapes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", type=Path, default=FIGURE, metavar="PNG", help="what to draw")
    args = parser.parse_args()
    every, found = (_read(name) for name in (SEARCHED, NAME))
    measured = {one: found[one.key] for one in CONFIGURATIONS if one.key in found}
    for one, result in measured.items():
        for table in (_scales, _shapes, _bounds):
            print(*table(one, result), "", sep="\n")
    print(*_confidence({one: every[one.key]["policies"] for one in CONFIGURATIONS}), sep="\n")
    _draw(args.figure, measured)
    print(args.figure)


def _read(name: str) -> dict[str, Any]:
    path = newest(name, RESULTS)
    if path is None:
        raise SystemExit(f"there are no results yet: python benchmarks/{name}.py")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def by_seed(result: Result, group: str) -> Runs:
    """Return top-1 of a group's runs by policy, what was changed, and seed."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for one in result["runs"]:
        if one["group"] == group:
            found.setdefault((one["policy"], one["what"]), {})[one["seed"]] = one["top1"]
    return found


def scales_of(result: Result) -> dict[str, dict[float, BySeed]]:
    """Return top-1 by policy, multiple of its rate, and seed."""
    found: dict[str, dict[float, BySeed]] = {}
    for (name, factor), top1 in by_seed(result, "scales").items():
        found.setdefault(name, {})[float(factor)] = top1
    return found


def changes_of(scales: Mapping[float, BySeed], factor: float) -> dict[int, float]:
    """Return top-1 at a multiple of the rate found minus that at the rate itself, by seed.

    Of none if a run of either fails.
    """
    at, found = scales[factor], scales[1.0]
    if not no_run_fails(at, found):
        return {}
    return {seed: at[seed] - found[seed] for seed in found}


def _scales(one: Configuration, result: Result) -> Iterator[str]:
    titles = " | ".join(f"{factor:g}" for factor in FACTORS)
    yield (
        f"### {one.key}: top-1 in % at multiples of the rate found, of seeds that did not fail; "
        f"points that {LOW:g} and {HIGH:g} times it change, the intervals of a column together"
    )
    yield f"| policy | {titles} | at {LOW:g} | minus that of fix | at {HIGH:g} |"
    yield "|---" * (len(FACTORS) + 4) + "|"
    scales = scales_of(result)
    low, high = ({name: changes_of(scales[name], at) for name in SCALED} for at in (LOW, HIGH))
    noise = noise_of([change for change in low.values() if change])
    for name in SCALED:
        cells = [_of_whole(scales[name][factor].values()) for factor in FACTORS]
        costs = f"{100 * statistics.fmean(low[name].values()):+.1f}" if low[name] else "fails"
        points = ""
        if name != "fix" and low[name] and low["fix"]:
            terms = [(1.0, low[name]), (-1.0, low["fix"])]
            found = contrast(terms, noise, together=len(SCALED) - 1).scaled(100)
            points = found.with_ends("+.1f")
        gains = "fails"
        if high[name]:
            gains = (
                interval(high[name].values(), together=len(SCALED)).scaled(100).with_ends("+.1f")
            )
        yield f"| {name} | {' | '.join(cells)} | {costs} | {points} | {gains} |"


def _of_whole(top1: Collection[float]) -> str:
    """Return the mean of runs that did not fail, and how many these are if not all."""
    left = [100 * value for value in top1 if value >= FAILS]
    mean = f"{statistics.fmean(left):.1f}" if left else "fails"
    return mean if len(left) in {0, len(top1)} else f"{mean}, {len(left)} of {len(top1)} seeds"


class Changed(NamedTuple):
    """A changed shape beside the policy's own, each at a rate of its own."""

    policy: str
    change: str
    rates: tuple[float, float]
    """Its rate and that of the own shape."""

    fails: int
    """Number of seeds that failed with one or the other."""

    points: Interval | None
    """Top-1 above the own shape's; None if a seed failed."""


def shapes_of(result: Result) -> list[Changed]:
    """Return what the changed shapes gain over the policy's own."""
    cells = result["shapes"]
    top1 = {name: top1_of(cell) for name, cell in cells.items()}
    changed = [(policy, change.name) for policy, changes in SHAPES.items() for change in changes]
    noise = noise_of(none_fails(top1.values()))
    found = []
    for policy, change in changed:
        names = f"{policy}-{change}", policy
        ours, own = (top1[name] for name in names)
        fails = sum(min(ours[seed], own[seed]) < FAILS for seed in ours)
        points = contrast([(1.0, ours), (-1.0, own)], noise, together=len(changed)).scaled(100)
        rates = cells[names[0]]["rate"], cells[names[1]]["rate"]
        found.append(Changed(policy, change, rates, fails, None if fails else points))
    return found


def _shapes(one: Configuration, result: Result) -> Iterator[str]:
    yield f"### {one.key}: changed shapes, each at its own rate; points above the policy's own"
    yield "| policy | change | rate, that of the own shape | points, together | |"
    yield "|---|---|---|---|---|"
    for it in shapes_of(result):
        words, counts = f"{it.fails} of {SEEDS} seeds fail", ""
        if it.points:
            words = it.points.with_ends("+.2f")
            low, high = it.points.low, it.points.high
            if max(-low, high) < MARGIN:
                counts = f"within {MARGIN:g} point"
            elif low > 0 or high < 0:
                counts = "surely"
        rates = "{:.3g}, {:.3g}".format(*it.rates)
        yield f"| {it.policy} | {it.change.replace('-x-', ' x ')} | {rates} | {words} | {counts} |"


def _bounds(one: Configuration, result: Result) -> Iterator[str]:
    low, high = (result["range"][end]["value"] for end in ("lower", "upper"))
    cells = result["shapes"]
    rates = {name: cells[name]["rate"] / high for name in sorted({*SHAPES, *BOUNDED})}
    order = sorted(rates, key=lambda name: rates[name])
    yield f"### {one.key}: the range test finds {low:.3g} to {high:.3g}"
    yield "Rates found, as multiples of the upper bound: " + ", ".join(
        f"{name} {rates[name]:.2f}" for name in order
    )
    yield "| policy | between the bounds, % | at the rate found, % | points, together |"
    yield "|---|---|---|---|"
    runs = by_seed(result, "bounds")
    pairs = {name: (runs[name, BETWEEN], top1_of(cells[name])) for name in BOUNDED}
    noise = noise_of(none_fails(top1 for pair in pairs.values() for top1 in pair))
    for name, pair in pairs.items():
        points = "a seed fails"
        if no_run_fails(*pair):
            terms = list(zip((1.0, -1.0), pair, strict=True))
            points = contrast(terms, noise, together=len(pairs)).scaled(100).with_ends("+.2f")
        yield f"| {name} | {' | '.join(_of_whole(top1.values()) for top1 in pair)} | {points} |"


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


def _draw(path: Path, measured: Mapping[Configuration, Result]) -> None:
    """Draw top-1 over multiples of the rate, and the points of changed shapes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4 * len(measured)), layout="constrained")
    grid = figure.subplots(len(measured), 2, squeeze=False)
    for (one, result), (left, right) in zip(measured.items(), grid, strict=True):
        _draw_scales(left, scales_of(result))
        left.set_title(f"{one.key}: robustness")
        _draw_shapes(right, shapes_of(result))
    figure.savefig(path, dpi=90)


def _draw_scales(axes: "Axes", every: Mapping[str, Mapping[float, BySeed]]) -> None:
    """Draw the means where no seed failed; a cross where some did."""
    values = [it for scales in every.values() for top1 in scales.values() for it in top1.values()]
    lowest = min(value for value in values if value >= FAILS)
    for place, (name, colour) in enumerate(zip(SCALED, COLOURS.values(), strict=False)):
        scales = every[name]
        means = {
            at: interval(100 * it for it in each.values())
            for at, each in sorted(scales.items())
            if no_run_fails(each)
        }
        reach = [mean.high - mean.mean for mean in means.values()]
        tops = [mean.mean for mean in means.values()]
        axes.errorbar(list(means), tops, reach, marker="o", capsize=3, color=colour, label=name)
        gone = [at * 1.03**place for at in scales if at not in means]
        axes.plot(gone, [100 * lowest - 6] * len(gone), "x", color=colour)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(FACTORS, [f"{it:g}" for it in FACTORS])
    axes.set(xlabel="times the rate found; crosses: one or more seeds failed", ylabel="top-1, %")
    axes.set_ylim(100 * lowest - 8, 100)
    axes.legend()


def _draw_shapes(axes: "Axes", found: Sequence[Changed]) -> None:
    """Draw the points of changed shapes, and how many seeds failed."""
    for place, it in enumerate(found):
        if it.points is None:
            axes.text(0, place, f"{it.fails} of {SEEDS} seeds fail", ha="center", va="center")
        else:
            reach, colour = it.points.high - it.points.mean, COLOURS["train"]
            axes.errorbar(it.points.mean, place, xerr=reach, fmt="o", capsize=3, color=colour)
    axes.axvspan(-MARGIN, MARGIN, color="grey", alpha=0.15, zorder=0)
    axes.axvline(0, color="grey", linewidth=0.8, zorder=0)
    axes.set_yticks(
        range(len(found)), [f"{it.policy}: {it.change.replace('-x-', ' x ')}" for it in found]
    )
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set(
        title="a changed shape at a rate of its own",
        xlabel=f"points of top-1 above the own shape; grey: within {MARGIN:g} point",
    )


if __name__ == "__main__":
    main()

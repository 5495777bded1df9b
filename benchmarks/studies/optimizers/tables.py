"""Draw the figure of the study of optimizers, and print its tables.

    python -m benchmarks.studies.optimizers.tables

Reads the newest optimizers_<machine>_<date>.json, writes optimizers.svg beside it and prints the
tables. The results are frozen, of commit 1183a5f9 (`git show 1183a5f9:benchmarks/optimizers.py`):
peak rate and weight decay of each optimizer were searched at every batch with six trials. A cell
counts with the seeds at its best setting.

The critical batch needs 20 % more epochs than small batches (arXiv:2410.21676). Each seed has its
own fit of epochs = least x (1 + batch / scale) in logarithms over the batches that reached the
target (arXiv:1812.06162, equation 2.11); a fifth of `scale` is the critical batch. The interval is
Student's over the logarithms of the seeds. A fit whose scale is not bounded by the batches counts
as none, and so does the interval with it, and there is none where the seeds' mean epochs fall as
the batch grows. An interval below the smallest batch is an extrapolation and marked as one. Where
seeds do not reach the target at a batch, they count as reaching it at the end of the run, and the
critical batch is at most what comes of it.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.speed.measuring import RESULTS, frozen
from benchmarks.studies.figures import save_svg
from largebatch.report.seeds import Interval, interval
from largebatch.report.style import COLOURS, INK, MUTED

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Figure

NAME = "optimizers"
RESNET, VIT = "resnet9", "vit"
AS_IS, POLISHED = 1, 2  # columns of a curve; the first one has the epochs
MORE_STEPS = 0.2  # of the critical batch over small ones
LABELS = {
    "nesterov": "Nesterov SGD",
    "lars": "LARS",
    "lamb": "LAMB",
    "adamw": "AdamW",
    "muon": "Muon",
}
BATCHES = (500, 2_000, 8_000, 16_000)
NEVER = -1e6  # score of a trial that does not reach the target, less its top-1
PANELS = {
    "ResNet-9 with BatchNorm, polished": (RESNET, POLISHED),
    "The same, as it is": (RESNET, AS_IS),
    "Vision transformer, LayerNorm": (VIT, AS_IS),
}
"""Network and column of the curves of each panel."""

SHADES = dict(
    zip(
        LABELS,
        (INK, *(COLOURS[name] for name in ("clean", "swa", "train", "statistics"))),
        strict=True,
    )
)
FAR = 100.0
"""Ratio of a fitted scale to the batches beyond which it is not bounded."""

LEAST_BATCHES = 3
"""Least number of batches of a fit, which has two parameters."""

Runs = list[dict[str, Any]]
Seeds = dict["Cell", Runs]
"""Runs of the seeds at the best setting of each cell."""


class Cell(NamedTuple):
    """A network, an optimizer and a batch."""

    network: str
    optimizer: str
    batch: int


Setting = tuple[float, float]
"""Peak rate and weight decay."""


class Study:
    """The results."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.epochs, self.targets, self.runs = (content[k] for k in ("epochs", "targets", "runs"))

    def of(self, cell: Cell) -> Runs:
        """Return the runs of a cell, trials and seeds."""
        every = self.runs.values()
        return [run for run in every if (run["network"], run["optimizer"], run["batch"]) == cell]

    def tried(self, cell: Cell) -> dict[Setting, float]:
        """Return the scores of the trials of a cell: fewer epochs to the target are better."""
        target = self.targets[cell.network]
        trials = (run for run in self.of(cell) if run["seed"] is None)
        return {(run["rate"], run["decay"]): _score(run, target) for run in trials}

    def seeds(self) -> Seeds:
        """Return the runs of the seeds at the best setting of each cell, in order."""
        found: Seeds = {}
        for cell in (Cell(*it) for it in product((RESNET, VIT), LABELS, BATCHES)):
            tried = self.tried(cell)
            best = max(tried, key=lambda it: tried[it], default=None)
            runs = [
                run
                for run in self.of(cell)
                if run["seed"] is not None and (run["rate"], run["decay"]) == best
            ]
            found[cell] = sorted(runs, key=lambda run: int(run["seed"]))
        return found


def _score(run: Mapping[str, Any], target: float) -> float:
    if run["diverged"] or not run["curve"]:
        return NEVER
    curve = [
        (row[0], row[AS_IS] if row[POLISHED] is None else row[POLISHED]) for row in run["curve"]
    ]
    epochs = epochs_to(target, curve)
    return NEVER + curve[-1][1] if epochs is None else -epochs


def epochs_to(target: float, curve: Sequence[Sequence[float]], column: int = AS_IS) -> float | None:
    """Return the epochs to a top-1, straight between evaluations; None if it is not reached.

    >>> epochs_to(0.5, [(1.0, 0.4), (2.0, 0.6), (3.0, 0.45)])
    1.5
    """
    epoch, top1 = 0.0, 0.1
    for row in curve:
        if row[column] >= target:
            return epoch + (row[0] - epoch) * (target - top1) / (row[column] - top1)
        epoch, top1 = row[0], row[column]
    return None


def epochs_by_seed(runs: Runs, target: float, column: int = AS_IS) -> dict[int, float]:
    """Return the epochs to the target of the seeds that reached it."""
    epochs = {
        run["seed"]: epochs_to(target, run["curve"], column) for run in runs if not run["diverged"]
    }
    return {seed: value for seed, value in epochs.items() if value is not None}


def critical_batch(epochs: Mapping[int, float]) -> float | None:
    """Return the critical batch by epochs to the target of each batch; None if there is no fit.

    >>> round(critical_batch({batch: 3 * (1 + batch / 5000) for batch in (500, 2000, 8000)}))
    1000
    """
    from scipy.optimize import minimize_scalar

    if len(epochs) < LEAST_BATCHES:
        return None

    def scatter(log_scale: float) -> float:
        scale = math.exp(log_scale)
        rest = [math.log(value / (1 + batch / scale)) for batch, value in epochs.items()]
        return statistics.pvariance(rest)

    low, high = math.log(min(epochs) / FAR), math.log(max(epochs) * FAR)
    fit = minimize_scalar(scatter, bounds=(low, high), method="bounded", options={"xatol": 1e-6})
    if not low + 0.1 < fit.x < high - 0.1:
        return None
    return MORE_STEPS * math.exp(fit.x)


class Critical(NamedTuple):
    """A critical batch with its interval, which bounds the true one if seeds miss the target."""

    value: Interval
    at_most: bool
    smallest: int
    """Smallest batch of the fit."""

    @property
    def is_outside(self) -> bool:
        """True if all of its interval is below all batches."""
        return self.value.high < self.smallest

    def __str__(self) -> str:
        text = f"{'at most ' * self.at_most}{self.value.with_ends(',.0f')}"
        return f"below {self.smallest:,}: {text}" if self.is_outside else text

    @property
    def short(self) -> str:
        """Text for a legend."""
        if self.is_outside:
            return f"< {self.smallest:,}"
        rounded = float(f"{self.value.mean:.2g}")
        return f"{'≤ ' * self.at_most}{rounded:,.0f}"


def critical_batches(
    by_batch: Mapping[int, Runs], target: float, *, epochs: float, column: int = AS_IS
) -> Critical | None:
    """Return the geometric mean of the critical batches of the seeds that all batches have.

    Those of runs of `epochs`; None if fewer than LEAST_BATCHES have a seed that reached the target,
    if the mean epochs fall as the batch grows, or if a fit is not bounded.
    """
    reached = {batch: epochs_by_seed(runs, target, column) for batch, runs in by_batch.items()}
    made = [{run["seed"] for run in runs} for runs in by_batch.values()]
    seeds = set.intersection(*made) if made else set()
    if not seeds or sum(bool(one) for one in reached.values()) < LEAST_BATCHES:
        return None
    batches = sorted(reached)
    counted = [
        {batch: reached[batch].get(seed, epochs) for batch in batches} for seed in sorted(seeds)
    ]
    means = [statistics.fmean(one[batch] for one in counted) for batch in batches]
    if means != sorted(means):
        return None
    fits = [critical_batch(one) for one in counted]
    known = [math.log(fit) for fit in fits if fit is not None]
    if len(known) < len(fits):
        return None
    found = interval(known)
    low, high = (math.exp(one) if math.isfinite(one) else one for one in (found.low, found.high))
    value = Interval(math.exp(found.mean), max(low, 0.0), high, found.number)
    at_most = any(seeds - one.keys() for one in reached.values())
    return Critical(value, at_most=at_most, smallest=min(reached))


def draw(figure: "Figure", *, study: Study) -> None:
    """Draw the epochs to the target by batch, a line for each optimizer."""
    seeds, targets, epochs = study.seeds(), study.targets, study.epochs
    figure.suptitle(
        "Epochs to a fixed accuracy on CIFAR-10 by batch,\nat each optimizer's own rate and decay",
        x=0.01, ha="left", size=13.5, weight="bold", color=INK,
    )  # fmt: skip
    figure.supxlabel(
        "Lines: mean of the seeds, which are faint. Crosses at the top: a seed did not reach\n"
        "it. Diamonds: the critical batch, which takes a fifth more epochs than small batches,\n"
        "where the fit has one.",
        x=0.01, ha="left", size=9, color=MUTED,
    )  # fmt: skip
    panels = figure.subplots(len(PANELS), 1, sharex=True)
    for axes, (title, (network, column)) in zip(panels, PANELS.items(), strict=True):
        for place, optimizer in enumerate(LABELS):
            if by_batch := runs_by_batch(seeds, network, optimizer):
                _draw_line(axes, by_batch, optimizer, place, targets[network], column, epochs)
        axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        axes.minorticks_off()
        axes.set_xlim(BATCHES[0] / 1.6, BATCHES[-1] * 1.6)
        axes.set_xticks(BATCHES, [f"{batch:,}" for batch in BATCHES])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(title, color=INK, weight="bold", size=12)
        axes.set_xlabel("Batch →", loc="right")
        axes.set_ylabel(f"Epochs to {targets[network]:.0%} top-1")
        if axes.lines:
            legend = axes.legend(
                frameon=False, fontsize=9, loc="lower right", title="Optimizer: critical batch",
                alignment="left",
            )  # fmt: skip
            legend.get_title().set_fontsize(9)


def runs_by_batch(seeds: Seeds, network: str, optimizer: str) -> dict[int, Runs]:
    """Return the runs of an optimizer on a network by batch."""
    return {
        cell.batch: runs for cell, runs in sorted(seeds.items(), key=lambda one: one[0].batch)
        if (cell.network, cell.optimizer) == (network, optimizer) and runs
    }  # fmt: skip


def _draw_line(  # noqa: PLR0913 -- what one line needs
    axes: "Axes",
    by_batch: Mapping[int, Runs],
    optimizer: str,
    place: int,
    target: float,
    column: int,
    epochs: float,
) -> None:
    """Draw one optimizer; a batch with a seed that did not reach the target has no mean."""
    colour, means = SHADES[optimizer], {}
    for batch, runs in by_batch.items():
        x, reached = batch * 1.03 ** (place - 2), epochs_by_seed(runs, target, column).values()
        axes.plot(
            [x] * len(reached), list(reached), color=colour, alpha=0.35, marker="o", ms=4, lw=0
        )
        if len(reached) == len(runs):
            means[batch] = statistics.fmean(reached)
        else:
            x = batch * 1.12 ** (place - 2)
            axes.plot([x], [epochs * 1.15], color=colour, marker="x", mec=colour, mew=2, lw=0)
    critical = critical_batches(by_batch, target, epochs=epochs, column=column)
    label = LABELS[optimizer]
    if critical:
        label += f": {critical.short}"
    axes.plot(list(means), list(means.values()), color=colour, lw=2, label=label)
    if critical and means and min(means) <= (found := critical.value.mean) <= max(means):
        axes.plot([found], [_between(means, found)], color=colour, marker="D", ms=8)


def _between(means: Mapping[int, float], batch: float) -> float:
    """Return the height of a line at a batch, straight in logarithms between its points."""
    below = max(one for one in means if one <= batch)
    above = min(one for one in means if one >= batch)
    share = math.log(batch / below) / math.log(above / below) if above > below else 0.0
    return means[below] * math.exp(share * math.log(means[above] / means[below]))


def tables(study: Study) -> Iterator[str]:
    """Yield the lines of the tables in Markdown."""
    seeds = study.seeds()
    for title, (network, column) in PANELS.items():
        target = study.targets[network]
        yield (
            f"| {title} | batch | rate | decay | epochs to {target:.0%} | reached | "
            "top-1 at the end, % | noise scale |"
        )
        yield "|---" * 8 + "|"
        for cell, runs in seeds.items():
            if cell.network == network and runs:
                yield _row(cell, runs, [*study.tried(cell)], target, column)
        yield ""
    yield f"| critical batch | {' | '.join(PANELS)} |"
    yield "|---" * (1 + len(PANELS)) + "|"
    for optimizer, label in LABELS.items():
        texts = []
        for network, column in PANELS.values():
            by_batch, target = runs_by_batch(seeds, network, optimizer), study.targets[network]
            found = critical_batches(by_batch, target, epochs=study.epochs, column=column)
            texts.append(str(found) if found else "not found")
        yield f"| {label} | {' | '.join(texts)} |"


def _row(cell: Cell, runs: Runs, tried: list[Setting], target: float, column: int) -> str:
    reached = list(epochs_by_seed(runs, target, column).values())
    noise = [run["noise"]["value"] for run in runs if run["noise"] and run["noise"]["value"]]
    kind = "polished" if column == POLISHED else "top1"
    top1 = [run[kind] for run in runs if run[kind] is not None]
    texts = [
        LABELS[cell.optimizer],
        f"{cell.batch:,}",
        _at_end(runs[0]["rate"], {rate for rate, _ in tried}),
        _at_end(runs[0]["decay"], {decay for _, decay in tried}),
        interval(reached).with_ends(".1f") if reached else "",
        f"{len(reached)} of {len(runs)}",
        interval(top1).scaled(100).with_ends(".1f") if top1 else "",
        f"{statistics.median(noise):,.0f}" if noise else "",
    ]
    return f"| {' | '.join(texts)} |"


def _at_end(value: float, tried: set[float]) -> str:
    """Return a value, with a word if it is the highest or the lowest one tried."""
    ends = {max(tried): " (highest)", min(tried): " (lowest)"}
    return f"{value:g}{ends.get(value, '')}"


def main() -> None:
    """Draw the figure and print the tables."""
    study = Study(frozen(NAME))
    drawn = partial(draw, study=study)
    save_svg(RESULTS / f"{NAME}.svg", drawn, size=(560, 900))
    print("\n".join(tables(study)))


if __name__ == "__main__":
    main()

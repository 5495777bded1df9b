"""Which optimizer at a large batch: epochs to a fixed accuracy by optimizer, network and batch.

    python benchmarks/optimizers.py [--only WORDS ...] [--processes N]

Needs LARGEBATCH_DATA, the folder of CIFAR-10. Writes
benchmarks/results/optimizers_<machine>_<date>.json after every run, which optimizers_figure.py
draws. Started again it goes on where it was stopped: what the newest such file has is not
done again.

CIFAR-10 at 16 x 16 pixels, two networks (optimizers_runs.py): a ResNet-9 of an eighth of the
original's width with BatchNorm over 125 images at every batch, and a vision transformer with
LayerNorm. Batches of BATCHES; EPOCHS epochs for all. Networks with BatchNorm are evaluated as they
are and polished; polished top-1 judges the search, since at a batch of 16,000 running statistics
are three epochs old.

The search of a cell (a network, an optimizer and a batch) has TRIALS trials for every optimizer
with a seed that no result has. They train on 45,000 images and are judged on the other 5,000: the
trial that reaches TARGETS in the fewest epochs is the best, or the one with the higher top-1 at the
end. A trial ends when it has reached the target, or another one has reached it in fewer epochs: so
settings are the fastest to the target, and nothing chooses them for top-1 at the end. The first
RATES trials change the peak rate by factors of STRIDE, with one beyond the end where the best is
the highest or lowest, else one between the best and its better neighbour; the rest change the
weight decay at the best rate, by factors of DECAY_STRIDE. Momenta are those of the recipe's
defaults, and beta2 is 0.95 for all.

Then SEEDS seeds are trained with the best setting on all images and evaluated on the test images,
which choose nothing.

The order: searches and two seeds at 2,000 and 8,000, then at 16,000 and 500, then the other seeds,
so that a study which is stopped has the most useful part.

Without SOAP, which the package does not offer (docs/optimizers.md), and without Shampoo, whose
inverse roots take about 0.3 seconds an update of the ResNet-9: three times the rest of an update at
a batch of 500.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from measuring import RESULTS, circumstances, few_processes, hardware, newest, today
from optimizers_runs import (
    NETWORKS,
    RESNET,
    SECTIONS,
    VIT,
    Cell,
    Job,
    Setting,
    Setup,
    carry_out,
    epochs_to,
    judged,
    offered,
)
from polishing_data import prepare

NAME = "optimizers"
RECIPE = Path(__file__).parent / "recipes" / "optimizers_cifar10.yaml"

BATCHES = (500, 2_000, 8_000, 16_000)
EPOCHS = 10
TARGETS = {RESNET: 0.4, VIT: 0.3}
"""Top-1 that the epochs are counted to."""

STRIDE, DECAY_STRIDE = 4.0, 5.0
FIRST = (1, 1 / STRIDE, STRIDE)
"""Factors of the first rate with which a search begins. Only later trials end sooner than at the
target: the scores of the first ones say where to go on."""

RATES, TRIALS = 4, 6
SEEDS, FIRST_SEEDS = 5, 2
STAGES = (((2_000, 8_000), FIRST_SEEDS), ((16_000, 500), FIRST_SEEDS), (BATCHES, SEEDS))
"""Order of the work: batches, and how many seeds of them."""

NEVER = -1e6
"""Score of a trial that does not reach the target, less its top-1."""

Runs = dict[str, dict[str, Any]]
"""Results by the name of the run."""


def proposals(start: Setting, tried: Mapping[Setting, float]) -> list[Setting]:
    """Return the settings to try next, given the scores of those tried; none after TRIALS.

    >>> start = Setting(1.0, 0.1)
    >>> [setting.rate for setting in proposals(start, {})]
    [1.0, 0.25, 4.0]
    """
    first = [start.times(rate=factor) for factor in FIRST]
    if missing := [setting for setting in first if setting not in tried]:
        return missing
    rates = sorted(
        (setting for setting in tried if setting.decay == start.decay), key=lambda one: one.rate
    )
    best = max(rates, key=lambda setting: tried[setting])
    if len(rates) < RATES:
        return [_next_rate(rates, rates.index(best), tried)]
    decays = [best.times(decay=factor) for factor in (1 / DECAY_STRIDE, DECAY_STRIDE)]
    return [setting for setting in decays if setting not in tried]


def _next_rate(rates: list[Setting], best: int, tried: Mapping[Setting, float]) -> Setting:
    if best == len(rates) - 1:
        return rates[-1].times(rate=STRIDE)
    if best == 0:
        return rates[0].times(rate=1 / STRIDE)
    neighbour = max(rates[best - 1], rates[best + 1], key=lambda setting: tried[setting])
    return rates[best].times(rate=(neighbour.rate / rates[best].rate) ** 0.5)


def best_of(tried: Mapping[Setting, float]) -> Setting:
    """Return the setting with the highest score, the first of equal ones."""
    return max(tried, key=lambda setting: tried[setting])


def at_end(tried: Mapping[Setting, float], setting: Setting) -> tuple[str, str]:
    """Return rate and decay, each with a word where none higher or none lower was tried."""

    def word(value: float, others: set[float]) -> str:
        ends = {max(others): " (highest)", min(others): " (lowest)"}
        return f"{value:g}{ends.get(value, '')}"

    return (
        word(setting.rate, {one.rate for one in tried}),
        word(setting.decay, {one.decay for one in tried}),
    )


def score(run: Mapping[str, Any]) -> float:
    """Return the rank of a trial: fewer epochs to the target, else higher top-1, are better."""
    curve = [(row[0], judged(row)) for row in run["curve"]]
    epochs = epochs_to(TARGETS[run["network"]], curve)
    if run["diverged"] or not curve:
        return NEVER
    return NEVER + curve[-1][1] if epochs is None else -epochs


class Study:
    """The results so far, and what is to be done."""

    name = NAME
    score = staticmethod(score)
    search: ClassVar[dict[str, int]] = {"trials": TRIALS, "rates": RATES}
    """Size of the search of a cell."""

    def __init__(self, path: Path, cells: list[Cell], *, epochs: float = EPOCHS) -> None:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if found and found["epochs"] != epochs:
            raise SystemExit(f"{path} holds runs of {found['epochs']} epochs, not {epochs}")
        if found and (found["targets"], found["search"]) != (TARGETS, self.search):
            raise SystemExit(f"{path} holds a search with other targets or trials")
        self.path, self.cells, self.epochs = path, cells, epochs
        self.runs: Runs = found.get("runs", {})
        self.circumstances = circumstances(self.name, f"python benchmarks/{self.name}.py")
        if found:  # those of the oldest run
            self.circumstances["sources"] = found["sources"]
        self.under_way: set[str] = set()

    def of(self, cell: Cell) -> list[dict[str, Any]]:
        """Return the results of a cell, trials and seeds."""
        name = (cell.network, cell.optimizer, cell.batch)
        return [
            run
            for run in self.runs.values()
            if (run["network"], run["optimizer"], run["batch"]) == name
        ]

    def tried(self, cell: Cell) -> dict[Setting, float]:
        """Return the scores of a cell's trials."""
        return {
            Setting(run["rate"], run["decay"]): self.score(run)
            for run in self.of(cell)
            if run["seed"] is None
        }

    def seeds(self, cell: Cell, setting: Setting) -> list[dict[str, Any]]:
        """Return the results of a setting's seeds, in their order."""
        found = [
            run
            for run in self.of(cell)
            if run["seed"] is not None and Setting(run["rate"], run["decay"]) == setting
        ]
        return sorted(found, key=lambda run: int(run["seed"]))

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs that can run now, in the order of STAGES."""
        for batches, seeds in STAGES:
            cells = [cell for batch in batches for cell in self.cells if cell.batch == batch]
            searched: list[tuple[Cell, Setting]] = []
            for cell in cells:
                tried = self.tried(cell)
                if settings := proposals(cell.start, tried):
                    scores = list(tried.values()) if len(tried) >= len(FIRST) else [NEVER]
                    bound = -max(scores)
                    target = TARGETS[cell.network]
                    yield from (
                        Job(cell, setting, target=target, bound=bound) for setting in settings
                    )
                else:
                    searched.append((cell, best_of(tried)))
            for seed, (cell, setting) in product(range(1, seeds + 1), searched):
                yield Job(cell, setting, seed)

    def next(self) -> Job | None:
        """Return the next job, which then is under way; None if there is none now."""
        known = self.runs.keys() | self.under_way
        job = next((job for job in self.jobs() if job.key not in known), None)
        if job is not None:
            self.under_way.add(job.key)
        return job

    def take(self, job: Job, result: dict[str, Any]) -> None:
        """Record a result and replace the file of results."""
        now = {"date": today(), "commit": self.circumstances["commit"]}
        self.runs[job.key] = {**result, **now}
        self.under_way.remove(job.key)
        content = {
            **self.circumstances,
            "epochs": self.epochs,
            "targets": TARGETS,
            "search": self.search,
            "runs": self.runs,
        }
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
        partial.replace(self.path)


def train(study: Study, setup: Setup, *, processes: int) -> None:
    """Run the remaining jobs, several at once."""
    with few_processes(processes) as pool:
        jobs: dict[Future[dict[str, Any]], Job] = {}
        while True:
            while len(jobs) < processes and (job := study.next()):
                print(f"begins: {job.key}", flush=True)
                jobs[pool.submit(carry_out, job, setup)] = job
            if not jobs:
                return
            done, _ = wait(jobs, return_when=FIRST_COMPLETED)
            for each in done:
                job, result = jobs.pop(each), each.result()
                study.take(job, result)
                polished = result["polished"] or math.nan
                print(f"{job.key}: {result['top1']:.2%}, polished {polished:.2%}", flush=True)


def every_cell(words: list[str]) -> list[Cell]:
    """Return the cells whose name has all of the words."""
    names = offered()
    for name in SECTIONS.keys() - set(names):
        print(f"left out: {name}, which this version of the package does not have", flush=True)
    cells = (Cell(*one) for one in product(NETWORKS, names, BATCHES))
    return [cell for cell in cells if set(words) <= set(cell.key.split(", "))]


def main() -> None:
    """Run what the newest results do not have."""
    parser = argparse.ArgumentParser(description="which optimizer at a large batch")
    words = "cells named by all of these words"
    parser.add_argument("--only", nargs="+", default=[], metavar="WORDS", help=words)
    args = parse(parser)
    carry_on(Study(results(NAME, args.results), every_cell(args.only)), args)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options of a study, those of `parser` too."""
    add = parser.add_argument
    add("--processes", type=int, default=2, metavar="N", help="runs at a time, of one thread each")
    add("--work", type=Path, default=Path("build") / NAME, metavar="DIR", help="for the runs")
    add("--results", type=Path, default=RESULTS, metavar="DIR")
    return parser.parse_args()


def results(name: str, folder: Path) -> Path:
    """Return the newest results, or the file of new ones."""
    return newest(name, folder) or folder / f"{name}_{hardware()}_{today()}.json"


def carry_on(study: Study, args: argparse.Namespace) -> None:
    """Train what is left of a study on CIFAR-10."""
    setup = Setup(
        recipe=RECIPE,
        data=prepare(args.work / "data", "cifar10", train=50_000),
        epochs=EPOCHS,
        held_out=5_000,
        statistics=5_000,
    )
    train(study, setup, processes=args.processes)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")

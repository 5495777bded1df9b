"""Which optimizer at a large batch: epochs to a fixed accuracy by optimizer, network and batch.

    python benchmarks/optimizers.py [--only WORDS ...] [--processes N]

Needs LARGEBATCH_DATA, the folder of CIFAR-10. Writes
benchmarks/results/optimizers_<machine>_<date>.json after every run, which optimizers_figure.py
draws. Started again it goes on where it was stopped: runs go on from their last checkpoint, and
what the newest such file has is not done again.

CIFAR-10 at 16 x 16 pixels, two networks (optimizers_runs.py): a ResNet-9 of an eighth of the
original's width with BatchNorm over 125 images at every batch, and a vision transformer with
LayerNorm. Batches of BATCHES; EPOCHS epochs for all.

The search of a cell (a network, an optimizer and a batch) has TRIALS trials for every optimizer,
each as long as a run, with a seed that no result has. They train on 45,000 images and are judged on
the other 5,000: the trial that reaches TARGETS in the fewest epochs is the best, or the one with
the higher top-1 at the end. The first RATES trials change the peak rate by factors of STRIDE, with
one beyond the end where the best is the highest or lowest, else one between the best and its
better neighbour; the rest change the weight decay at the best rate, by factors of DECAY_STRIDE.
Momenta are those of the recipe's defaults.

Then SEEDS seeds are trained with the best setting on all images and evaluated on the test images,
which choose nothing. Those with BatchNorm are polished too: the last CLEAN_EPOCHS epochs on clean
images, then exact statistics.

The order: searches and two seeds at 2,000 and 8,000, then at 16,000 and 500, then the other seeds,
so that a study which is stopped has the most useful part.

Cost of the whole: 40 cells x (6 trials of 0.9 + 5 seeds of 1.1) x 16 epochs of 50,000 images, 175
million images of each network. One core of a CPU with AVX-512 trains about 6,500 images a second of
the ResNet-9 and 5,000 of the transformer, evaluations and input included: 17 hours of one core, 9
hours of two.

Without SOAP, which the package does not offer (docs/optimizers.md), and without Shampoo, whose
inverse roots take about 0.3 seconds an update of the ResNet-9: three times the rest of an update at
a batch of 500.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import product
from pathlib import Path
from typing import Any

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
    offered,
)
from polishing_data import prepare

NAME = "optimizers"
RECIPE = Path(__file__).parent / "recipes" / "optimizers_cifar10.yaml"

BATCHES = (500, 2_000, 8_000, 16_000)
EPOCHS = 16
CLEAN_EPOCHS = 1
TARGETS = {RESNET: 0.55, VIT: 0.4}
"""Top-1 that the epochs are counted to."""

STRIDE, DECAY_STRIDE = 4.0, 5.0
RATES, TRIALS = 4, 6
SEEDS, FIRST_SEEDS = 5, 2
STAGES = (((2_000, 8_000), FIRST_SEEDS), ((16_000, 500), FIRST_SEEDS), (BATCHES, SEEDS))
"""Order of the work: batches, and how many seeds of them."""

Runs = dict[str, dict[str, Any]]
"""Results by the name of the run."""


def proposals(start: Setting, tried: Mapping[Setting, float]) -> list[Setting]:
    """Return the settings to try next, given the scores of those tried; none after TRIALS.

    >>> start = Setting(1.0, 0.1)
    >>> [setting.rate for setting in proposals(start, {})]
    [1.0, 0.25, 4.0]
    """
    first = [start.times(rate=factor) for factor in (1, 1 / STRIDE, STRIDE)]
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


def score(run: Mapping[str, Any]) -> float:
    """Return the rank of a trial: fewer epochs to the target, then higher top-1, are better."""
    epochs = epochs_to(TARGETS[run["network"]], run["curve"])
    reached = -float(epochs) if epochs is not None and not run["diverged"] else -1e6
    return reached + 1e-3 * float(run["top1"])


class Study:
    """The results so far, and what is to be done."""

    def __init__(self, path: Path, cells: list[Cell], *, epochs: float = EPOCHS) -> None:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if found and found["epochs"] != epochs:
            raise SystemExit(f"{path} holds runs of {found['epochs']} epochs, not {epochs}")
        self.path, self.cells, self.epochs = path, cells, epochs
        self.runs: Runs = found.get("runs", {})
        self.circumstances = circumstances(NAME, "python benchmarks/optimizers.py")
        if found:  # those of the oldest run
            self.circumstances["sources"] = found["sources"]
        self.under_way: set[str] = set()

    def tried(self, cell: Cell) -> dict[Setting, float]:
        """Return the scores of a cell's trials."""
        return {
            Setting(run["rate"], run["decay"]): score(run)
            for run in self.runs.values()
            if run["seed"] is None
            and Cell(run["network"], run["optimizer"], run["batch"]) == cell
        }  # fmt: skip

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs that can run now, in the order of STAGES."""
        for batches, seeds in STAGES:
            cells = [cell for batch in batches for cell in self.cells if cell.batch == batch]
            searched: list[tuple[Cell, Setting]] = []
            for cell in cells:
                tried = self.tried(cell)
                if settings := proposals(cell.start, tried):
                    yield from (Job(cell, setting) for setting in settings)
                else:
                    searched.append((cell, max(tried, key=lambda setting: tried[setting])))
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
            "search": {"trials": TRIALS, "rates": RATES},
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
                epochs = epochs_to(TARGETS[job.cell.network], result["curve"])
                print(f"{job.key}: top-1 {result['top1']:.2%}, target at {epochs}", flush=True)


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
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="WORDS", help="cells named by all of these words")
    add("--processes", type=int, default=2, metavar="N", help="runs at a time, of one thread each")
    add("--work", type=Path, default=Path("build") / NAME, metavar="DIR", help="for the runs")
    add("--results", type=Path, default=RESULTS, metavar="DIR")
    args = parser.parse_args()
    path = newest(NAME, args.results) or args.results / f"{NAME}_{hardware()}_{today()}.json"
    setup = Setup(
        recipe=RECIPE,
        data=prepare(args.work / "data", "cifar10", train=50_000),
        epochs=EPOCHS,
        held_out=5_000,
        every_epochs=0.5,
        clean_epochs=CLEAN_EPOCHS,
        statistics=10_000,
        work=args.work,
    )
    train(Study(path, every_cell(args.only)), setup, processes=args.processes)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")

"""Search rate and weight decay together at a large batch, and one after the other.

    python benchmarks/optimizers_together.py [--processes N]

The ResNet-9 of optimizers.py on CIFAR-10, at a batch of BATCH, with the optimizers of OPTIMIZERS.
Every combination of RATES times the first peak rate and DECAYS times the first weight decay is a
trial, as there: on 45,000 images, judged by the epochs to the target on the other 5,000, polished,
at which it ends.

Two settings are chosen from the same trials. Together: the best of all. One after the other: the
best rate at the first weight decay, then the best weight decay at that rate. Where they differ,
SEEDS seeds of both are trained on all images and evaluated on the test images.

Needs LARGEBATCH_DATA, the folder of CIFAR-10. Writes
benchmarks/results/optimizers_together_<machine>_<date>.json after every run, and prints the tables.
Started again it goes on where it was stopped.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, ClassVar

from optimizers import NEVER, TARGETS, Study, best_of, carry_on, parse, results
from optimizers_runs import RESNET, Cell, Job, Setting, epochs_to, judged

from largebatch.studies.metrics import interval

NAME = "optimizers_together"
OPTIMIZERS, BATCH = ("nesterov", "lars", "muon"), 8_000
RATES, DECAYS = (0.25, 0.5, 1.0, 2.0, 4.0), (0.04, 0.2, 1.0, 5.0, 25.0)
SEEDS = 5

Tried = Mapping[Setting, float]
Runs = list[dict[str, Any]]


class Together(Study):
    """The results so far, and what is to be done."""

    name = NAME
    search: ClassVar[dict[str, int]] = {"trials": len(RATES) * len(DECAYS), "rates": len(RATES)}

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs that can run now."""
        for cell in self.cells:
            tried = self.tried(cell)
            if missing := [setting for setting in grid(cell) if setting not in tried]:
                target = TARGETS[cell.network]
                yield from (Job(cell, setting, target=target) for setting in missing)
                continue
            chosen = {best_of(tried), one_after_other(cell, tried)}
            if len(chosen) > 1:
                for seed, setting in product(range(1, SEEDS + 1), sorted(chosen, key=_values)):
                    yield Job(cell, setting, seed)


def grid(cell: Cell) -> list[Setting]:
    """Return the trials, those of the first weight decay first."""
    decays = sorted(DECAYS, key=lambda factor: max(factor, 1 / factor))
    return [cell.start.times(rate=rate, decay=decay) for decay, rate in product(decays, RATES)]


def one_after_other(cell: Cell, tried: Tried) -> Setting:
    """Return the best weight decay at the best rate of the first weight decay."""
    rate = best_of({it: tried[it] for it in tried if it.decay == cell.start.decay}).rate
    return best_of({it: tried[it] for it in tried if it.rate == rate})


def _values(setting: Setting) -> tuple[float, float]:
    return setting.rate, setting.decay


def show(study: Study) -> Iterator[str]:
    """Yield the trials of every optimizer as a table, and what the two choices reach."""
    for cell in study.cells:
        tried = study.tried(cell)
        rates = sorted({setting.rate for setting in tried})
        yield f"\n| {cell.optimizer}: decay, rate | {' | '.join(f'{rate:g}' for rate in rates)} |"
        yield "|---" * (len(rates) + 1) + "|"
        for decay in sorted({setting.decay for setting in tried}):
            cells = (_score(tried.get(Setting(rate, decay))) for rate in rates)
            yield f"| {decay:g} | {' | '.join(cells)} |"
        if len(tried) < len(grid(cell)):
            continue
        chosen = best_of(tried), one_after_other(cell, tried)
        yield "together {}, one after the other {}".format(*chosen)
        if chosen[0] != chosen[1]:
            yield from gains(*(study.seeds(cell, setting) for setting in chosen))


def gains(ours: Runs, theirs: Runs) -> Iterator[str]:
    """Yield the mean differences of paired seeds, together less one after the other."""
    pairs = list(zip(ours, theirs, strict=False))
    curves = [[[(row[0], judged(row)) for row in run["curve"]] for run in pair] for pair in pairs]
    points = [100 * (one[-1][1] - other[-1][1]) for one, other in curves]
    yield f"polished top-1 at the end, points: {interval(points)}"
    epochs = [[epochs_to(TARGETS[RESNET], curve) for curve in pair] for pair in curves]
    known = [one - other for one, other in epochs if one is not None and other is not None]
    if known:
        yield f"epochs to the target: {interval(known)}"


def _score(score: float | None) -> str:
    if score is None:
        return ""
    return f"{-score:.2f}" if score > NEVER / 2 else "not reached"


def main() -> None:
    """Run what the newest results do not have, and print the tables."""
    args = parse(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    cells = [Cell(RESNET, optimizer, BATCH) for optimizer in OPTIMIZERS]
    study = Together(results(NAME, args.results), cells)
    carry_on(study, args)
    print("\n".join(show(study)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")

"""Search rate and weight decay together at a large batch, and one after the other.

    python benchmarks/optimizers_together.py [--processes N]

The ResNet-9 of optimizers.py on CIFAR-10, at a batch of BATCH, with the optimizers of OPTIMIZERS.
Every combination of RATES times the first peak rate and DECAYS times the first weight decay is a
trial: a whole run on 45,000 images, judged by polished top-1 at its end on the other 5,000.

Two settings are chosen from the same trials. Together: the best of all. One after the other: the
best rate at the first weight decay, then the best weight decay at that rate, which needs 9 of the
25. Where they differ, SEEDS seeds of both are trained on all images and evaluated on the test
images. Their interval is that of two settings: another search can find others.

Needs LARGEBATCH_DATA, the folder of CIFAR-10. Writes
benchmarks/results/optimizers_together_<machine>_<date>.json after every run, and prints the tables.
Started again it goes on where it was stopped.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, ClassVar

from optimizers import Study, at_end, best_of, carry_on, parse, results
from optimizers_runs import LABELS, RESNET, Cell, Job, Setting

from largebatch.lab.studies.metrics import interval

NAME = "optimizers_together"
OPTIMIZERS, BATCH = ("nesterov", "lars", "muon"), 8_000
RATES, DECAYS = (0.25, 0.5, 1.0, 2.0, 4.0), (0.04, 0.2, 1.0, 5.0, 25.0)
SEEDS = 5

Tried = Mapping[Setting, float]
Runs = list[dict[str, Any]]


def final_top1(run: Mapping[str, Any]) -> float:
    """Return polished top-1 at the end of a run; chance if it diverged."""
    return float(run["polished"])


class Together(Study):
    """The results so far, and what is to be done."""

    name = NAME
    score = staticmethod(final_top1)
    search: ClassVar[dict[str, int]] = {"trials": len(RATES) * len(DECAYS), "rates": len(RATES)}

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs that can run now."""
        for cell in self.cells:
            tried = self.tried(cell)
            if missing := [setting for setting in grid(cell) if setting not in tried]:
                yield from (Job(cell, setting) for setting in missing)
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
        titles = " | ".join(f"{rate:g}" for rate in rates)
        yield f"\n| {LABELS[cell.optimizer]}: decay, rate | {titles} |"
        yield "|---" * (len(rates) + 1) + "|"
        for decay in sorted({setting.decay for setting in tried}):
            scores = (tried.get(Setting(rate, decay)) for rate in rates)
            cells = ("" if score is None else f"{score:.1%}" for score in scores)
            yield f"| {decay:g} | {' | '.join(cells)} |"
        if len(tried) < len(grid(cell)):
            continue
        chosen = best_of(tried), one_after_other(cell, tried)
        for name, setting in zip(("together", "one after the other"), chosen, strict=True):
            yield "{}: rate {}, decay {}".format(name, *at_end(tried, setting))
        if chosen[0] != chosen[1]:
            yield from gains(*(study.seeds(cell, setting) for setting in chosen))


def gains(ours: Runs, theirs: Runs) -> Iterator[str]:
    """Yield the mean difference of paired seeds, together less one after the other."""
    pairs = zip(ours, theirs, strict=False)
    points = [100 * (final_top1(one) - final_top1(other)) for one, other in pairs]
    if points:
        yield f"polished top-1 at the end, points: {interval(points).with_ends('+.1f')}"


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

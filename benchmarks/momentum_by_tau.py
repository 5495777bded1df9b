"""Measure which momentum late gradients need: LeNet-5 on the digits, 30 simulated learners.

    python benchmarks/momentum_by_tau.py [--processes N] [--write]

Needs the extra `studies`. Trains by `largebatch study staleness` and goes on where it was stopped;
with --write it trains nothing. Shares its runs with warmup_by_tau.py. Writes
benchmarks/results/momentum_by_tau_<machine>_<date>.json.

A momentum of m makes an update of gradients that are m / (1 - m) updates old on average; staleness
tau adds to it. The rule that is tested holds this age at that of a momentum of 0.9 without
staleness, 9 updates: m / (1 - m) = max(0, 9 - tau).

Every momentum of a condition (CONDITIONS) has a rate of its own: the peak is e (1 - m), falls in a
straight line to zero, and SEARCHED seeds try e from GRID, and one beyond the end as long as the
best is the highest or the lowest. The best has the highest top-1 of its worst seed, then the lowest
loss: a rate at which one of them fails is not taken. The seeds after them are the result. They
share the images of the search, the 360 of the digits' validation split.

Decided before: the differences between the rule's momentum and the others of its condition hold
together, with 95 %, by the noise of all cells of which no run fails (contrasts.py). A cell of which
one fails has no difference.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from contrasts import Noise, contrast, no_run_fails, noise_of, none_fails
from measuring import run_largebatch, write

from largebatch.lab.studies.metrics import interval
from largebatch.lab.studies.staleness.run import Row, rows_of, runs_of
from largebatch.lab.studies.staleness.study import cells_of, load_study

NAME = "momentum_by_tau"
LEARNERS, MU, EPOCHS = 30, 4, 12
USUAL = 0.9
CONDITIONS: dict[str, tuple[int, str, tuple[float, ...]]] = {
    "hardsync": (0, "staleness", (0.0, USUAL)),
    "6-softsync, over tau": (6, "staleness", (0.0, 0.8, USUAL)),
    "asynchronous, over tau": (30, "staleness", (0.0, 0.5, USUAL)),
    "asynchronous, fixed rate": (30, "none", (0.0, USUAL)),
}
"""Sigma, the modulation of the rate, which hardsync does not have, and the momenta that are tried,
the rule's among them."""

GRID = (0.0125, 0.05, 0.2)
STRIDE = 4.0
SEARCHED, SEEDS = 3, 8
"""Number of seeds of the search, and of all with them."""

TOGETHER = sum(len(momenta) - 1 for _, _, momenta in CONDITIONS.values())
"""Number of differences whose intervals hold together."""


class Point(NamedTuple):
    """A condition, a momentum, the rate of SGD without momentum that goes as far (e), warm-up."""

    condition: str
    momentum: float
    far: float
    warmup: float = 0.0
    """Epochs of it, in which the rate rises from 0 to its peak."""

    @property
    def arm(self) -> "Point":
        """The point whatever its rate."""
        return self._replace(far=0.0)

    @property
    def recipe(self) -> str:
        """Name of its recipe."""
        warmup = f"-w{self.warmup:g}" if self.warmup else ""
        return f"m{self.momentum:g}-e{self.far:g}{warmup}"

    @property
    def rate(self) -> float:
        """Peak learning rate."""
        return float(f"{self.far * (1 - self.momentum):.4g}")

    @property
    def cell(self) -> str:
        """Name of its cell in the study."""
        sigma, modulation, _ = CONDITIONS[self.condition]
        tail = f"-{modulation}" if sigma else ""
        return f"{self.recipe}-usual-sigma{sigma}-mu{MU}-lambda{LEARNERS}{tail}"


Found = Mapping[Point, Row]


def main() -> None:
    """Search the rates, train the seeds and write the result."""
    args = parse(__doc__.splitlines()[0])
    points = [
        Point(condition, *each)
        for condition, (_, _, momenta) in CONDITIONS.items()
        for each in product(momenta, GRID)
    ]
    search, rows = search_and_train(points, args)
    print(write(NAME, f"python benchmarks/{NAME}.py", result(search, rows)))


def parse(purpose: str) -> argparse.Namespace:
    """Return the options of a study of late gradients."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--work", type=Path, default=Path("runs") / NAME, metavar="DIR")
    parser.add_argument("--write", action="store_true", help="train nothing, write what is there")
    return parser.parse_args()


def search_and_train(points: Sequence[Point], args: argparse.Namespace) -> tuple[Found, Found]:
    """Return the trials, and all seeds of the best ones."""
    args.work.mkdir(parents=True, exist_ok=True)
    search = carry_out(points, args, seeds=SEARCHED)
    while missing := beyond(search):
        search = carry_out([*search, *missing], args, seeds=SEARCHED)
    return search, carry_out(best(search), args, seeds=SEEDS)


def carry_out(points: Sequence[Point], args: argparse.Namespace, *, seeds: int) -> Found:
    """Train what has no record yet, unless `args.write`; return the recorded cells."""
    file, out = args.work / "study.yaml", args.work / "cells"
    file.write_text(json.dumps(study(points, seeds=seeds), indent=1), encoding="utf-8")
    if not args.write:
        words = ["study", "staleness", str(file), "--out", str(out)]
        run_largebatch([*words, "--processes", str(args.processes)])
    found = load_study(str(file))
    rows = rows_of(runs_of(cells_of(found, args.work), seeds=seeds, out=out))
    by_name = {row.cell.name: row for row in rows}
    return {point: by_name[point.cell] for point in points if point.cell in by_name}


def study(points: Sequence[Point], *, seeds: int) -> dict[str, Any]:
    """Return the file of a study of some points."""
    grids = []
    for condition, (sigma, modulation, _) in CONDITIONS.items():
        names = sorted({point.recipe for point in points if point.condition == condition})
        if not names:
            continue
        grids.append({
            "recipes": names, "times": ["usual"], "sigma": [sigma], "mu": [MU],
            "learners": [LEARNERS], "modulation": [modulation],
        })  # fmt: skip
    return {
        "name": NAME.replace("_", "-"),
        "seeds": seeds,
        "recipes": {point.recipe: recipe(point) for point in points},
        "machines": {"overhead": 0.002, "sample": 0.0005},
        "times": {"usual": {"factor": {"kind": "lognormal", "median": 1.0, "sigma": 0.1}}},
        "grids": grids,
    }


def recipe(point: Point) -> dict[str, Any]:
    """Return the recipe of a point: LeNet-5 on the digits, without polishing."""
    changes = {
        "duration.epochs": EPOCHS,
        "data.image_size": 16,
        "model": {"name": "lenet5", "arguments": {}},
        "batch": {"global_batch": MU * LEARNERS, "bn_span": None},
        "polish": None,
        "optimizer": {"kind": "sgd", "momentum": point.momentum, "weight_decay": 5e-4},
        "schedule": {
            "peak_lr": point.rate,
            "warmup": {"epochs": point.warmup} if point.warmup else None,
            "decay": {"kind": "polynomial", "power": 1.0},
        },
        "loss.label_smoothing": 0.0,
        "evaluation": {},
        "execution.cache": "memory",
    }
    return {"recipe": "digits_96", "set": changes}


def score(row: Row) -> tuple[float, float]:
    """Return the rank of a trial by its worst seed: higher top-1, then lower loss, are better."""
    tried = [one for one in row.found if one["seed"] <= SEARCHED]
    losses = [math.inf if one["loss"] is None else one["loss"] for one in tried]
    return min(one["top1"] for one in tried), -max(losses)


def best(search: Found) -> list[Point]:
    """Return the best point of every arm."""
    return [
        max((it for it in search if it.arm == arm), key=lambda it: score(search[it]))
        for arm in sorted({point.arm for point in search})
    ]


def beyond(search: Found) -> list[Point]:
    """Return the points to try next, where the best rate is the highest or the lowest."""
    found = []
    for point in best(search):
        tried = [it.far for it in search if it.arm == point.arm]
        if point.far == max(tried):
            found.append(point._replace(far=point.far * STRIDE))
        elif point.far == min(tried):
            found.append(point._replace(far=point.far / STRIDE))
    return found


def rule(tau: float) -> float:
    """Return the momentum with which gradients are as old as by USUAL without staleness.

    >>> round(rule(0.0), 3), rule(9.0), rule(27.0)
    (0.9, 0.0, 0.0)
    """
    age = max(0.0, USUAL / (1 - USUAL) - tau)
    return age / (1 + age)


def result(search: Found, rows: Found) -> dict[str, Any]:
    """Return the cells, the differences between momenta, and the rates that were tried."""
    noise = noise_of(none_fails(whole(rows).values()))
    return {
        "noise": noise._asdict(),
        "cells": [cell_of(point, row) for point, row in rows.items()],
        "differences": dict(differences(rows, noise)),
        "search": trials_of(search),
    }


def whole(rows: Found) -> dict[Point, Mapping[int, float]]:
    """Return top-1 by seed of the arms that have all seeds."""
    kept = {point.arm: by_seed(row) for point, row in rows.items()}
    return {arm: top1 for arm, top1 in kept.items() if len(top1) == SEEDS - SEARCHED}


def by_seed(row: Row) -> dict[int, float]:
    """Return top-1 by seed, without those of the search."""
    return {one["seed"]: one["top1"] for one in row.found if one["seed"] > SEARCHED}


def trials_of(search: Found) -> list[dict[str, Any]]:
    """Return the trials as the result has them."""
    return [
        {
            **point._asdict(),
            **{name: [one[name] for one in row.found[:SEARCHED]] for name in ("top1", "loss")},
        }
        for point, row in search.items()
    ]


def cell_of(point: Point, row: Row) -> dict[str, Any]:
    """Return a cell as the result has it."""
    top1 = by_seed(row)
    return {
        **point._asdict(),
        "rate": point.rate,
        "tau": row.tau,
        "rule": rule(row.tau),
        "top-1": interval(top1.values()).scaled(100)._asdict(),
        "loss": [one["loss"] for one in row.found if one["seed"] > SEARCHED],
        "by seed": top1,
    }


def differences(rows: Found, noise: Noise) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield by condition the momentum nearest to the rule's, and what it gains over each other."""
    kept = whole(rows)
    taus = {(point.condition, point.momentum): row.tau for point, row in rows.items()}
    for condition, (_, _, momenta) in CONDITIONS.items():
        tau = taus[condition, USUAL]
        chosen = min(momenta, key=lambda momentum: abs(momentum - rule(tau)))
        own = kept.get(Point(condition, chosen, 0.0), {})
        others = {other: kept.get(Point(condition, other, 0.0), {}) for other in momenta}
        gains = {
            f"{other:g}": contrast([(1.0, own), (-1.0, top1)], noise, together=TOGETHER)
            for other, top1 in others.items()
            if other != chosen and no_run_fails(own, top1)
        }
        minus = {other: gain.scaled(100)._asdict() for other, gain in gains.items()}
        yield condition, {"tau": tau, "rule": rule(tau), "nearest": chosen, "minus": minus}


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")

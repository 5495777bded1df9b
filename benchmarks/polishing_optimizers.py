"""Measure what polishing gains after Muon and after Shampoo, beside SGD and LARS, on the digits.

    python benchmarks/polishing_optimizers.py [--seeds 5] [--write]

Needs the extra `shampoo`. One process, one thread; goes on where it was stopped. With --write it
trains nothing. Writes benchmarks/results/polishing_optimizers_<machine>_<date>.json.

The network and the batch of recipes/quickstart/digits_96.yaml at 16 pixels, with crops from 8 % of
the area, EPOCHS epochs and a rate that falls to zero. The arms are those of the polishing study
(polishing_cells.py): the whole schedule on augmented images (control); the same, then exact
statistics; its last 2 epochs clean, without and with exact statistics.

Momenta and weight decays are the recipe's defaults, and LARS is that of the recipe. For every
optimizer SEARCH_SEED, which no result has, tries peak rates by factors of STRIDE around its first
one, and goes on as long as the best is the highest or the lowest. The control decides. All are
judged on the 360 images of the digits' validation split, on which the results are too.

Intervals are Student's over the seeds, of differences paired by seed. The test is one row for each
of Muon and Shampoo: clean, then statistics. `against lars` is the gain of an optimizer less that of
LARS with the same seed.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from measuring import best_rate, recorded, write
from polishing_cells import Cell, train_logged
from polishing_tables import by_group, paired, student, tables

from largebatch import load_recipe
from largebatch.recipe.recipe import Recipe

NAME = "polishing_optimizers"
RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart" / "digits_96.yaml"
EPOCHS, AREA, PIXELS = 12, 0.08, 16
CLEAN = (2,)
STRIDE, SEARCH_SEED = 3.0, 100

OPTIMIZERS: dict[str, tuple[str, float]] = {
    "sgd": ("{kind: sgd, nesterov: true}", 0.1),
    "lars": ("{kind: lars, convention: reference, weight_decay: 1e-4, eta: 2e-2}", 0.5),
    "muon": ("{kind: muon}", 0.01),
    "shampoo": ("{kind: shampoo}", 0.1),
}
"""The recipe's section, and the first rate that is tried."""


def main() -> None:
    """Search the rates, train the seeds and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("build") / NAME, metavar="DIR")
    parser.add_argument("--write", action="store_true", help="train nothing, write what is there")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if not args.write:
        rates = {name: search(name, args.work) for name in OPTIMIZERS}
        for seed, (name, rate) in product(range(1, args.seeds + 1), rates.items()):
            carry_out(cell(name, seed=seed, rate=rate), args.work)
    print(write(NAME, f"python benchmarks/{NAME}.py", result(read(args.work))))


def cell(optimizer: str, *, seed: int, rate: float) -> Cell:
    """Return a cell; one of the search has no clean epochs."""
    clean = () if seed == SEARCH_SEED else CLEAN
    return Cell(
        data="digits", batch="large", area=AREA, seed=seed, rate=rate, optimizer=optimizer,
        clean=clean,
    )  # fmt: skip


def recipe_of(of: Cell) -> Recipe:
    """Return the recipe of a cell, without polishing."""
    section, _ = OPTIMIZERS[of.optimizer]
    changes = [
        f"seed={of.seed}",
        "polish=null",
        f"duration.epochs={EPOCHS}",
        f"data.image_size={PIXELS}",
        f"data.crop_area=[{of.area}, 1.0]",
        f"optimizer={section}",
        f"schedule.peak_lr={of.rate}",
        "schedule.warmup.epochs=2",
        "schedule.decay.end_lr=0.0",
        "evaluation.every_epochs=null",
        "execution.cache=memory",
    ]
    return load_recipe(RECIPE, changes)


def search(name: str, work: Path) -> float:
    """Return the best rate of an optimizer; one that diverges is as good as chance."""

    def score(rate: float) -> float:
        found = carry_out(cell(name, seed=SEARCH_SEED, rate=rate), work)
        top1: float = found["arms"]["control"]["top1"]
        return top1

    middle = OPTIMIZERS[name][1]
    rates = [float(f"{middle * factor:.3g}") for factor in (1 / STRIDE, 1, STRIDE)]
    return best_rate(rates, score, stride=STRIDE)


def carry_out(of: Cell, work: Path) -> dict[str, Any]:
    """Return the recorded result of a cell; train it first if there is none."""
    return recorded(work / f"{of.key}, rate {of.rate:g}.json", lambda: train(of, work))


def train(of: Cell, work: Path) -> dict[str, Any]:
    """Train a cell, and say what it reached."""
    made = train_logged(of, recipe_of(of), work, data=None)
    words = ", ".join(f"{arm} {100 * (top['top1'] or 0):.2f}" for arm, top in made["arms"].items())
    print(f"{of.key}, rate {of.rate:g}: {made['seconds']:.0f} s; top-1 {words}", flush=True)
    return {"group": of.group, "seed": of.seed, "rate": of.rate, **made}


def read(work: Path) -> dict[str, dict[str, Any]]:
    """Return the recorded cells by name."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(work.glob("*.json"))
    }


def result(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the gains of each arm, against LARS's gains too, and the rates that were tried."""
    runs = {name: each for name, each in cells.items() if each["seed"] != SEARCH_SEED}
    tried = [each for each in cells.values() if each["seed"] == SEARCH_SEED]
    return {
        "polishing": tables(runs)["polishing"],
        "against lars": list(against_lars(runs)),
        "search": [
            {key: each[key] for key in ("group", "rate")} | each["arms"]["control"]
            for each in sorted(tried, key=lambda one: (one["group"], one["rate"]))
        ],
        "cells": runs,
    }


def against_lars(runs: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what polishing gains after an optimizer, less what it gains after LARS."""
    groups = by_group(runs)
    lars = gains(groups, "lars")
    for name, arm in product(OPTIMIZERS, lars):
        own = gains(groups, name)
        if name != "lars" and (values := paired(own.get(arm, {}), lars[arm])):
            yield {"optimizer": name, "arm": arm, "difference": student(values)}


def gains(groups: dict[str, dict[str, dict[int, float]]], name: str) -> dict[str, dict[int, float]]:
    """Return the gain of each arm over its control, in points by seed."""
    found = groups.get(cell(name, seed=1, rate=1.0).group, {})
    control = found.get("control", {})
    return {
        arm: {seed: top1 - control[seed] for seed, top1 in values.items() if seed in control}
        for arm, values in found.items()
        if arm != "control"
    }


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")

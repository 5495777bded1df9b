"""Measure the gains of Final Polishing, way by way, at a large and a small batch, over seeds.

    python -m benchmarks.studies.polishing.run [--processes 2] [--only WORDS ...] [--seeds 5]

Needs LARGEBATCH_DATA, the folder of Fashion-MNIST and CIFAR-10. Adds to the newest
benchmarks/results/polishing_study_<machine>_<date>.json the cells that it lacks; tables.py prints
its tables and draws its figures. The results are frozen, of commit 5a8dfc47, whose script also
searched the peak rates in RATES: with crops from 35 %, one seed that no result has and no
polishing, judged on 5,000 other training images; beyond the highest or lowest rate tried, one twice
as far. They serve both crop areas and every way, so at 35 % they favour the control.

The cells, each with 5 seeds, train on 7,680 images for 12 epochs:
- LARS on two sets, at batches of 480 and of 15, with crops from 8 % and from 35 % of the area.
  Ways: control, the whole schedule on augmented images; the same, then exact statistics; its last 2
  epochs clean instead, without and with exact statistics; and the control followed by 2 epochs in
  which only BatchNorm's scales and shifts and the classifier move, without and with exact
  statistics. The affine ways alone see more epochs than their control.
- CIFAR-10, large batch, crops from 8 %: 1, 2 and 5 clean epochs, under schedules that end at 0, 10
  and 30 % of the peak rate. Both sets, large batch, crops from 35 %: 2 and 5.
- Momentum SGD, crops from 35 %: at the small batch, and at the large one by the linear rule with
  warm-up (Goyal et al. 2017, arXiv:1706.02677, sections 2.1 and 2.2).
"""

import argparse
import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.speed.measuring import (
    RESULTS,
    circumstances,
    few_processes,
    hardware,
    newest,
    today,
)
from benchmarks.studies.images import SETS, write_part
from benchmarks.studies.polishing.tables import tables
from largebatch import load_recipe, run
from largebatch.errors import DivergedError
from largebatch.recipe.recipe import Recipe

NAME = "polishing_study"
IMAGES, EPOCHS, WARMUP_EPOCHS, AFFINE_EPOCHS = 7_680, 12, 2, 2
BATCHES = {"large": 480, "small": 15}  # BatchNorm's span is the small one in both
DEVICE_BATCH = 60  # a core is fastest with about 100 images of this network
AFFINE_RATES = {"large": 0.1, "small": 0.01}  # not searched
RATES = {
    ("fashion_mnist", "lars", "large"): 8.0,
    ("fashion_mnist", "lars", "small"): 0.3,
    ("fashion_mnist", "sgd", "small"): 0.1,
    ("cifar10", "lars", "large"): 4.0,
    ("cifar10", "lars", "small"): 0.3,
    ("cifar10", "sgd", "small"): 0.15,
}
CLEAN = {
    ("cifar10", "large", 0.08): (1, 2, 5),
    ("cifar10", "large", 0.35): (2, 5),
    ("fashion_mnist", "large", 0.35): (2, 5),
}
"""Numbers of clean epochs after LARS, where they are not 2 alone."""

Arms = dict[str, dict[str, float | None]]
"""Top-1 and loss at the end of each way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One data set, optimizer, batch, crop area and seed, with its ways to polish."""

    data: str
    batch: str
    area: float
    """Smallest fraction of an image in a crop."""

    seed: int
    optimizer: str = "lars"
    end: float = 0.0
    """Ratio of the last learning rate to the peak."""

    clean: tuple[int, ...] = (2,)
    affine: bool = False

    @property
    def group(self) -> str:
        """Name of the cell without its seed."""
        words = [self.data, self.optimizer, self.batch, f"area {self.area:g}"]
        return ", ".join([*words, *[f"end {self.end:g}"] * (self.end > 0)])

    @property
    def key(self) -> str:
        """Name of the cell in the results."""
        return f"{self.group}, seed {self.seed}"

    @property
    def rate(self) -> float:
        """Peak learning rate; that of SGD at the large batch follows the linear rule."""
        if self.optimizer == "sgd" and self.batch == "large":
            return BATCHES["large"] / BATCHES["small"] * RATES[self.data, "sgd", "small"]
        return RATES[self.data, self.optimizer, self.batch]

    @property
    def ways(self) -> dict[str, dict[str, Any]]:
        """Return the section `polish` of each run, without its statistics pass."""
        found: dict[str, dict[str, Any]] = {"statistics": {}}
        found |= {f"clean {epochs}": {"clean": {"epochs": epochs}} for epochs in self.clean}
        if self.affine:
            rate = AFFINE_RATES[self.batch]
            found["affine"] = {"affine": {"epochs": AFFINE_EPOCHS, "lr": rate}}
        return found


def cells(seeds: int) -> Iterator[Cell]:
    """Yield all cells of the study, seed by seed; final rates come last."""
    for seed in range(1, seeds + 1):
        for area, batch, data in product((0.08, 0.35), BATCHES, SETS):
            clean = CLEAN.get((data, batch, area), (2,))
            yield Cell(data=data, batch=batch, area=area, seed=seed, clean=clean, affine=True)
        for data in SETS:
            cell = Cell(data=data, batch="small", area=0.35, seed=seed, optimizer="sgd")
            yield cell
            yield replace(cell, batch="large", clean=())
    for seed, end in product(range(1, seeds + 1), (0.1, 0.3)):
        yield Cell(data="cifar10", batch="large", area=0.08, seed=seed, clean=(1, 2, 5), end=end)


def recipe_of(cell: Cell, way: str) -> Recipe:
    """Return the recipe of one run of a cell."""
    large, sgd = cell.batch == "large", cell.optimizer == "sgd"
    polish = {**cell.ways[way], "statistics": {"samples": IMAGES}}
    changes = [
        f"seed={cell.seed}",
        f"data.crop_area=[{cell.area}, 1.0]",
        f"batch.global_batch={BATCHES[cell.batch]}",
        f"execution.device_batch={min(DEVICE_BATCH, BATCHES[cell.batch])}",
        f"schedule.peak_lr={cell.rate}",
        f"schedule.decay.end_lr={cell.end * cell.rate}",
        f"schedule.warmup={f'{{epochs: {WARMUP_EPOCHS}}}' if large or not sgd else 'null'}",
        f"polish={json.dumps(polish)}",
    ]
    if sgd:
        changes += ["optimizer={kind: sgd}", "loss.label_smoothing=0.0"]
    return load_recipe(Path(__file__).parent / f"{cell.data}.yaml", changes)


def carry_out(cell: Cell, data: Path, log: Path) -> dict[str, Any]:
    """Train a cell in each way; return top-1 and loss of each end, and the seconds.

    A cell that diverges has only a control, with the accuracy of chance.
    """
    start = time.perf_counter()
    arms: Arms = {}
    with log.open("a", encoding="utf-8") as output, contextlib.redirect_stdout(output):
        try:
            for way in cell.ways:
                with tempfile.TemporaryDirectory() as folder:
                    out = Path(folder, "run")
                    summary = run(recipe_of(cell, way), out=out, data=data, report=False)
                assert summary.status == "finished", f"{cell.key} was stopped"
                for stage in summary.stages:
                    if end := _end(way, stage.name):
                        arms[end] = {"top1": stage.top1, "loss": stage.loss}
        except DivergedError:
            arms = {"control": {"top1": 0.1, "loss": None}}
    return {"arms": arms, "seconds": time.perf_counter() - start}


def _end(way: str, stage: str) -> str | None:
    """Return the name of the end of a stage; None before clean epochs, which no arm ends with."""
    if stage == "train":
        return None if way.startswith("clean") else "control"
    return f"{way} + statistics" if stage == "statistics" != way else way


def main() -> None:
    """Train the cells that the newest results lack."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--processes", type=int, default=2, metavar="N", help="of one thread each")
    add("--only", nargs="+", default=[], metavar="WORDS", help="cells whose name has all of these")
    add("--seeds", type=int, default=5)
    add("--work", type=Path, default=Path("build") / NAME, metavar="DIR", help="for the images")
    args = parser.parse_args()
    path = newest(NAME, RESULTS) or RESULTS / f"{NAME}_{hardware()}_{today()}.json"
    study = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cells": {}}
    asked = [re.compile(rf"(?<!\w){re.escape(word)}(?!\w)") for word in args.only]
    missing = [
        cell
        for cell in cells(args.seeds)
        if cell.key not in study["cells"] and all(word.search(cell.key) for word in asked)
    ]
    sets = dict.fromkeys(cell.data for cell in missing)
    folders = {name: write_part(args.work, name, train=IMAGES) for name in sets}
    print(f"{len(missing)} cells to train, {len(study['cells'])} in {path}", flush=True)
    with few_processes(args.processes) as pool:
        jobs = {
            pool.submit(carry_out, cell, folders[cell.data], args.work / "output.log"): cell
            for cell in missing
        }
        for job in as_completed(jobs):
            cell = jobs[job]
            about = {"group": cell.group, "seed": cell.seed, "rate": cell.rate}
            study["cells"][cell.key] = {**about, **job.result()}
            write(study, path)
            print(f"{cell.key}: {job.result()['seconds']:.0f} s", flush=True)


def write(study: dict[str, Any], path: Path) -> None:
    """Replace the file of results, with new means, command and versions."""
    size = {"images": IMAGES, "epochs": EPOCHS, "test_images": 10_000}
    size |= {f"{batch}_batch": size for batch, size in BATCHES.items()}
    content = {**circumstances(NAME), **size, **tables(study["cells"]), "cells": study["cells"]}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")

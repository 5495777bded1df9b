"""Measure the gains of Final Polishing, mode by mode, at a large and a small batch, over several
seeds.

    python benchmarks/polishing_study.py --workers-at-once 2 [--only WORDS ...] [--tune | --draw]

Needs LARGEBATCH_DATA, the folder of Fashion-MNIST and CIFAR-10. Writes
benchmarks/results/polishing_study_<machine>_<date>.json after every cell and figures beside it at
the end. Started again, it goes on with the cells that the newest such file lacks. Every cell is
trained by one of a few processes of one thread each, seed by seed, so that a study which is stopped
is balanced.

First it finds the peak rates: for each set, LARS at either batch and SGD at the small one are tried
at the rates of GRID with crops from 35 %, one seed that no result has and no polishing, and judged
on 5,000 training images outside of the study's; as long as the best one is the highest or lowest
tried, one twice as far is tried too. The best is used with both crop areas and in every arm, so at
35 % the rates favour the control, as far as one seed tells (its standard error is half a point).
Rates of the affine stage are not tuned. A rate that diverges has the accuracy of chance.

The cells, each with 5 seeds:
- LARS on two sets, at batches of 1/16 of the images and of 1/32 of that, with crops from 8 % and
  from 35 % of the area. Arms: control, which is the whole schedule on augmented images; the same,
  then exact statistics; its last 2 epochs clean instead, without and with exact statistics; and the
  control followed by 2 epochs in which only BatchNorm's scales and shifts and the classifier move,
  without and with exact statistics. The affine arms alone see more epochs than their control.
- CIFAR-10, large batch, crops from 8 %: 0, 1, 2 and 5 clean epochs, under schedules that end at 0,
  10 and 30 % of the peak rate. Both sets, large batch, crops from 35 %: 2 and 5.
- Momentum SGD, crops from 35 %: at the small batch, and at the large one by the linear rule with
  warm-up (Goyal et al. 2017, arXiv:1706.02677, sections 2.1 and 2.2).

Intervals are Student's over the seeds, which change weights, order and crops, not which images
are trained on; differences are paired by seed, since the arms of a cell begin as one. Two rows are
the test: clean, then statistics, at the large batch of each set, crops from 8 %. Of the others,
dozens, some intervals exclude zero by chance.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from measuring import RESULTS, circumstances, few_processes, hardware, newest, today
from polishing_cells import RATIO, Cell, Size, carry_out
from polishing_data import SETS, prepare
from polishing_figure import draw_all
from polishing_tables import tables

TEST_IMAGES = 10_000
TUNING_IMAGES, TUNING_SEED = 5000, 100
"""Number of training images that rates are tuned on, with a seed that no result has."""

GRID = {
    ("lars", "large"): (2.0, 4.0, 8.0),
    ("lars", "small"): (0.1, 0.3, 1.0),
    ("sgd", "small"): (0.02, 0.05, 0.1, 0.15),
}
"""Peak rates that are tried first."""

CLEAN = {
    ("cifar10", "large", 0.08): (1, 2, 5),
    ("cifar10", "large", 0.35): (2, 5),
    ("fashion_mnist", "large", 0.35): (2, 5),
}
"""Numbers of clean epochs after LARS, where they are not 2 alone."""

NAME = "polishing_study"

Rates: TypeAlias = dict[tuple[str, str, str], float]
"""Peak rates by data set, optimizer and batch."""


class Setting(NamedTuple):
    """Size, files and processes of a study."""

    size: Size
    path: Path
    work: Path
    processes: int


def main() -> None:
    args = _parse()
    size = Size(images=args.images, epochs=args.epochs)
    folder = args.results
    path = newest(NAME, folder) or folder / f"{NAME}_{hardware()}_{today()}.json"
    study = read(path, size)
    setting = Setting(size, path, args.work, args.workers_at_once)
    if not args.draw:
        while missing := _selected(to_tune(study["tuning"]), args.only):
            train(missing, setting, study, "tuning")
        if not args.tune:
            every = cells(args.seeds, best_rates(study["tuning"]))
            missing = [cell for cell in every if not has(study["cells"], cell)]
            train(_selected(missing, args.only), setting, study, "cells")
    draw_all(study, folder)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what Final Polishing gains, mode by mode")
    add = parser.add_argument
    add("--workers-at-once", type=int, default=2, metavar="N", help="processes of one thread")
    add("--only", nargs="+", default=[], metavar="WORDS", help="cells whose name has all of these")
    add("--draw", action="store_true", help="train nothing, draw what there is")
    add("--tune", action="store_true", help="find the rates and stop")
    add("--seeds", type=int, default=5)
    add("--images", type=int, default=7_680, help="how many to train on")
    add("--epochs", type=int, default=12)
    add("--work", type=Path, default=Path("build") / NAME, metavar="DIR", help="for the images")
    add("--results", type=Path, default=RESULTS, metavar="DIR")
    return parser.parse_args()


def cells(seeds: int, rates: Rates) -> Iterator[Cell]:
    """Return all cells of the study with known rates, seed by seed; final rates come last."""
    for seed in range(1, seeds + 1):
        for area, batch, data in product((0.08, 0.35), ("large", "small"), SETS):
            clean = CLEAN.get((data, batch, area), (2,))
            if rate := rates.get((data, "lars", batch)):
                yield Cell(
                    data=data,
                    batch=batch,
                    area=area,
                    seed=seed,
                    rate=rate,
                    clean=clean,
                    affine=True,
                )
        for data in SETS:
            if rate := rates.get((data, "sgd", "small")):
                cell = Cell(
                    data=data, batch="small", area=0.35, seed=seed, rate=rate, optimizer="sgd"
                )
                yield cell
                yield replace(cell, batch="large", rate=RATIO * rate, clean=())
    if rate := rates.get(("cifar10", "lars", "large")):
        for seed, end in product(range(1, seeds + 1), (0.1, 0.3)):
            yield Cell(
                data="cifar10", batch="large", area=0.08, seed=seed, rate=rate,
                clean=(1, 2, 5), end=end,
            )  # fmt: skip


def has(done: dict[str, Any], cell: Cell) -> bool:
    """Return True if a cell is in the results, at its rate and with all of its arms."""
    found = done.get(cell.key)
    if found is None or found["rate"] != cell.rate:
        return False
    return cell.arms <= set(found["arms"]) or found["arms"]["control"]["loss"] is None


def to_tune(tuning: dict[str, Any]) -> list[Cell]:
    """Return the cells that the tuning of rates still needs, at crops from 35 %."""
    return [
        Cell(
            data=data, batch=batch, area=0.35, seed=TUNING_SEED, rate=rate,
            optimizer=optimizer, clean=(),
        )
        for data, (optimizer, batch) in product(SETS, GRID)
        for rate in _to_try(_tried(tuning, (data, optimizer, batch)), GRID[optimizer, batch])
    ]  # fmt: skip


def best_rates(tuning: dict[str, Any]) -> Rates:
    """Return the rate with the best control of each tuned data set, optimizer and batch."""
    rates = {}
    for data, pair in product(SETS, GRID):
        tried = _tried(tuning, (data, *pair))
        if not _to_try(tried, GRID[pair]):
            rates[data, *pair] = max(tried, key=lambda rate: tried[rate])
    return rates


def _to_try(tried: dict[float, float], grid: tuple[float, ...]) -> list[float]:
    """Return the rates that are still to be tried.

    Where the best of them is the highest or the lowest, one twice as far comes next.
    """
    if rates := [rate for rate in grid if rate not in tried]:
        return rates
    best = max(tried, key=lambda rate: tried[rate])
    return [2 * best] * (best == max(tried)) + [best / 2] * (best == min(tried))


def _tried(tuning: dict[str, Any], key: tuple[str, str, str]) -> dict[float, float]:
    """Return the accuracy of the control by rate."""
    group = Cell(data=key[0], optimizer=key[1], batch=key[2], area=0.35, seed=0, rate=1).group
    cells = [cell for cell in tuning.values() if cell["group"] == group]
    return {cell["rate"]: cell["arms"]["control"]["top1"] for cell in cells}


def _selected(cells: list[Cell], words: list[str]) -> list[Cell]:
    """Return the cells whose names contain all of the words, as whole words."""
    asked = [re.compile(rf"(?<!\w){re.escape(word)}(?!\w)") for word in words]
    return [cell for cell in cells if all(word.search(cell.key) for word in asked)]


def read(path: Path, size: Size) -> dict[str, Any]:
    """Return the study so far; refuse one of another size."""
    asked = {
        "images": size.images,
        "epochs": size.epochs,
        "large_batch": size.large_batch,
        "small_batch": size.small_batch,
        "test_images": TEST_IMAGES,
    }
    if not path.exists():
        return {**asked, "tuning": {}, "cells": {}}
    study: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found = {key: study[key] for key in asked}
    if found != asked:
        raise SystemExit(f"{path} holds a study of {found}; this one is of {asked}")
    return study


def write(study: dict[str, Any], path: Path) -> None:
    """Replace the file of results, with new means, command and versions."""
    now = _now()
    content = {
        **study,
        **now,
        "sources": study.get("sources", now["sources"]),  # those of the oldest cell
        "why_a_part": "two cores go through some 3,000 images of 32 x 32 a second",
        **tables(study["cells"]),
    }
    for last in ("tuning", "cells"):
        content[last] = content.pop(last)  # because they are many
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def train(missing: list[Cell], setting: Setting, study: dict[str, Any], section: str) -> None:
    """Train cells, several at once, and write the results after each."""
    size, val = setting.size, TUNING_IMAGES if section == "tuning" else None
    sets = dict.fromkeys(cell.data for cell in missing)
    folders = {name: prepare(setting.work, name, train=size.images, val=val) for name in sets}
    left = sum(cell.passes(size.epochs) for cell in missing)
    done, start = 0.0, time.perf_counter()
    print(
        f"{section}: {len(missing)} to train, {len(study[section])} in {setting.path}", flush=True
    )
    with few_processes(setting.processes) as pool:
        jobs = {
            pool.submit(
                carry_out, cell, size, data=folders[cell.data], work=setting.work,
                val_samples=val or TEST_IMAGES,
            ): cell
            for cell in missing
        }  # fmt: skip
        for job in as_completed(jobs):
            cell, result = jobs[job], job.result()
            about = {"group": cell.group, "seed": cell.seed, "rate": cell.rate}
            now = _now()
            key = f"{cell.key}, rate {cell.rate:g}" if section == "tuning" else cell.key
            study[section][key] = {**about, **{k: now[k] for k in ("date", "commit")}, **result}
            write(study, setting.path)
            done += cell.passes(size.epochs)
            minutes = (time.perf_counter() - start) / done * (left - done) / 60
            print(f"{_describe(cell, result)}; {minutes:.0f} min left", flush=True)


def _now() -> dict[str, Any]:
    return circumstances(NAME, " ".join(["python", *sys.argv]))


def _describe(cell: Cell, result: dict[str, Any]) -> str:
    arms = ", ".join(f"{arm} {100 * top['top1']:.2f}" for arm, top in result["arms"].items())
    return f"{cell.key}, rate {cell.rate:g}: {result['seconds']:.0f} s; top-1 {arms}"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")

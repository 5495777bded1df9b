"""What staleness costs on CIFAR-10: the study of staleness_cifar10.yaml as one file of results.

    python benchmarks/staleness.py --rates
    python benchmarks/staleness.py [--processes N]

Needs LARGEBATCH_DATA, the folder of CIFAR-10, and the extra `studies`. With --rates it searches the
rates that the study's recipes have, by `largebatch lr bench`, and prints them. Without, it carries
out `largebatch study staleness` and writes what its records have to
benchmarks/results/staleness_<machine>_<date>.json, with the relations that are looked for. Both go
on where they were stopped.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from measuring import in_points, run_largebatch, write
from polishing_data import prepare

from largebatch.studies.metrics import difference, ratio
from largebatch.studies.staleness.run import Row, rows_of, runs_of
from largebatch.studies.staleness.study import cells_of, load_study

STUDIES = Path(__file__).parent / "studies"
STUDY, RATES = STUDIES / "staleness_cifar10.yaml", STUDIES / "staleness_rates.yaml"
IMAGES = 10_000


def main() -> None:
    """Search, or carry out the study and write its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rates", action="store_true", help="search the rates of the recipes")
    add("--processes", type=int, default=2, metavar="N", help="runs at a time, of one thread each")
    add("--work", type=Path, default=Path("runs") / "staleness", metavar="DIR")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    data = prepare(args.work / "data", "cifar10", train=IMAGES)
    command, study = (["lr", "bench"], RATES) if args.rates else (["study", "staleness"], STUDY)
    out = args.work / study.stem
    run_largebatch([
        *command, str(study), "--data", str(data), "--out", str(out),
        "--processes", str(args.processes),
    ])  # fmt: skip
    if not args.rates:
        print(_write(out))


def _write(out: Path) -> Path:
    study = load_study(str(STUDY))
    cells = cells_of(study, STUDY.parent)
    rows = {row.cell.name: row for row in rows_of(runs_of(cells, seeds=study.seeds, out=out))}
    result = {
        "study": STUDY.name,
        "commits": sorted({one["commit"] for row in rows.values() for one in row.found}),
        "cells": {name: _cell(row) for name, row in rows.items()},
        "differences of top-1": dict(_differences(rows)),
        "ratios of simulated time": dict(_ratios(rows)),
    }
    return write("staleness", "python benchmarks/staleness.py", result)


def _cell(row: Row) -> dict[str, Any]:
    return {
        **row.words,
        "by seed": {
            one["seed"]: {
                "top1": one["top1"],
                "stages": {stage["name"]: stage["top1"] for stage in one["stages"]},
                "simulated_seconds": one["simulated_seconds"],
                "diverged": one["diverged"],
            }
            for one in row.found
        },
        "tau": [round(share, 7) for share in row.staleness],
    }


def _differences(rows: Mapping[str, Row]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield top-1 of a cell minus that of what it is held against, in points."""
    usual = "{}-usual-sigma{}-mu4-lambda30{}"
    pairs = []
    for recipe in ("sgd", "lars", "norm", "polished"):
        waits = usual.format(recipe, 0, "")
        for sigma in (1, 15, 30):
            late = usual.format(recipe, sigma, "-staleness")
            pairs += [(late, waits), (late, usual.format(recipe, sigma, "-none"))]
            pairs += [(late, usual.format("norm", sigma, "-staleness"))] * (recipe == "polished")
        pairs += [(waits, usual.format("norm", 0, ""))] * (recipe == "polished")
    for one, other in pairs:
        if one in rows and other in rows:
            found = difference(_top1(rows[one]), _top1(rows[other]))
            yield f"{one} - {other}", in_points(found)._asdict()


def _ratios(rows: Mapping[str, Row]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield how many times as long hardsync takes for the same samples."""
    for name, row in rows.items():
        cell = row.cell
        waits = f"{cell.configuration}-{cell.times}-sigma0-mu{cell.mu}-lambda{cell.learners}"
        if cell.sigma and waits in rows:
            found = ratio(_seconds(rows[waits]), _seconds(row)).interval
            assert found is not None
            yield f"{waits} / {name}", found._asdict()


def _top1(row: Row) -> dict[int, float]:
    return {one["seed"]: one["top1"] for one in row.found}


def _seconds(row: Row) -> dict[int, float | None]:
    return {one["seed"]: one["simulated_seconds"] for one in row.found}


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")

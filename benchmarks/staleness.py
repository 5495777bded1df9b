"""Measure the cost of stale gradients on CIFAR-10: the studies of staleness_studies.py in one file.

    python benchmarks/staleness.py --rates
    python benchmarks/staleness.py [--only STUDY ...] [--processes N]
    python benchmarks/staleness.py --write

Needs LARGEBATCH_DATA, the folder of CIFAR-10, and the extra `studies`. With --rates it searches the
rates of the recipes by `largebatch lr bench` and prints them. Without, it carries out
`largebatch study staleness` for every study and writes
benchmarks/results/staleness_<machine>_<date>.json: every cell by seed, how late gradients were, and
what is asked of them, as far as the cells are there; with --write that alone. All go on where they
were stopped. Times of learners alone, which need no gradients, are those of staleness_times.py.

Decided before `main` was measured: a run fails below FAILS of top-1, or where it diverges; cells
are level where the interval of their difference lies within MARGIN points of zero, and all of
several are where every two of them are. Intervals are by the noise of all cells of a study of which
no run fails (contrasts.py), and together for the answers of one question; those of levels are each
alone, for all must hold at once.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from contrasts import FAILS, BySeed, Noise, contrast, noise_of
from measuring import run_largebatch, write
from polishing_data import prepare
from scipy.stats import binomtest
from staleness_studies import IMAGES, rates_study, studies

from largebatch.lab.protocols.simulator import simulate
from largebatch.lab.studies.metrics import CONFIDENCE, Interval, interval
from largebatch.lab.studies.queue.database import open_existing
from largebatch.lab.studies.queue.results import read_results
from largebatch.lab.studies.queue.study import RATE
from largebatch.lab.studies.staleness.pictures import diagonals
from largebatch.lab.studies.staleness.run import Row, rows_of, runs_of
from largebatch.lab.studies.staleness.study import cells_of, load_study

MARGIN = 3.0

LOSSES = (1.6, 1.3, 1.0)
MODEL_BYTES = 4.0 * 89_578
STRAGGLING = "sgd-stragglers-sigma30-mu4-lambda30-staleness"

Rows = Mapping[str, Row]
Term = tuple[float, BySeed]
"""A weight, and the values that it multiplies."""


def main() -> None:
    """Search rates, or run the studies and write their result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rates", action="store_true", help="search the rates of the recipes")
    add("--write", action="store_true", help="train nothing, write what is there")
    add("--only", nargs="+", default=[*studies()], metavar="STUDY", choices=[*studies()])
    add("--processes", type=int, default=2, metavar="N", help="runs at a time, of one thread each")
    add("--work", type=Path, default=Path("runs") / "staleness", metavar="DIR")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.write:
        print(_write(args.work))
        return
    data = prepare(args.work / "data", "cifar10", train=IMAGES)
    chosen = {name: study for name, study in studies().items() if name in args.only}
    for name, study in ({"rates": rates_study()} if args.rates else chosen).items():
        file = args.work / f"{name}.yaml"
        file.write_text(json.dumps(study, indent=1), encoding="utf-8")  # YAML as well
        words = ["lr", "bench"] if args.rates else ["study", "staleness"]
        run_largebatch([
            *words, str(file), "--data", str(data), "--out", str(args.work / name),
            "--processes", str(args.processes),
        ])  # fmt: skip
        if not args.rates:
            print(_write(args.work))


def _write(work: Path) -> Path:
    """Write the recorded results of all studies."""
    rows: dict[str, dict[str, Row]] = {}
    for name in studies():
        file = work / f"{name}.yaml"
        if file.exists():
            study = load_study(str(file))
            runs = runs_of(cells_of(study, work), seeds=study.seeds, out=work / name)
            rows[name] = {row.cell.name: row for row in rows_of(runs)}
    main_rows, product_rows = rows.get("main", {}), rows.get("products", {})
    found = {
        "studies": {name: studies()[name] for name in rows},
        "rates": _rates(work / "rates" / "study.db"),
        "commits": sorted(
            {one["commit"] for each in rows.values() for row in each.values() for one in row.found}
        ),
        "cells": {
            name: {cell: _cell(row) for cell, row in of.items()} for name, of in rows.items()
        },
        "noise": {name: noise(each)._asdict() for name, each in rows.items() if _is_whole(each)},
        "top-1, points": dict(differences(main_rows)) if _is_whole(main_rows) else {},
        "seconds to a training loss": dict(seconds_to(main_rows)),
        "products": list(products(product_rows)) if _is_whole(product_rows) else [],
    }
    return write("staleness", "python benchmarks/staleness.py", found)


def _rates(database: Path) -> dict[str, dict[str, Any]]:
    """Return the tried and the best rates of every recipe."""
    with open_existing(f"sqlite:///{database}") as storage:
        cells = read_results(storage)
    return {
        cell.configuration: {
            "trials": [{"rate": one.values[RATE], "top1": one.top1} for one in cell.search],
            "found": cell.values[RATE],
        }
        for cell in cells
    }


def _is_whole(rows: Rows) -> bool:
    """Return True if a study has several seeds, the same in every cell."""
    seeds = {frozenset(_top1(row)) for row in rows.values()}
    return len(seeds) == 1 and len(next(iter(seeds))) > 1


def _cell(row: Row) -> dict[str, Any]:
    late, number = row.late, sum(row.counts)
    return {
        "top-1": {
            key: value if math.isfinite(value) else None  # JSON has no infinity
            for key, value in interval(_top1(row).values()).scaled(100)._asdict().items()
        },
        "runs that fail": fails(row),
        "mean tau": row.tau,
        "highest tau": len(row.counts) - 1,
        "tau > 2 sigma": {"gradients": late, "of": number, **clopper_pearson(late, number)},
        "by seed": {
            one["seed"]: {
                **{key: one[key] for key in ("top1", "loss", "stages", "diverged", "updates")},
                **{key: one[key] for key in ("simulated_seconds", "computing_seconds", "tau_mean")},
                "tau": one["tau"],
            }
            for one in row.found
        },
    }


def clopper_pearson(number: int, of: int) -> dict[str, float]:
    """Return the exact interval of a probability (Clopper and Pearson 1934).

    It holds for independent trials. Gradients of one run are not: of late ones there are fewer
    independent ones than it takes for granted.

    >>> clopper_pearson(0, 30_000)["high"] < 1.3e-4
    True
    """
    ends = binomtest(number, of).proportion_ci(CONFIDENCE)
    return {"low": float(ends.low), "high": float(ends.high)}


def fails(row: Row) -> int:
    """Return the number of runs of a cell that fail."""
    return sum(one["diverged"] is not None or one["top1"] < FAILS for one in row.found)


def noise(rows: Rows) -> Noise:
    """Return the noise of top-1 in a study, from the cells without a failed run."""
    return noise_of([_top1(row) for row in rows.values() if not fails(row)])


def differences(rows: Rows) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield by question the differences in top-1 that answer it, in points."""
    own = noise(rows)
    for question, pairs in questions(rows).items():
        yield (
            question,
            {name: _answer(terms, own, together=len(pairs)) for name, terms in pairs.items()},
        )


def _answer(terms: Sequence[Term], own: Noise, *, together: int) -> dict[str, Any]:
    """Return a difference in points, one of several, and whether it is level on its own."""
    each, alone = (contrast(terms, own, together=number) for number in (together, 1))
    return {**each.scaled(100)._asdict(), "level": _is_level(alone)}


def _is_level(found: Interval) -> bool:
    return max(abs(found.low), abs(found.high)) < MARGIN / 100


def questions(rows: Rows) -> dict[str, dict[str, list[Term]]]:
    """Return by question and answer the added and subtracted cells, with their weights."""
    late = "{}-usual-sigma{}-mu4-lambda30-{}".format

    def of(cell: str, stage: str | None = None) -> BySeed:
        return _top1(rows[cell], stage)

    def minus(one: BySeed, other: BySeed) -> list[Term]:
        return [(1.0, one), (-1.0, other)]

    def pair(name: str, against: Callable[[str], str], stage: str | None = None) -> list[Term]:
        return minus(of(late(name, 30, "staleness"), stage), of(against(name), stage))

    def repaired(name: str, stage: str | None, against: Callable[[str], str]) -> list[Term]:
        base = pair("norm" if stage else "sgd", against, "train" if stage else None)
        return [*pair(name, against, stage), *((-weight, cell) for weight, cell in base)]

    together = [_waiting("sgd"), *(late("sgd", sigma, "staleness") for sigma in (1, 15, 30))]
    names = ("sgd", "lars", "norm", "polished")
    remedies = {
        "statistics": ("norm", "statistics"),
        "clean epochs": ("polished", "clean"),
        "clean epochs, statistics": ("polished", "statistics"),
    }
    return {
        "a fixed rate, minus one learner at this rate": {
            f"sigma {sigma}": minus(of(late("sgd-tenth", sigma, "none")), of(_one("sgd-tenth")))
            for sigma in (15, 30)
        },
        "a fixed rate, minus the rate over tau": {
            f"{name}, sigma {sigma}": minus(
                of(late(name, sigma, "none")), of(late(name, sigma, "staleness"))
            )
            for name, sigma in (("sgd", 15), ("sgd", 30), ("lars", 30))
        },
        "the rate over tau: is every n where hardsync is?": {
            f"{one} - {other}": minus(of(one), of(other))
            for other, one in combinations(together, 2)
        },
        "staleness: sigma 30, minus one learner at a rate as low": {
            name: pair(name, _alone) for name in (*names, "lars-root")
        },
        "staleness and small updates: sigma 30, minus hardsync": {
            name: pair(name, _waiting) for name in names
        }
        | {"sgd, against the rate found": minus(
            of(late("sgd", 30, "staleness")), of(_waiting("sgd-found"))
        )},
        "repaired of staleness": {"LARS": repaired("lars", None, _alone)}
        | {"LARS at a higher rate": repaired("lars-root", None, _alone)}
        | {name: repaired(*cell, _alone) for name, cell in remedies.items()},
        "repaired of staleness and small updates": {"LARS": repaired("lars", None, _waiting)}
        | {name: repaired(*cell, _waiting) for name, cell in remedies.items()},
        "stragglers, sigma 30": {
            "minus usual times": minus(of(STRAGGLING), of(late("sgd", 30, "staleness"))),
            "minus hardsync": minus(of(STRAGGLING), of(_waiting("sgd"))),
            "minus hardsync at the rate found": minus(of(STRAGGLING), of(_waiting("sgd-found"))),
        },
    }  # fmt: skip


def seconds_to(rows: Rows) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the simulated seconds until the training loss is first below each of LOSSES, by seed.

    The loss is the mean over a sixtieth of a stage. None: never. Hardsync under stragglers has the
    weights of hardsync, and other seconds.
    """
    for name, row in rows.items():
        yield name, _first_below({one["seed"]: one["course"] for one in row.found})
    waiting, late = rows.get(_waiting("sgd")), rows.get(STRAGGLING)
    if waiting and late:
        cluster = late.cell.cluster.model_copy(update={"model_bytes": MODEL_BYTES})
        yield _waiting("sgd").replace("usual", "stragglers"), _first_below({
            one["seed"]: [
                {**at, "seconds": float(ends[at["updates"] - 1])} for at in one["course"]
            ]
            for one in waiting.found
            for ends in [
                simulate(
                    waiting.cell.rule, cluster, servers=1, updates=one["updates"], seed=one["seed"]
                ).ends
            ]
        })  # fmt: skip


def _first_below(courses: Mapping[int, list[dict[str, float]]]) -> dict[str, Any]:
    return {
        f"{loss:g}": {
            seed: next((at["seconds"] for at in course if at["loss"] < loss), None)
            for seed, course in courses.items()
        }
        for loss in LOSSES
    }


def products(rows: Rows) -> Iterator[dict[str, Any]]:
    """Yield the differences of cells of one protocol with equal mu x lambda, and with unequal.

    In points; those of equal products hold together, and those of unequal ones. Each pair of equal
    product is level or not, taken alone.
    """
    own, lines = noise(rows), diagonals([*rows.values()])
    pairs = [(line, *pair) for line, cells in lines.items() for pair in combinations(cells, 2)]
    for (protocol, product), row, other in pairs:
        yield {
            "protocol": protocol,
            "product": product,
            "cells": [row.cell.name, other.cell.name],
            **_answer([(1.0, _top1(row)), (-1.0, _top1(other))], own, together=len(pairs)),
        }
    between = [
        (protocol, one, other)
        for (protocol, one), (same, other) in combinations(lines, 2)
        if protocol == same
    ]
    for protocol, *both in between:
        found = contrast(
            [
                (weight / len(lines[protocol, product]), _top1(row))
                for weight, product in zip((1.0, -1.0), both, strict=True)
                for row in lines[protocol, product]
            ],
            own,
            together=len(between),
        )
        yield {"protocol": protocol, "products": both, **found.scaled(100)._asdict()}


def _waiting(name: str) -> str:
    return f"{name}-usual-sigma0-mu4-lambda30"


def _alone(name: str) -> str:
    return _one(f"{name}-alone")


def _one(name: str) -> str:
    return f"{name}-usual-sigma1-mu4-lambda1-staleness"


def _top1(row: Row, stage: str | None = None) -> BySeed:
    """Return top-1 by seed, at the end or after a stage; chance if the run diverged."""
    found: dict[int, float] = {}
    for one in row.found:
        stages = {each["name"]: float(each["top1"]) for each in one["stages"]}
        is_whole = stage is None or one["diverged"] is not None
        found[one["seed"]] = one["top1"] if is_whole else stages[stage or ""]
    return found


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")

"""What staleness costs on CIFAR-10: the studies of staleness_studies.py as one file of results.

    python benchmarks/staleness.py --rates
    python benchmarks/staleness.py [--only STUDY ...] [--processes N]
    python benchmarks/staleness.py --write

Needs LARGEBATCH_DATA, the folder of CIFAR-10, and the extra `studies`. With --rates it searches the
rates of the recipes by `largebatch lr bench` and prints them. Without, it carries out
`largebatch study staleness` for every study and writes
benchmarks/results/staleness_<machine>_<date>.json: every cell by seed, how late gradients were, and
what is asked of them, as far as the cells are there; with --write that alone. All go on where they
were stopped. Times of learners alone, which need no gradients, are those of staleness_times.py.

Decided before anything was measured: a run fails below FAILS of top-1, or where it diverges; cells
of one mu x lambda are level where they are within MARGIN points of each other.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from measuring import in_points, run_largebatch, write
from polishing_data import prepare
from scipy.stats import beta
from staleness_studies import IMAGES, rates_study, studies

from largebatch.studies.metrics import CONFIDENCE, difference, interval
from largebatch.studies.staleness.pictures import diagonals
from largebatch.studies.staleness.run import Row, rows_of, runs_of
from largebatch.studies.staleness.study import cells_of, load_study

FAILS = 0.15
MARGIN = 3.0

Rows = Mapping[str, Row]
BySeed = dict[int, float]


def main() -> None:
    """Search, or carry out the studies and write their result."""
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
    """Write what is recorded of all studies."""
    rows: dict[str, dict[str, Row]] = {}
    for name in studies():
        file = work / f"{name}.yaml"
        if file.exists():
            study = load_study(str(file))
            runs = runs_of(cells_of(study, work), seeds=study.seeds, out=work / name)
            rows[name] = {row.cell.name: row for row in rows_of(runs)}
    main_rows = rows.get("main", {})
    found = {
        "studies": {name: studies()[name] for name in rows},
        "commits": sorted(
            {one["commit"] for each in rows.values() for row in each.values() for one in row.found}
        ),
        "cells": {
            name: {cell: _cell(row) for cell, row in of.items()} for name, of in rows.items()
        },
        "failures": dict(failures(main_rows)),
        "differences of top-1": dict(differences(main_rows)),
        "repair": dict(repairs(main_rows)),
        "products": list(products(rows.get("products", {}))),
    }
    return write("staleness", "python benchmarks/staleness.py", found)


def _cell(row: Row) -> dict[str, Any]:
    late, number = row.late, sum(row.counts)
    return {
        "top-1": in_points(interval(_top1(row).values()))._asdict(),
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
    rest = (1 - CONFIDENCE) / 2
    low = float(beta.ppf(rest, number, of - number + 1)) if number else 0.0
    high = float(beta.ppf(1 - rest, number + 1, of - number)) if number < of else 1.0
    return {"low": low, "high": high}


def failures(rows: Rows) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield how many runs of every cell fail."""
    for name, row in rows.items():
        failed = sum(one["diverged"] is not None or one["top1"] < FAILS for one in row.found)
        number = len(row.found)
        yield name, {"failed": failed, "of": number, **clopper_pearson(failed, number)}


def differences(rows: Rows) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield top-1 of cells minus that of what they are held against, in points, together."""
    late, fixed = "{}-usual-sigma{}-mu4-lambda30-staleness", "{}-usual-sigma{}-mu4-lambda30-none"
    alone = "{}-usual-sigma1-mu4-lambda1-staleness"
    pairs = [(fixed.format("sgd", sigma), alone.format("sgd")) for sigma in (15, 30)]
    pairs.append((late.format("sgd", 30), alone.format("thirtieth")))
    pairs.append((fixed.format("lars", 30), late.format("lars", 30)))
    for name in ("sgd", "lars"):
        own = [_waiting(name), *(late.format(name, sigma) for sigma in (1, 15, 30))]
        pairs += [(one, other) for other, one in combinations(own, 2)]
    pairs += [(late.format(name, 30), _waiting(name)) for name in ("norm", "polished")]
    there = [(one, other) for one, other in pairs if one in rows and other in rows]
    for one, other in there:
        found = difference(_top1(rows[one]), _top1(rows[other]), together=len(there))
        yield f"{one} - {other}", in_points(found)._asdict()


def repairs(rows: Rows) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield by how many points less a remedy loses to staleness than what it is held against.

    That is the late cell minus the waiting one with the remedy, minus the same without it, by seed:
    LARS against SGD; of the net with BatchNorm, trained on crops, the statistics pass, and clean
    epochs with the pass.
    """

    def lost(name: str, stage: str | None) -> BySeed:
        late = rows[f"{name}-usual-sigma30-mu4-lambda30-staleness"]
        after, before = _top1(late, stage), _top1(rows[_waiting(name)], stage)
        return {seed: after[seed] - before[seed] for seed in after.keys() & before.keys()}

    remedies = {
        "LARS": (("lars", None), ("sgd", None)),
        "statistics": (("norm", "statistics"), ("norm", "train")),
        "clean epochs + statistics": (("polished", "statistics"), ("norm", "train")),
        "clean epochs": (("polished", "clean"), ("norm", "train")),
    }
    for name, (one, other) in remedies.items():
        try:
            gained = difference(lost(*one), lost(*other), together=len(remedies))
        except KeyError:
            continue  # not trained yet
        yield name, in_points(gained)._asdict()


def products(rows: Rows) -> Iterator[dict[str, Any]]:
    """Yield the differences of cells of one protocol with equal mu x lambda, and with unequal.

    In points, together for those of equal products and for the others.
    """
    lines = diagonals([*rows.values()])
    within = [
        (protocol, product, one, other)
        for (protocol, product), cells in lines.items()
        for one, other in combinations(cells, 2)
    ]
    for protocol, product, one, other in within:
        found = in_points(difference(_top1(one), _top1(other), together=len(within)))
        yield {
            "protocol": protocol,
            "product": product,
            "cells": [one.cell.name, other.cell.name],
            **found._asdict(),
            "level": found.low > -MARGIN and found.high < MARGIN,
            "apart": found.low > MARGIN or found.high < -MARGIN,
        }
    between = [
        (protocol, one, other)
        for (protocol, one), (same, other) in combinations(lines, 2)
        if protocol == same
    ]
    for protocol, *pair in between:
        means = [_mean_top1(lines[protocol, product]) for product in pair]
        found = in_points(difference(*means, together=len(between)))
        yield {"protocol": protocol, "products": pair, **found._asdict()}


def _mean_top1(cells: list[Row]) -> BySeed:
    seeds = set.intersection(*({*_top1(row)} for row in cells))
    return {seed: sum(_top1(row)[seed] for row in cells) / len(cells) for seed in seeds}


def _waiting(name: str) -> str:
    return f"{name}-usual-sigma0-mu4-lambda30"


def _top1(row: Row, stage: str | None = None) -> BySeed:
    """Return top-1 by seed, at the end or after a stage; chance where the run diverged."""
    found: BySeed = {}
    for one in row.found:
        stages = {each["name"]: float(each["top1"]) for each in one["stages"]}
        is_whole = stage is None or one["diverged"] is not None
        found[one["seed"]] = one["top1"] if is_whole else stages[stage or ""]
    return found


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")

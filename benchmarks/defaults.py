"""Test whether the defaults of frameworks matter, and transfer to other data (GTDLBench).

    python benchmarks/defaults.py [--processes N]

Needs LARGEBATCH_DATA, the folder of CIFAR-10 (the digits are embedded), and optuna. Carries out
studies/defaults.yaml by `largebatch bench`, then its first recipe and the settings for MNIST alone
with MORE_SEEDS seeds: settings that are equally good lie about 0.3 points apart with five of them.
Writes benchmarks/results/defaults_<machine>_<date>.json: top-1 by setting and seed, what each run
used, how far apart the settings for a data set are, and the transfer matrix. Goes on where it was
stopped. The settings are exchanged between data sets, not between frameworks: frameworks.py does
that.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from measuring import run_largebatch, write
from polishing_data import prepare

from largebatch.lab.studies.metrics import difference, interval
from largebatch.lab.studies.queue.database import open_existing
from largebatch.lab.studies.queue.results import SettingResults, read_settings
from largebatch.lab.studies.queue.study import load_configuration_study
from largebatch.lab.studies.settings.transfer import transfer_matrix

STUDY = Path(__file__).parent / "studies" / "defaults.yaml"
IMAGES = 10_000
MORE_SEEDS = 60
FAMILIES = {"digits": "-mnist", "cifar10": "-cifar10"}
"""Suffix of the names of settings for a data set of this kind."""

Top1 = dict[str, dict[int, float]]
"""Top-1 by setting and seed."""


def more_seeds() -> dict[str, Any]:
    """Return the study of the digits alone."""
    study = load_configuration_study(STUDY).model_dump(mode="json")
    own = {name: of for name, of in study["settings"].items() if name.endswith(FAMILIES["digits"])}
    return {
        **study,
        "name": "defaults-digits",
        "recipes": {"digits": study["recipes"]["digits"]},
        "settings": own,
        "seeds": MORE_SEEDS,
    }


def apart(top1: Top1) -> dict[str, Any]:
    """Return the best and the worst setting, and their difference in points.

    The interval holds together for all pairs of settings, for these two were chosen among them.

    >>> found = apart({"a": {1: 0.9, 2: 0.9}, "b": {1: 0.8, 2: 0.8}})
    >>> found["best"], found["worst"], round(found["points"]["mean"], 6)
    ('a', 'b', 10.0)
    """
    order = sorted(top1, key=lambda name: interval(top1[name].values()).mean)
    worst, best = order[0], order[-1]
    pairs = len(list(combinations(order, 2)))
    found = difference(top1[best], top1[worst], together=pairs)
    return {"best": best, "worst": worst, "points": found.scaled(100)._asdict()}


def main() -> None:
    """Run both studies and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--processes", type=int, default=2, metavar="N", help="runs at a time, of one thread each")
    add("--work", type=Path, default=Path("runs") / "defaults", metavar="DIR", help="for the runs")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    data = prepare(args.work / "data", "cifar10", train=IMAGES)
    digits = args.work / "digits.yaml"
    digits.write_text(json.dumps(more_seeds()), encoding="utf-8")  # YAML as well
    cells = carry_out(STUDY, args.work / "both", args.processes, data)
    both = _top1(cells)
    more = _top1(carry_out(digits, args.work / "digits", args.processes))
    result = {
        "top1": both,
        "usage": usage_of(cells),
        "top1 of the digits, more seeds": more["digits"],
        "settings for the data, best to worst": {
            "digits": apart(more["digits"]),
            "cifar10": apart(_own(both["cifar10"], "cifar10")),
        },
        "all settings, best to worst": {name: apart(found) for name, found in both.items()},
        "transfer": transfers(both),
    }
    print(write("defaults", "python benchmarks/defaults.py", result))


def transfers(top1: Mapping[str, Top1]) -> list[dict[str, Any]]:
    """Return the best setting of each one used on all, and its points above their own best."""
    return [
        {
            "best of": one.best_of,
            "used on": one.used_on,
            "setting": one.setting,
            "minus the own best": one.gap.scaled(100)._asdict() if one.gap else None,
        }
        for row in transfer_matrix(top1, higher=True)
        for one in row
    ]


def usage_of(cells: Iterable[SettingResults]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return what each run used, by recipe and setting."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for cell in cells:
        found.setdefault(cell.configuration, {})[cell.setting] = [
            {
                "seed": one.seed,
                "top1": one.top1,
                "diverged": one.diverged,
                "images_per_second": one.images_per_second,
                "other_cores": finite(one.other_cores),
                **{key: finite(value) for key, value in asdict(one.usage).items()},
            }
            for one in cell.seeds
            if one.usage is not None
        ]
    return found


def finite(value: float) -> float | None:
    """Return a number in five digits for JSON; None unless it is finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def carry_out(
    study: Path | str, out: Path, processes: int, data: Path | None = None
) -> list[SettingResults]:
    """Run a study of settings, a file or an installed one, and return its cells."""
    command = ["bench", str(study), "--out", str(out), "--processes", str(processes)]
    run_largebatch([*command, *(["--data", str(data)] if data else [])])
    with open_existing(f"sqlite:///{out / 'study.db'}") as storage:
        return read_settings(storage)


def _top1(cells: list[SettingResults]) -> dict[str, Top1]:
    found: dict[str, Top1] = {}
    for cell in cells:
        found.setdefault(cell.configuration, {})[cell.setting] = {
            one.seed: one.top1 for one in cell.seeds
        }
    return found


def _own(top1: Top1, data: str) -> Top1:
    return {name: found for name, found in top1.items() if name.endswith(FAMILIES[data])}


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")

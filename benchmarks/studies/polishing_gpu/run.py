"""Carry out the study of polishing on a GPU until its time is over: `study.yaml`.

    python -m benchmarks.studies.polishing_gpu.run [--seconds 600] [--jobs 3] [--out DIR]

Needs LARGEBATCH_DATA. First the peak rate of each recipe is searched, then every seed is run: of
the first three recipes, then of all. The command stops after --seconds, with exit code 75; the same
command continues with the runs that have no record. tables.py then prints the results and writes
them. --set changes every recipe; it and the numbers make a rehearsal small.
"""

import argparse
import json
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.studies.images import write_part
from largebatch.lab.studies.runner import Runs
from largebatch.lab.studies.runner import carry_out as make
from largebatch.lab.studies.store import Store
from largebatch.lab.studies.study import Study, StudyMachine
from largebatch.lab.studies.trained import cells_of
from largebatch.recipe.loading import parse_yaml, validate_tree

FOLDER = Path(__file__).parent
FIRST = 3
"""Number of recipes whose seeds are run first."""

HELD_OUT = 5_000
INTERRUPTED = 75


def main() -> None:
    args = arguments()
    train, val = args.images
    data = write_part(args.out.parent, "cifar10", train=train, val=val)
    stop = threading.Timer(args.seconds, os.kill, (os.getpid(), signal.SIGTERM))
    stop.daemon = True
    stop.start()
    study = parse_yaml((FOLDER / "study.yaml").read_text(encoding="utf-8"), source="study.yaml")
    changes = dict(change.split("=", 1) for change in args.set)
    changes = {key: parse_yaml(value, source=key) for key, value in changes.items()}
    names = args.recipes or list(study["recipes"])
    study["recipes"] = {name: study["recipes"][name] for name in names}
    for recipe in study["recipes"].values():
        recipe["set"] |= changes
    for setting in study["settings"].values():
        if "statistics" in setting["set"]["polish"]:
            setting["set"]["polish"]["statistics"]["samples"] = train
    search = {"trials": args.trials, "held_out": min(HELD_OUT, train // 2)}
    trained = {"trained": {"set": {"polish": None}}}
    rates = study | {"name": "rates", "seeds": 1, "settings": trained, "search": search}
    carry_out(rates, args.out / "rates", data, args.jobs)
    for name, recipe in study["recipes"].items():
        record = json.loads((args.out / "rates" / name / "trained" / "seed-1.json").read_text())
        recipe["set"]["schedule.peak_lr"] = record["rate"]
    study["seeds"] = args.seeds or study["seeds"]
    first = dict(list(study["recipes"].items())[:FIRST])
    for recipes in (first, study["recipes"]):
        carry_out(study | {"recipes": recipes}, args.out, data, args.jobs)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time on the GPU")
    parser.add_argument("--out", type=Path, default=Path("build") / "polishing_gpu")
    parser.add_argument("--images", type=int, nargs=2, default=[50_000, 10_000])
    parser.add_argument("--recipes", nargs="+", help="of study.yaml; default: all")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--trials", type=int, default=5, help="of the search of a recipe's rate")
    parser.add_argument("--set", nargs="+", default=[], help="changes of every recipe")
    return parser.parse_args()


def carry_out(study: dict[str, Any], out: Path, data: Path, jobs: int) -> None:
    """Make the runs of a study that have no record; exit with INTERRUPTED if it was stopped.

    Its own page is not drawn, which needs SciPy.
    """
    cells = cells_of(validate_tree(Study, study, source="study.yaml"), FOLDER)
    runs = Runs(cells=cells, store=Store(out), machine=StudyMachine(data={"": data}))
    print(f"{out}: {len(runs.left)} of {runs.number} runs are left", flush=True)
    if not make(runs, jobs=jobs, report=partial(print, flush=True)):
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()

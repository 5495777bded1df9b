"""Studies of top-1: carry out their runs in parts, and print and write their tables."""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.speed.measuring import frozen, write
from largebatch.lab.studies.runner import Runs, carry_out
from largebatch.lab.studies.store import Store
from largebatch.lab.studies.study import Study, StudyMachine
from largebatch.lab.studies.trained import cells_of

INTERRUPTED = 75

Accuracies = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Top-1 in per cent by recipe, setting and seed."""


def arguments_of_runs(description: str, *, name: str) -> argparse.Namespace:
    """Return --seconds, --jobs and --out of the command that makes the runs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each with a thread")
    parser.add_argument("--out", type=Path, default=Path("build") / name)
    return parser.parse_args()


def make_runs(
    study: Study, folder: Path, data: Mapping[str, Path], args: argparse.Namespace
) -> None:
    """Make the runs that have no record; exit with INTERRUPTED after args.seconds.

    `folder` is that of the study, `data` has the images of each of its recipes, or under "" of all.
    """
    stop = threading.Timer(args.seconds, os.kill, (os.getpid(), signal.SIGTERM))
    stop.daemon = True
    stop.start()
    machine = StudyMachine(data=dict(data))
    runs = Runs(cells=cells_of(study, folder), store=Store(args.out), machine=machine)
    print(f"{args.out}: {len(runs.left)} of {runs.number} runs are left", flush=True)
    if not carry_out(runs, jobs=args.jobs, report=partial(print, flush=True)):
        sys.exit(INTERRUPTED)


def print_table(description: str, *, name: str, table: Callable[[Accuracies], str]) -> None:
    """Print the table of the records in --out, and write them; of the newest result without any."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build") / name, metavar="DIR")
    accuracies = read(parser.parse_args().out)
    if accuracies:
        write(name, {"top1": accuracies})
    else:
        accuracies = of_results(frozen(name)["top1"])
    print(table(accuracies))


def read(folder: Path) -> Accuracies:
    """Return the accuracies of all recorded runs."""
    accuracies: dict[str, dict[str, dict[int, float]]] = {}
    for path in sorted(folder.glob("*/*/seed-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        recipe, setting = path.parts[-3:-1]
        seeds = accuracies.setdefault(recipe, {}).setdefault(setting, {})
        seeds[record["seed"]] = 100 * record["top1"]
    return accuracies


def of_results(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Accuracies:
    """Return the accuracies of a file of results, whose seeds are words."""
    return {
        recipe: {
            setting: {int(seed): top1 for seed, top1 in seeds.items()}
            for setting, seeds in settings.items()
        }
        for recipe, settings in results.items()
    }

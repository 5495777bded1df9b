"""Carry out the study of orders in chunks and windows: `study.yaml`.

    python -m benchmarks.studies.order.run [--jobs 2] [--seconds 3600] [--out DIR]

Needs LARGEBATCH_DATA. The command stops after --seconds, with exit code 75; the same command
continues with the runs that have no record. tables.py then prints the results and writes them.
"""

import argparse
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

from benchmarks.studies.images import write_part
from largebatch.data.datasets import import_data
from largebatch.lab.studies.runner import Runs, carry_out
from largebatch.lab.studies.store import Store
from largebatch.lab.studies.study import StudyMachine, load_study
from largebatch.lab.studies.trained import cells_of
from largebatch.storage import silent

FOLDER = Path(__file__).parent
TRAINED = 4_800
"""Number of training images, as in the study."""

SHARD_BYTES = 10**7
INTERRUPTED = 75


def write_shards(work: Path) -> dict[str, Path]:
    """Return folders with shards whose images are shuffled and sorted; create them if needed."""
    images = write_part(work, "cifar10", train=TRAINED)
    shards = {}
    for name, seed in (("shuffled", 0), ("sorted", None)):
        shards[name] = work / f"{images.name}-{name}"
        if not shards[name].exists():
            import_data(
                "webdataset",
                images,
                shards[name],
                shard_bytes=SHARD_BYTES,
                progress=silent,
                seed=seed,
            )
    return shards


def main() -> None:
    """Make the runs that have no record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each with a thread")
    parser.add_argument("--out", type=Path, default=Path("build") / "order")
    args = parser.parse_args()
    shards = write_shards(args.out.parent)
    stop = threading.Timer(args.seconds, os.kill, (os.getpid(), signal.SIGTERM))
    stop.daemon = True
    stop.start()
    study = load_study(FOLDER / "study.yaml")
    data = {name: shards[name.rpartition("-")[2]] for name in study.recipes}
    cells = cells_of(study, FOLDER)
    runs = Runs(cells=cells, store=Store(args.out), machine=StudyMachine(data=data))
    print(f"{args.out}: {len(runs.left)} of {runs.number} runs are left", flush=True)
    if not carry_out(runs, jobs=args.jobs, report=partial(print, flush=True)):
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()

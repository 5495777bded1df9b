"""Run a staleness study: train what has no record yet; each run has one file.

A file is complete or absent, so a stopped study is resumed by the same command, and loses only the
runs that were under way.
"""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean

from largebatch.distributed.environment import available_cores
from largebatch.lab.studies.metrics import Interval, interval
from largebatch.lab.studies.queue.study import read_record
from largebatch.lab.studies.staleness.study import Cell
from largebatch.lab.studies.staleness.trial import Result, train
from largebatch.runs.interrupts import STOPS, InterruptedStudyError, answering
from largebatch.runs.options import Options
from largebatch.storage import write_whole


@dataclass(frozen=True, slots=True)
class Run:
    """One cell with one seed, and the file of its record."""

    cell: Cell
    seed: int
    path: Path

    def read(self) -> Result | None:
        """Return the record, None where there is none.

        Raises StudyError where it is of another recipe or cluster.
        """
        definition = {"recipe": self.cell.recipe_of(self.seed), "cluster": self.cell.machines}
        return read_record(self.path, definition)


def runs_of(cells: Sequence[Cell], *, seeds: int, out: Path) -> list[Run]:
    """Return the runs of a study, the first seed of every cell first."""
    return [
        Run(cell, seed, out / cell.name / f"seed-{seed}.json")
        for seed in range(1, seeds + 1)
        for cell in cells
    ]


def carry_out(
    runs: Sequence[Run],
    options: Options,
    *,
    processes: int,
    report: Callable[[Run, Result], None],
) -> None:
    """Train the cells without a record, several at a time; `report` is called after each.

    Raises StudyError for records of another study before anything is trained, and
    InterruptedStudyError after a request to stop.
    """
    left = [run for run in runs if run.read() is None]
    if processes == 1:
        for run in left:
            report(run, _train(run, options))
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // processes)))
    with _pool(processes) as pool:
        begun = {pool.submit(_train, run, options): run for run in left}
        for each in as_completed(begun):
            report(begun[each], each.result())


@contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Start processes that end with this one, and at once where this one is asked to stop."""
    others = {*multiprocessing.active_children()}
    spawning = multiprocessing.get_context("spawn")  # PyTorch's threads do not survive a fork
    pool = ProcessPoolExecutor(
        processes, mp_context=spawning, initializer=_end_with, initargs=(os.getpid(),)
    )
    try:
        with answering(signal.default_int_handler, *STOPS):
            yield pool
    except BaseException as error:
        for process in {*multiprocessing.active_children()} - others:
            process.kill()  # runs are recorded whole or not at all
        if isinstance(error, KeyboardInterrupt):
            raise InterruptedStudyError from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with(parent: int) -> None:
    """Leave requests to stop to the parent, and end where it is gone."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _train(run: Run, options: Options) -> Result:
    found = train(run.cell, seed=run.seed, options=replace(options, out=run.path.parent))
    write_whole(run.path, json.dumps(found, indent=1).encode())
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """What the seeds of a cell have in common."""

    cell: Cell
    found: tuple[Result, ...]

    @property
    def top1(self) -> Interval:
        """Fraction of the validation images that are classified right, over the seeds."""
        return interval(one["top1"] for one in self.found)

    @property
    def by_seed(self) -> dict[int, float]:
        """Fraction of the validation images that are classified right, by seed."""
        return {one["seed"]: one["top1"] for one in self.found}

    @property
    def error(self) -> Interval:
        """Fraction of the validation images that are classified wrong, over the seeds."""
        return interval(1 - one["top1"] for one in self.found)

    @property
    def seconds(self) -> float:
        """The simulated time of a run, the mean over the seeds."""
        return fmean(one["simulated_seconds"] for one in self.found)

    @property
    def staleness(self) -> list[float]:
        """The share of all gradients that was 0, 1, 2 ... updates late."""
        return [count / sum(self.counts) for count in self.counts]

    @property
    def counts(self) -> list[int]:
        """How many gradients were 0, 1, 2 ... updates late, over the seeds."""
        late = zip_longest(*(one["tau"] for one in self.found), fillvalue=0)
        return [sum(numbers) for numbers in late]

    @property
    def tau(self) -> float:
        """How many updates late gradients were on average, the mean over the seeds."""
        return fmean(one["tau_mean"] for one in self.found)

    @property
    def late(self) -> int:
        """How many gradients were more than 2 sigma updates late."""
        return sum(self.counts[2 * self.cell.sigma + 1 :])

    @property
    def diverged(self) -> int:
        """How many of the runs did."""
        return sum(one["diverged"] is not None for one in self.found)


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """Return the cells that have a record."""
    found: dict[str, tuple[Cell, list[Result]]] = {}
    for run in runs:
        record = run.read()
        if record is not None:
            found.setdefault(run.cell.name, (run.cell, []))[1].append(record)
    return [Row(cell, tuple(records)) for cell, records in found.values()]

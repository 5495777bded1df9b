"""Carry out a study: claim the next free run, make it, record it, until none is left.

Any number of these commands, on one machine or many, share the folder of a study and nothing
else, so each may be killed at any moment and restarted. One run at a time is made in this process;
several, or runs that are measured, in a process each. A request to stop reaches the runs under
way, which save a checkpoint or leave no record.
"""

import errno
import json
import os
import pickle
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import NamedTuple

import numpy as np
from pydantic_core import to_jsonable_python

from largebatch.distributed.environment import available_cores, worker_rank
from largebatch.errors import (
    BackendError,
    LargebatchError,
    RequestedStopError,
    StudyError,
    WorkerFailedError,
    shorten,
)
from largebatch.lab.studies.namespaces import require_hosts
from largebatch.lab.studies.records import Json, watched
from largebatch.lab.studies.store import Store
from largebatch.lab.studies.study import Cell, Slot, Study, StudyMachine, Values, load_study
from largebatch.optional import require_optuna, require_psutil, require_scipy
from largebatch.report.pages import Page
from largebatch.runs.interrupts import STOPS, InterruptedStudyError, StopRequests, answering
from largebatch.runs.launch import Command, Processes
from largebatch.runs.options import Options

POLL_SECONDS = 1.0
"""Seconds between looks at the folder while all remaining runs are claimed by others."""

PROBING_SECONDS = 20.0
"""Seconds after which a dry run measures no further cell of a recipe that has one."""

_PERIOD = 0.05  # seconds between looks at the processes of runs

TASK = "task"
"""File in the folder of a run in a process: its Task, pickled."""

RECORD = "record"
"""File in this folder: the record, pickled; None if the run was requested to stop."""

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}

Records = Mapping[str, Mapping[str, Json]]
"""Records by the names of cells and runs."""


class Task(NamedTuple):
    """A claimed run, the values of its searched keys, and its options."""

    cell: Cell
    slot: Slot
    values: Values
    options: Options


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs of a study in a folder."""

    cells: Sequence[Cell]
    store: Store
    machine: StudyMachine

    def records(self, cell: Cell) -> dict[str, Json]:
        """Return the records of a cell by the names of runs."""
        records = {slot.name: self.store.read(cell, slot) for slot in cell.slots}
        return {name: record for name, record in records.items() if record is not None}

    @property
    def left(self) -> list[tuple[Cell, Slot]]:
        """Runs without a record, seed by seed, those of searches first."""
        runs = [(cell, slot) for cell in self.cells for slot in cell.slots]
        runs = [(cell, slot) for cell, slot in runs if not self.store.path(cell, slot).exists()]
        return sorted(runs, key=lambda run: (not run[1].trial, run[1].trial or run[1].seed))

    @property
    def number(self) -> int:
        """Number of all runs."""
        return sum(len(cell.slots) for cell in self.cells)

    def claim(self, left: Sequence[tuple[Cell, Slot]]) -> Task | None:
        """Claim a free run of those left; None if there is none now.

        Seeds wait for the search of their cell.
        """
        # A seed needs the rate found, which is known when the last trial is recorded.
        searching = {cell.name for cell, slot in left if slot.trial}
        for cell, slot in left:
            if (slot.trial or cell.name not in searching) and self.store.claim(cell, slot):
                records = [self.store.read(cell, other) for other in cell.slots if other.trial]
                trials = [record for record in records if record is not None]
                values = self.store.values(cell, slot, partial(cell.values, trials, slot))
                folder = self.store.path(cell, slot).with_suffix("")
                return Task(cell, slot, values, self.machine.of(cell, folder))
        return None


def kind_of(study: Study) -> ModuleType:
    """Return the module of the kind of a study.

    Its `cells_of(study, folder)` returns the checked cells of a study whose file is in a folder;
    `make_page(study, folder, records)` returns the page.
    """
    name = "comparison" if study.kind in {"policies", "settings"} else study.kind
    return import_module(f"largebatch.lab.studies.{name}")


def carry_out(runs: Runs, *, jobs: int, report: Callable[[str], None]) -> bool:
    """Make what is left, `jobs` runs at a time; return False after a request to stop.

    `report` gets a line after every run.
    Raises LargebatchError for a mistake that a run finds, and WorkerFailedError for a run whose
    process failed; the others stop and can be resumed.
    """
    # Before a run is claimed, so that a second command with other settings is refused.
    runs.store.define(runs.cells)
    pool = _Pool(jobs, in_processes=jobs > 1 or any(cell.own_process for cell in runs.cells))
    begun = time.monotonic()
    done = 0
    try:
        with pool.stopping():
            while True:
                left = runs.left
                while not pool.is_full and (task := runs.claim(left)) is not None:
                    pool.start(task)
                for task, record in pool.finished(POLL_SECONDS if left else 0.0):
                    if record is None:
                        runs.store.release(task.cell, task.slot)
                        continue
                    runs.store.write(task.cell, task.slot, record)
                    done += 1
                    # Other commands share the folder, so what is left is counted there and not
                    # here.
                    number = len(runs.left)
                    seconds = round((time.monotonic() - begun) / done * number)
                    top1 = f": top-1 {record['top1']:.2%}" if "top1" in record else ""
                    report(
                        f"{runs.number - number}/{runs.number}  {task.cell.name} {task.slot.name}"
                        f"{top1}{', diverged' * bool(record.get('diverged'))}; "
                        f"{timedelta(seconds=seconds)} left"
                    )
                if pool.running:
                    continue
                if pool.error is not None:
                    raise pool.error
                if pool.is_stopping or not runs.left:
                    return not pool.is_stopping
    except KeyboardInterrupt:
        return False
    finally:
        runs.store.release_all()


def made(task: Task) -> Json:
    """Make a run; return its record, with where, when and beside what it was made.

    Raises StudyError if a file cannot be written, such as on a full disk.
    """
    try:
        return watched(lambda: task.cell.carry_out(task.slot, task.values, task.options))
    except OSError as error:
        if error.errno not in _OF_THE_DISK:
            raise
        where = error.filename or task.options.out
        raise StudyError(
            f"{where}: cannot be written: {error.strerror}; make room and repeat the same command, "
            "which resumes"
        ) from None


class _RunInProcess(NamedTuple):
    task: Task
    place: int
    """Which of the shares of this machine's devices it has."""

    folder: tempfile.TemporaryDirectory[str]
    """Holds the task, and the record when the run has ended."""

    processes: Processes


class _Pool:
    """Runs, at most `jobs` at a time: each in a process, or one after the other in this one."""

    def __init__(self, jobs: int, *, in_processes: bool) -> None:
        self._jobs = jobs
        self._in_processes = in_processes
        self.running: list[_RunInProcess] = []
        self._done: list[tuple[Task, Json | None]] = []
        self._requests = StopRequests()
        self._shares = device_shares(jobs) if jobs > 1 else [{}]
        self.error: Exception | None = None

    @property
    def is_stopping(self) -> bool:
        return self._requests.any or self.error is not None

    @property
    def is_full(self) -> bool:
        return bool(self._done) or len(self.running) >= self._jobs or self.is_stopping

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Pass requests to stop on to the runs; the second one kills them."""

        def stop(*_: object) -> None:
            self._requests.add()
            # A run in this process that handles requests itself takes the signal instead of this
            # function.
            if not self._in_processes:
                raise KeyboardInterrupt
            for run in self.running:
                if self._requests.again:
                    run.processes.kill()
                else:
                    run.processes.send(signal.SIGTERM)

        with answering(stop, *STOPS):
            try:
                yield
            finally:
                for run in self.running:
                    run.processes.close(signal.SIGKILL)
                    run.folder.cleanup()

    def start(self, task: Task) -> None:
        """Make a run here, or start its process."""
        if not self._in_processes:
            try:
                self._done.append((task, made(task)))
            except (InterruptedStudyError, KeyboardInterrupt):
                self._requests.add()
                self._done.append((task, None))
            return
        # A run gets the devices of the one that ended.
        taken = {run.place for run in self.running}
        place = next(place for place in range(self._jobs) if place not in taken)
        folder = tempfile.TemporaryDirectory(prefix="largebatch-")
        Path(folder.name, TASK).write_bytes(pickle.dumps(task))
        command = Command(
            name="its process",
            arguments=["-m", "largebatch.lab.studies.run_in_process", folder.name],
            environment={**self._shares[place], **task.cell.environment_of_process},
        )
        processes = Processes(sys.executable, [command], folder=folder.name)
        self.running.append(_RunInProcess(task, place, folder, processes))
        processes.start()

    def finished(self, seconds: float) -> list[tuple[Task, Json | None]]:
        """Return the runs that ended within some seconds, each with its record if it has one."""
        until = time.monotonic() + seconds
        while not (self._done or (self.is_stopping and not self.running)):
            for run in [run for run in self.running if run.processes.poll()]:
                self._done.append((run.task, self._result(run)))
                self.running.remove(run)
                run.folder.cleanup()
            left = until - time.monotonic()
            if self._done or left <= 0:
                break
            time.sleep(min(left, _PERIOD))
        done = self._done
        self._done = []
        return done

    def _result(self, run: _RunInProcess) -> Json | None:
        """Return the record of a run that has ended; if it failed, stop the others."""
        error = run.processes.error(stopping=self.is_stopping)
        if error is None:
            record: Json | None = pickle.loads(Path(run.folder.name, RECORD).read_bytes())  # noqa: S301 -- its writer is ours
            return record
        is_killed = self._requests.again or isinstance(error, RequestedStopError)
        if self.error is None and not is_killed:
            kind = LargebatchError if isinstance(error, LargebatchError) else WorkerFailedError
            self.error = kind(f"{run.task.cell.name} {run.task.slot.name}: {error}")
            for other in self.running:
                if other is not run:
                    other.processes.send(signal.SIGTERM)
        return None


def device_shares(jobs: int) -> list[dict[str, str]]:
    """Return the environment variables that differ between the runs of one machine."""
    from largebatch import accelerator  # torch takes a second to import

    threads = str(max(1, available_cores() // jobs))
    shares = [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)} for _ in range(jobs)]
    all_devices = ",".join(map(str, range(accelerator.count())))
    variable = accelerator.visible_devices_variable()
    devices = list(filter(None, os.environ.get(variable, all_devices).split(",")))
    for place, share in enumerate(shares if devices else ()):  # several devices, or one shared
        share[variable] = ",".join(devices[place::jobs]) or devices[place % len(devices)]
    return shares


def _require_what_runs_need(loaded: Study, runs: Runs, *, jobs: int) -> None:
    """Raise LargebatchError if the runs that are left, or the page, cannot be made here."""
    require_psutil()
    require_scipy("scipy.stats")
    if loaded.search is not None:
        require_optuna()
    runs.store.require_writable()
    runs.machine.require_data(runs.cells, left=[cell for cell, _ in runs.left])
    if loaded.kind in {"servers", "scaling"}:
        require_hosts()
        if jobs > 1:
            raise BackendError("--jobs: starts on hosts are measured one after the other")


class TimeLeft(NamedTuple):
    """How long the runs that are left take, and how many of their cells it rests on."""

    seconds: float
    measured: int
    """Number of cells with records or measured updates; the others take the mean of these."""

    cells: int

    def __str__(self) -> str:
        """Return the time, and the share of the cells if not all were measured."""
        about = f"about {timedelta(seconds=round(self.seconds))}"
        if self.measured == self.cells:
            return about
        return f"{about}, by {self.measured} of {self.cells} cells"


def time_left(runs: Runs, *, jobs: int) -> TimeLeft:
    """Return how long the runs that are left take, `jobs` at a time.

    A cell with records takes the mean of their times. Of the others two updates are measured, in
    runs that leave nothing behind, once for all cells whose runs begin alike; these raise what the
    runs of the study would. One cell of each recipe is measured, and further ones until
    PROBING_SECONDS have passed; the rest take the mean of the recipe's cells that are known.
    """
    numbers = Counter(cell.name for cell, _ in runs.left)
    cells = [cell for cell in runs.cells if numbers[cell.name]]
    known: dict[str, float] = {}
    for cell in cells:
        times = [record["ended"] - record["begun"] for record in runs.records(cell).values()]
        if times:
            known[cell.name] = fmean(times)
    probed: dict[str, Json] = {}
    begun = time.monotonic()
    for cell in _by_turns([cell for cell in cells if cell.name not in known]):
        # At least one cell of each recipe is measured, however long it takes.
        is_first = not any(other.name in known for other in cells if _are_alike(other, cell))
        probe = cell.probe
        # Policies of a recipe begin alike, so one probe serves all of them.
        key = json.dumps(to_jsonable_python([probe.configuration, probe.definition]))
        if key not in probed:
            if not is_first and time.monotonic() - begun > PROBING_SECONDS:
                continue
            probed[key] = _measured(probe, runs.machine)
        known[cell.name] = cell.seconds_of(probed[key])
    seconds = 0.0
    for cell in cells:
        alike = [
            known[other.name] for other in cells if other.name in known and _are_alike(other, cell)
        ]
        seconds += numbers[cell.name] * known.get(cell.name, fmean(alike))
    return TimeLeft(seconds / jobs, len(known), len(cells))


def _are_alike(one: Cell, other: Cell) -> bool:
    return one.configuration == other.configuration


def _by_turns(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells of the recipes in turn, those of each in a random order.

    So the first ones are a random sample of each recipe's cells, which differ in cost.
    """
    # A fixed seed: two dry runs of a study measure the same cells.
    order = np.random.default_rng(0).permutation(len(cells))
    shuffled = [cells[place] for place in order]
    places = Counter[str]()
    turns = []
    for cell in shuffled:
        turns.append(places[cell.configuration])
        places[cell.configuration] += 1
    return [cell for _, cell in sorted(zip(turns, shuffled, strict=True), key=itemgetter(0))]


def _measured(cell: Cell, machine: StudyMachine) -> Json:
    """Return the record of a run of a cell, made in a folder that is removed."""
    pool = _Pool(1, in_processes=cell.own_process)
    with tempfile.TemporaryDirectory(prefix="largebatch-") as name, pool.stopping():
        folder = Path(name, "probe")
        pool.start(Task(cell, cell.slots[0], {}, machine.of(cell, folder)))
        while not (ended := pool.finished(POLL_SECONDS)):
            continue
    if pool.error is not None:
        raise pool.error
    ((_, record),) = ended
    if record is None:
        raise InterruptedStudyError
    return record


def study(  # noqa: PLR0913 -- the options of the command
    file: Path,
    *,
    out: Path | None = None,
    jobs: int = 1,
    dry_run: bool = False,
    page: bool = False,
    machine: StudyMachine,
    report: Callable[[str], None],
) -> bool:
    """Carry out a study, or resume it, then report its table and draw its page.

    A finished study is only drawn. `page` starts nothing and draws what is recorded, and what is
    simulated. `dry_run` lists the runs that are left and how long they take, and raises what the
    runs would. `report` gets every line. Returns False after a request to stop.
    """
    if worker_rank() is not None:
        raise BackendError(
            "a study starts the workers of its runs itself; start it by itself on every machine, "
            "with --jobs, and not by torchrun, horovodrun or srun with several tasks"
        )
    loaded = load_study(file)
    folder = Path(file).parent
    kind = kind_of(loaded)
    store = Store(out or Path("runs") / loaded.name)
    runs = Runs(cells=kind.cells_of(loaded, folder), store=store, machine=machine)
    store.require_same(runs.cells)  # records of other settings are refused
    left = runs.left
    if left and not page:
        _require_what_runs_need(loaded, runs, jobs=jobs)
    if dry_run:
        for cell, slot in left:
            report(f"{cell.name} {slot.name}")
        expected = ""
        if left:
            try:
                expected = f": {time_left(runs, jobs=jobs)}"
            except (InterruptedStudyError, KeyboardInterrupt):
                return False
        report(f"{len(left)} of {runs.number} runs are left{expected}")
        return True
    if left and not page:
        if not carry_out(runs, jobs=jobs, report=report):
            done = runs.number - len(runs.left)
            report(f"{done} of {runs.number} runs are done; to resume: the same command")
            return False
    elif store.folder.exists():
        store.define(runs.cells)
    records = {cell.name: of_cell for cell in runs.cells if (of_cell := runs.records(cell))}
    if not records and not loaded.simulates:
        raise StudyError(f"{store.folder}: no run of the study has finished")
    drawn: Page = kind.make_page(loaded, folder, records)
    unfinished = list(dict.fromkeys(cell.name for cell, _ in runs.left))
    if unfinished:
        note = f"Not finished: {shorten(unfinished)}."
        drawn = replace(drawn, findings=[*drawn.findings, note], is_sound=False)
    report(f"{drawn.text()}\npage: {drawn.write(store.folder / 'study.html')}")
    report(f"tables and charts for a paper: {drawn.write_for_paper(store.folder / 'paper')}")
    return True

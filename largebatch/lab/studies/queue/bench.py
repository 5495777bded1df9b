"""Run a study: search the rate of every policy, then run every seed at the best rate.

Any number of processes, on one machine or many, do the same with one storage: each takes the
next free run until none is left. They share nothing else, so each may be killed at any moment
and restarted.
"""

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from largebatch.distributed.environment import available_cores
from largebatch.lab.studies.queue.cells import Cell, Values, rungs
from largebatch.lab.studies.queue.database import Claim, open_storage
from largebatch.lab.studies.queue.owners import Owners, beating
from largebatch.lab.studies.queue.phases import Bench, Phase, Progress, rounded
from largebatch.lab.studies.queue.study import ConfigurationStudy
from largebatch.lab.studies.queue.trial import Machine, Result, train
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.runs.interrupts import STOPS, InterruptedStudyError, Requests, answering

_LOG = logging.getLogger(__name__)

JOB = TypeAdapter(tuple[Bench, str])
"""Argument of local processes, as JSON: the study and the URL of its storage."""

Report = Callable[[Progress, Phase, Claim, Result], None]
"""Callback after every run."""

_COMPARED = 3
"""Least number of earlier trials that a trial is compared with before it can be stopped."""

_POLL_SECONDS = 1.0
"""Seconds between checks of the storage while all remaining runs are taken by others."""


def work(bench: Bench, url: str, report: Report, owners: Owners | None = None) -> bool:
    """Run what is free until nothing is left; return False if this process was asked to stop."""
    from optuna.exceptions import UpdateFinishedTrialError

    owners = owners or Owners()
    with open_storage(url) as storage:
        progress = Progress(bench, storage)
        try:
            with _stopping():
                while not progress.is_done:
                    taken = _take(progress, owners)
                    if taken is None:
                        time.sleep(_POLL_SECONDS)
                        continue
                    try:
                        result = _carry_out(bench, *taken, owners)
                    except UpdateFinishedTrialError:
                        _LOG.warning(
                            "%s: another process assumed this one was gone, and continues the run",
                            taken[1].slot,
                        )
                    else:
                        report(progress, *taken, result)
        except (InterruptedStudyError, KeyboardInterrupt):
            return False
    return True


def work_together(bench: Bench, url: str, *, processes: int) -> list[int]:
    """Run `work` in several processes, each with its share of the machine's cores and GPUs.

    Returns their exit codes: 0 if nothing is left, 75 if one was asked to stop, the negative
    number of a signal that ended one.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as job:  # too long for an argument
        job.write(JOB.dump_json((bench, url)))
        job.flush()
        command = [sys.executable, "-m", "largebatch.lab.studies.queue.worker", job.name]
        started = [
            subprocess.Popen(command, env={**os.environ, **share})  # noqa: S603 -- our words
            for share in _shares(processes)
        ]

        def pass_on(number: int, _: object) -> None:
            for process in started:
                process.send_signal(number)

        with answering(pass_on, *STOPS):
            return [process.wait() for process in started]


def _shares(processes: int) -> list[dict[str, str]]:
    """Return the environment variables that differ between processes of one machine."""
    from largebatch import accelerator  # torch takes a second to import

    threads = str(max(1, available_cores() // processes))
    shares = [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}] * processes
    own = ",".join(map(str, range(accelerator.count())))
    variable = accelerator.visible_devices_variable()
    devices = list(filter(None, os.environ.get(variable, own).split(",")))
    if not devices:
        return shares
    return [
        {**share, variable: visible}
        for share, visible in zip(shares, share_out(devices, processes), strict=True)
    ]


def share_out(devices: Sequence[str], processes: int) -> list[str]:
    """Return the devices of each process: several, or one shared with other processes.

    >>> share_out(["0", "1", "2"], 2), share_out(["0", "1"], 3)
    (['0,2', '1'], ['0', '1', '0'])
    """
    return [
        ",".join(devices[place::processes]) or devices[place % len(devices)]
        for place in range(processes)
    ]


@contextmanager
def _stopping() -> Iterator[None]:
    """Raise KeyboardInterrupt on a request to stop, unless a run handles it."""
    requests = Requests()

    def stop(*_: object) -> None:
        first = not requests.any
        requests.add()
        if first or requests.again:
            raise KeyboardInterrupt

    with answering(stop, *STOPS):
        yield


def _take(progress: Progress, owners: Owners) -> tuple[Phase, Claim] | None:
    """Claim a free run: searches first, in the cell with the fewest started runs.

    Two concurrent trials of one search would not know each other's results.
    """
    phases = progress.phases()
    for phase in sorted(phases, key=lambda one: (not one.is_search, one.queue.num_begun)):
        claim = phase.queue.claim(owners)
        if claim is not None:
            return phase, claim
    return None


def _carry_out(bench: Bench, phase: Phase, claim: Claim, owners: Owners) -> Result:
    """Train a claimed run and record its result; release the run if there is none."""
    folder = bench.out / phase.cell.configuration / phase.cell.variant / claim.slot
    make = _search if phase.is_search else _train_seed
    with beating(claim.trial, owners):
        try:
            values, result = make(bench, phase, claim, folder)
        except BaseException:
            phase.queue.give_back(claim)
            raise
    result = {"values": dict(values), **result}
    search = bench.study.search
    phase.queue.finish(claim, result, value=result[search.metric if search else "top1"])
    return result


def machine_of(bench: Bench, cell: Cell) -> Machine:
    """Return the machine options for the runs of a cell.

    A run whose cost is measured has its own process: else it would inherit the threads and the
    memory of earlier runs.
    """
    backend = bench.machine.backend if cell.backend == "auto" else cell.backend
    return replace(
        bench.machine, backend=backend, workers=cell.workers, threads=cell.threads,
        environment=cell.environment,
        apart=isinstance(bench.study, ConfigurationStudy),
    )  # fmt: skip


def _search(bench: Bench, phase: Phase, claim: Claim, folder: Path) -> tuple[Values, Result]:
    """Run one trial of a search.

    A trial that is stopped early is recorded with its accuracy at that point, so that the search
    learns from it; Optuna's pruned state would hide it from the Gaussian process.
    """
    import optuna

    cell, trial, search = phase.cell, claim.trial, bench.study.search
    assert search is not None
    phase.queue.study.pruner = optuna.pruners.MedianPruner(
        n_startup_trials=_COMPARED, n_min_trials=_COMPARED
    )
    values = {
        key: rounded(trial.suggest_float(key, low, high, log=True))
        for key, (low, high) in cell.ranges.items()
    }
    recipe = cell.trial_recipe(values)
    stops = rungs(make_plan(recipe, workers=cell.workers)) if search.prune else []

    def hopeless(step: int, found: object) -> bool:
        trial.report(search.value_of(found), step)
        return trial.should_prune()

    return values, train(recipe, folder, machine_of(bench, cell), stops=stops, hopeless=hopeless)


def _train_seed(bench: Bench, phase: Phase, claim: Claim, folder: Path) -> tuple[Values, Result]:
    """Run one seed at the best values, or at a multiple of the rate."""
    assert phase.values is not None
    about = phase.queue.slots[claim.slot].about
    recipe = phase.cell.seed_recipe(phase.values, seed=int(about["seed"]), scale=about["scale"])
    machine = machine_of(bench, phase.cell)
    result = train(recipe, folder, machine, stops=(), hopeless=lambda *_: False)
    return phase.values, result

"""What a run has taken of its machine, over all workers: time, processor, memory, disk, GPU."""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from largebatch.optional import require_psutil
from largebatch.report.run import FloatArray, Run
from largebatch.tracking.events import Measured, System


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """All but the first two needs monitor: system; NaN where it was not measured.

    It is measured from the moment at which a worker is set up to the last update, evaluations on
    the way included.
    """

    train_seconds: Measured
    """Of the updates."""

    evaluation_seconds: Measured
    """Of all evaluations of validation images."""

    cpu_seconds: Measured = math.nan
    """Of all cores, summed over the workers."""

    cores: Measured = math.nan
    """These over the seconds in which they were used."""

    peak_memory_bytes: Measured = math.nan
    """The most resident memory of each worker, summed; what several share is counted in each."""

    read_bytes: Measured = math.nan
    written_bytes: Measured = math.nan
    """From and to disks; what the system had in its own cache is not read from a disk."""

    gpu_percent: Measured = math.nan
    """Of the time in which the GPU worked, mean over the workers."""

    gpu_memory_bytes: Measured = math.nan
    """The most that any worker's GPU had in use."""


def watch_others() -> Callable[[], float]:
    """Return what returns how many cores other programs of the machine have used since, on average.

    Those are all but this process and the processes that it has waited for.
    """
    cpu_times = require_psutil().cpu_times

    def read() -> tuple[float, float]:
        every, own = cpu_times(), os.times()
        busy = every.user + every.nice + every.system + getattr(every, "steal", 0.0)
        return time.monotonic(), busy - sum(own[:4])

    then, before = read()

    def cores() -> float:
        now, after = read()
        return max(0.0, (after - before) / (now - then))

    return cores


def usage_of(run: Run) -> Usage:
    """Return what a run has used, by its log."""
    seconds = [one.step_seconds for one in run.steps]
    evaluations = [one.seconds for one in run.evaluations]
    used = _used(run.system) if run.system and all(one.seconds for one in run.system) else {}
    return Usage(train_seconds=_total(seconds), evaluation_seconds=_total(evaluations), **used)


def _total(seconds: Sequence[float]) -> float:
    return math.fsum(seconds) if seconds and all(map(math.isfinite, seconds)) else math.nan


def _used(records: Sequence[System]) -> dict[str, float]:
    """Return the sums over records and workers; a row for each record, a column for each worker."""

    def table(name: str) -> FloatArray:
        return np.array([getattr(record, name) for record in records], dtype=np.float64)

    seconds = table("seconds")
    cpu_seconds = float((table("cpu_percent") / 100 * seconds).sum())
    return {
        "cpu_seconds": cpu_seconds,
        "cores": cpu_seconds / float(seconds.mean(axis=1).sum()),
        "peak_memory_bytes": float(table("peak_memory_bytes").max(axis=0).sum()),
        "read_bytes": float((table("read_bytes_per_second") * seconds).sum()),
        "written_bytes": float((table("written_bytes_per_second") * seconds).sum()),
        "gpu_percent": float((table("gpu_percent") * seconds).sum() / seconds.sum()),
        "gpu_memory_bytes": float(table("gpu_memory_bytes").max()),
    }

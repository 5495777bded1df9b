"""Resources that a run used, over all workers: time, processor, memory, disk, GPU."""

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
    """Usage of a run.

    All but the first two fields need monitor: system; NaN if not measured. Measured from the
    set-up of a worker to the last update, with evaluations in training.
    """

    train_seconds: Measured
    """Seconds of the updates."""

    evaluation_seconds: Measured
    """Seconds of all evaluations on validation images."""

    cpu_seconds: Measured = math.nan
    """Core-seconds, summed over the workers."""

    cores: Measured = math.nan
    """Mean number of busy cores."""

    peak_memory_bytes: Measured = math.nan
    """Peak resident bytes, summed over the workers; shared memory counts in each."""

    read_bytes: Measured = math.nan
    written_bytes: Measured = math.nan
    """Bytes read from and written to disks, without the system's file cache."""

    gpu_percent: Measured = math.nan
    """Fraction of the time in which the GPU worked, mean over the workers."""

    gpu_memory_bytes: Measured = math.nan
    """Peak GPU memory in bytes of any worker."""


def watch_others() -> Callable[[], float]:
    """Return a function that gives the mean number of cores used by other programs since now.

    Other programs are all but this process and its finished children.
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
    """Return the resources that a run used, from its log."""
    seconds = [one.step_seconds for one in run.steps]
    evaluations = [one.seconds for one in run.evaluations]
    used = _used(run.system) if run.system and all(one.seconds for one in run.system) else {}
    return Usage(train_seconds=_total(seconds), evaluation_seconds=_total(evaluations), **used)


def _total(seconds: Sequence[float]) -> float:
    return math.fsum(seconds) if seconds and all(map(math.isfinite, seconds)) else math.nan


def _used(records: Sequence[System]) -> dict[str, float]:
    """Return the sums over records and workers; one row per record, one column per worker."""

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

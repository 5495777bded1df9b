"""What the launcher and the machine set for this process; read without PyTorch."""

import os
from typing import Literal

BackendName = Literal["auto", "serial", "torch", "horovod"]

LAUNCHER = "LARGEBATCH_LAUNCHER"
"""The variable in which a local worker finds the process that started it."""

GRACE_SECONDS = 5.0
"""How long workers have to explain a lost connection, or to leave after a crash."""


def launched_rank() -> int | None:
    """Return this process's rank if something started it as one of many workers, else None."""
    for name in ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return None


def own_rank() -> int:
    """Return this process's rank; one that was started alone is worker 0."""
    return launched_rank() or 0


def launched_size() -> int:
    """Return how many workers this process was started as one of; 1 if it was started alone."""
    for name in ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return 1


def available_cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux; a container may have fewer than the machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

"""What the launcher and the machine set for this process; read without PyTorch."""

import os
import socket
from typing import Literal

BackendName = Literal["auto", "serial", "torch", "horovod"]

LAUNCHER = "LARGEBATCH_LAUNCHER"
"""The variable in which a local worker finds the process that started it."""

LOST, ABSENT = 3, 4
"""Exit codes of a worker that lost another one, and of one that waited for an absent one."""

TIMEOUT_SECONDS = 300.0
"""How long an operation waits for a worker that is there and silent, unless --timeout is given."""

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


def loopback() -> str:
    """Return the name of the interface that only this machine reaches."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def use_loopback() -> None:
    """Let libraries whose workers are all on this machine listen to nothing else.

    By itself Gloo takes the address of the host's name. An interface that the user chose stays.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, loopback())


def available_cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux; a container may have fewer than the machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

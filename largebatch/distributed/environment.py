"""What the launcher and the machine set for this process; read without PyTorch."""

import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

BackendName = Literal["auto", "serial", "torch", "horovod"]

LAUNCHER = "LARGEBATCH_LAUNCHER"
"""The variable in which a local worker finds the process that started it."""

_STARTED = "LARGEBATCH_STARTED"
"""The variable with the time at which the command was started, in seconds since 1970."""

LOST, ABSENT = 3, 4
"""Exit codes of a worker that lost another one, and of one that waited for an absent one."""

TIMEOUT_SECONDS = 300.0
"""How long an operation waits for a worker that is there and silent, unless --timeout is given."""

STARTING = 6
"""How many times as long it waits until the first update: data are read for the first time, models
compiled, thousands of workers connected."""

_SLURM_SCRIPTS = 2**32 - 16
"""From here on SLURM numbers steps that are scripts and shells."""

GRACE_SECONDS = 5.0
"""How long workers have to explain a lost connection, or to leave after a crash."""


def launched_rank() -> int | None:
    """Return this process's rank if something started it as one of many workers, else None."""
    for name in ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return None


def join_slurm() -> None:
    """Set the variables of torchrun where srun started this process as one of several.

    A batch script and the shell of salloc have variables of srun too, and are no workers. Variables
    that are set already stay.
    """
    own, tasks = os.environ.get("SLURM_PROCID"), _slurm_tasks()
    if own is None or tasks < 2 or launched_rank() is not None:
        return
    nodes = _slurm("NNODES", "NUM_NODES") or "1"
    first = "127.0.0.1" if nodes == "1" else _first_host(_slurm("NODELIST") or "")
    number = int(os.environ.get("SLURM_JOB_ID", "0")) + int(os.environ.get("SLURM_STEP_ID", "0"))
    each = _slurm("TASKS_PER_NODE") or str(tasks)  # as in 4(x2),1
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", each)
        for _ in range(int(times or 1))
    ]
    for name, value in {
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": os.environ.get("SLURM_LOCALID", own),
        "LOCAL_WORLD_SIZE": str(counts[int(os.environ.get("SLURM_NODEID", "0"))]),
        "MASTER_ADDR": first,
        "MASTER_PORT": str(15_000 + number % 15_000),
        "RANK": own,
    }.items():
        os.environ.setdefault(name, value)


def _slurm_tasks() -> int:
    """Return how many processes srun started with this one."""
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        return int(os.environ["SLURM_STEP_NUM_TASKS"])
    step = int(os.environ.get("SLURM_STEP_ID", _SLURM_SCRIPTS))
    if step >= _SLURM_SCRIPTS and os.environ.get("SLURM_PROCID") == "0":
        return 1
    return int(os.environ.get("SLURM_NTASKS", "1"))


def _slurm(*names: str) -> str | None:
    """Return what SLURM says of the step, else of the job."""
    kinds = ("SLURM_STEP_", "SLURM_", "SLURM_JOB_")
    found = (os.environ.get(kind + name) for kind in kinds for name in names)
    return next(filter(None, found), None)


def _first_host(hosts: str) -> str:
    """Return the first of SLURM's list of hosts.

    >>> [_first_host(hosts) for hosts in ("gpu[07-09,12],x1", "a-1,b", "rack[1-2]n[3-4]")]
    ['gpu07', 'a-1', 'rack1n3']
    """
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", hosts)[0])


def worker_rank() -> int | None:
    """Return this process's rank if it was started as one of many or has joined them, else None."""
    joined = _joined()
    return launched_rank() if joined is None else joined[0]


def own_rank() -> int:
    """Return this process's rank; one that is alone is worker 0."""
    return worker_rank() or 0


def launched_size() -> int:
    """Return how many workers this process was started as one of; 1 if it was started alone."""
    for name in ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return 1


def world_size() -> int:
    """Return how many workers this process was started as one of or has joined, itself included."""
    joined = _joined()
    return launched_size() if joined is None else joined[1]


def _joined() -> tuple[int, int] | None:
    """Return rank and number of the workers where this process has connected them by itself."""
    dist, hvd = map(sys.modules.get, ("torch.distributed", "horovod.torch"))
    found = None
    if dist is not None and dist.is_available() and dist.is_initialized():
        found = dist.get_rank(), dist.get_world_size()
    elif hvd is not None and hvd.is_initialized():
        found = hvd.rank(), hvd.size()
    return found if found is not None and found[1] > 1 else None


@contextmanager
def noting_start(*, of_process: bool) -> Iterator[None]:
    """Note that a command starts now, or started with this process, for it and its workers.

    A worker that something else started does not know when the command was.
    """
    if LAUNCHER in os.environ or launched_rank() is not None:
        yield
        return
    before = os.environ.get(_STARTED)
    os.environ[_STARTED] = str(time.time() - (_process_seconds() if of_process else 0.0))
    try:
        yield
    finally:
        if before is None:
            del os.environ[_STARTED]
        else:
            os.environ[_STARTED] = before


def command_started() -> float | None:
    """Return when the command was started, in seconds since 1970; None: this is no command."""
    noted = os.environ.get(_STARTED)
    return None if noted is None else float(noted)


def _process_seconds() -> float:
    """Return the seconds since this process was started; 0 where the system does not record it."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:  # macOS has no /proc; in a container it may be hidden
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def let_threads_sleep() -> None:
    """Make waiting OpenMP threads sleep, unless the user chose otherwise.

    By itself GNU's library lets them spin for a while, which is time that other processes of a busy
    machine, or other workers, do not get. Of use before PyTorch is imported, and to what is started
    then.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def loopback() -> str:
    """Return the name of the interface that only this machine reaches."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def use_loopback() -> None:
    """Make libraries whose workers are all on this machine listen to nothing else.

    By itself Gloo takes the address of the host's name. An interface that the user chose stays.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, loopback())


def available_cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux; a container may have fewer than the machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

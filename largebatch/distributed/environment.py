"""The environment of this process: rank, launcher, network and cores, read without PyTorch."""

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeVar

from largebatch.errors import BackendError

BackendName = Literal["auto", "serial", "torch", "horovod"]
_Default = TypeVar("_Default")

LAUNCHER = "LARGEBATCH_LAUNCHER"
"""Environment variable with the process that started a local worker."""

LOST = 3
"""Exit code of a worker that lost another worker."""

TIMEOUT_SECONDS = 300.0
"""Seconds that an operation waits for a silent worker; the default of --timeout."""

STARTING = 6
"""Factor of the timeout until the first update: data are read for the first time, models compiled,
thousands of workers connected."""

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI, srun --mpi=pmi2
)
"""Variables with the rank of a worker and the number of workers; of several launchers around a
process the first with several workers counts, and one without their number last."""

_OF_WORKERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_"),
    *("TORCHELASTIC_", "HOROVOD_", "OMPI_", "PMI", "SLURM_", LAUNCHER),
)
"""Beginnings of the names of variables that launchers give to a worker."""

_SLURM_RANK = "SLURM_PROCID"
_SLURM_SCRIPTS = 2**32 - 16  # smallest SLURM step number of batch scripts and shells

GRACE_SECONDS = 5.0
"""Seconds for workers to report a difference, or to exit after a crash."""


class Launched(NamedTuple):
    """How a launcher started this process as one of several workers."""

    rank: int
    size: int
    """Number of workers; 1 if the launcher does not give it."""

    by: str
    """Name of the variable with the rank."""

    shown: str
    """A variable and its value, for messages."""


def number(name: str, default: _Default) -> int | _Default:
    """Return an environment variable as a whole number, or `default` if it is unset or empty.

    Raises BackendError if it is something else.
    """
    text = os.environ.get(name, "").strip()
    try:
        return int(text) if text else default
    except ValueError:
        raise BackendError(
            f"{name}={text:.40} in the environment: expected a whole number; unset it, or leave it "
            "to the launcher"
        ) from None


def launched() -> Launched | None:
    """Return how this process was started as one of several workers, else None.

    A launcher that started one process only, such as a shell under srun, does not count. Raises
    BackendError if its variables are not numbers or contradict each other.
    """
    for by, total in sorted(_LAUNCHERS, key=lambda names: not os.environ.get(names[1])):
        rank = number(by, None)
        size = number(total, None)
        if rank is None or size == 1:
            continue
        shown = f"{by}={rank}" if size is None else f"{total}={size}"
        if rank < 0 or (size is not None and rank >= size):
            raise BackendError(
                f"{by}={rank} and {total}={size} in the environment: expected a rank from 0 to the "
                "size minus 1; unset both, or leave them to the launcher"
            )
        return Launched(rank, size or 1, by, shown)
    rank = number(_SLURM_RANK, None)
    tasks = slurm_tasks()
    if rank is None or tasks < 2:
        return None
    return Launched(rank, tasks, _SLURM_RANK, f"{tasks} tasks of srun")


def launched_size() -> int:
    """Return the number of workers that the launcher started; 1 for a single process."""
    workers = launched()
    return 1 if workers is None else workers.size


def join_slurm() -> None:
    """Set the variables of torchrun if srun started this process as one of several.

    A batch script and the shell of salloc have srun's variables too, but are not workers. Existing
    variables are not changed, unless they are those of a single process.
    """
    found = launched()
    if found is None or found.by != _SLURM_RANK:
        return
    if number("WORLD_SIZE", None) == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    nodes = int(_slurm("NNODES", "NUM_NODES") or 1)
    first = "127.0.0.1" if nodes == 1 else _first_host(_slurm("NODELIST") or "")
    job = number("SLURM_JOB_ID", 0) + number("SLURM_STEP_ID", 0)
    per_node = _slurm("TASKS_PER_NODE") or str(found.size)  # such as 4(x2),1
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node)
        for _ in range(int(times or 1))
    ]
    for name, value in {
        "WORLD_SIZE": found.size,
        "LOCAL_RANK": number("SLURM_LOCALID", found.rank),
        "LOCAL_WORLD_SIZE": counts[number("SLURM_NODEID", 0)],
        "MASTER_ADDR": first,
        "MASTER_PORT": 15_000 + job % 15_000,
        "RANK": found.rank,
    }.items():
        os.environ[name] = os.environ.get(name) or str(value)


def slurm_tasks() -> int:
    """Return the number of processes of this srun step."""
    tasks = number("SLURM_STEP_NUM_TASKS", None)
    if tasks is not None:
        return tasks
    step = number("SLURM_STEP_ID", _SLURM_SCRIPTS)
    if step >= _SLURM_SCRIPTS and number(_SLURM_RANK, None) == 0:
        return 1
    return number("SLURM_NTASKS", 1)


def _slurm(*names: str) -> str | None:
    """Return the first variable with one of these names that SLURM sets for the step or the job."""
    kinds = ("SLURM_STEP_", "SLURM_", "SLURM_JOB_")
    values = (os.environ.get(kind + name) for kind in kinds for name in names)
    return next(filter(None, values), None)


def _first_host(hosts: str) -> str:
    """Return the first host of SLURM's list.

    >>> [_first_host(hosts) for hosts in ("gpu[07-09,12],x1", "a-1,b", "rack[1-2]n[3-4]")]
    ['gpu07', 'a-1', 'rack1n3']
    """
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", hosts)[0])


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process that is none of a launcher's workers.

    >>> without_launcher({"RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "CC": "gcc"})
    {'CC': 'gcc'}
    """
    return {name: it for name, it in environment.items() if not name.startswith(_OF_WORKERS)}


def worker_rank() -> int | None:
    """Return this process's rank if it is one of several workers, else None."""
    joined = _joined()
    if joined is not None:
        return joined[0]
    workers = launched()
    return None if workers is None else workers.rank


def own_rank() -> int:
    """Return this process's rank, which is 0 for a single process."""
    return worker_rank() or 0


def require_alone(workers: int) -> None:
    """Raise BackendError if this process, which is to start `workers`, is itself one of several."""
    if worker_rank() is not None:
        workers_found = launched()
        how = workers_found.shown if workers_found else "it has connected them"
        raise BackendError(
            f"this process is already one of several workers ({how}); leave --workers {workers} out"
        )


def world_size() -> int:
    """Return the number of workers, connected or started by the launcher."""
    joined = _joined()
    return launched_size() if joined is None else joined[1]


def _joined() -> tuple[int, int] | None:
    """Return the rank and the number of the workers that a library has connected, if several."""
    # A library that nothing has imported has connected nothing, and importing it takes seconds.
    dist = sys.modules.get("torch.distributed")
    hvd = sys.modules.get("horovod.torch")
    rank = 0
    size = 1
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        size = dist.get_world_size()
    elif hvd is not None and hvd.is_initialized():
        rank = hvd.rank()
        size = hvd.size()
    return (rank, size) if size > 1 else None


def configure_libraries() -> None:
    """Make waiting OpenMP threads sleep and hide warnings of C++, unless the user chose otherwise.

    By default GNU's library makes threads spin, which takes time from other workers. This has an
    effect only before PyTorch is imported, and on child processes.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def leave_with(parent: int) -> None:
    """Exit this process soon after its parent process has ended."""

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def loopback() -> str:
    """Return the name of the loopback network interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def use_loopback() -> None:
    """Restrict Gloo and NCCL to the loopback interface, for workers on one machine.

    By default Gloo uses the address of the host's name. An interface chosen by the user is kept.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, loopback())


def available_cores() -> int:
    """Return the number of processor cores available to this process."""
    if hasattr(os, "sched_getaffinity"):  # Linux; a container may have fewer than the machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

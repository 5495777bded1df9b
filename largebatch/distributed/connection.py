"""Connect the workers of a run with the communication library chosen at run time."""

import os
import sys

import torch
import torch.distributed as dist

from largebatch import accelerator
from largebatch.distributed.backend import Backend
from largebatch.distributed.environment import (
    LAUNCHER,
    TIMEOUT_SECONDS,
    BackendName,
    join_slurm,
    launched,
    leave_with,
)
from largebatch.distributed.serial import Serial
from largebatch.errors import BackendError


def connect(
    name: BackendName,
    *,
    timeout: float = TIMEOUT_SECONDS,
    starting: bool = False,
    splits: bool = True,
) -> Backend:
    """Connect to the other workers. `auto` is torch under torchrun or --workers, else horovod.

    A process group of torch.distributed, or Horovod, that this process has already initialised is
    used as it is and stays open. Otherwise an operation fails that waits for another worker longer
    than `timeout` seconds (with `starting`, STARTING times as long until `started` is called), and
    a worker exits soon after its parent process has ended. `splits` allows groups of workers.

    Raises BackendError or MissingPackageError; the message says how to start the workers.

    >>> backend = connect("auto")
    >>> backend.name, backend.rank, backend.world_size
    ('serial', 0, 1)
    """
    join_slurm()
    running = _running(accelerator.current())
    if running is not None and name in {"auto", running.name}:
        return running
    found = launched()
    if found is not None and LAUNCHER not in os.environ:
        leave_with(os.getppid())
    if name == "auto":
        name = "serial" if found is None else "torch" if found.by == "RANK" else "horovod"
    match name:
        case "torch":
            from largebatch.distributed.torch_distributed import TorchDistributed

            return TorchDistributed(timeout, starting=starting)
        case "horovod":
            from largebatch.distributed.horovod import open_horovod

            return open_horovod(timeout, starting=starting, splits=splits)
        case _:
            if found is not None:
                raise BackendError(
                    "--backend serial is for a single process, but this one was started as one of "
                    f"several workers ({found.shown}); remove --backend"
                )
            return Serial()


def _running(device: torch.device) -> Backend | None:
    if dist.is_available() and dist.is_initialized():
        from largebatch.distributed.torch_distributed import RunningTorch

        return RunningTorch(device)
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized():
        from largebatch.distributed.horovod import Horovod

        return Horovod(hvd, device)
    return None


def running_backend(device: torch.device) -> Backend:
    """Return a backend over the workers that are already connected, for tensors on `device`.

    This is the default process group of torch.distributed if it is initialised, else Horovod if it
    is, else this process alone. `close` does not close them.

    Raises BackendError if a launcher started several workers and neither library is initialised:
    each worker would mistake its own share of the data for all of it.

    >>> running_backend(torch.device("cpu")).world_size
    1
    """
    running = _running(device)
    if running is not None:
        return running
    found = launched()
    if found is not None and found.size > 1:
        raise BackendError(
            f"worker {found.rank} of {found.size} ({found.shown}) has initialised neither "
            "torch.distributed nor Horovod; call init_process_group or hvd.init first, or pass "
            "backend=Serial() to use only this worker's batches"
        )
    return Serial(device)


def broadcast_bytes(content: bytes | None, backend: Backend) -> bytes:
    """Return worker 0's `content` on every worker; the other workers pass None."""
    size = torch.tensor([len(content or b"")], device=backend.device)
    backend.broadcast(size)
    length = int(size.item())  # sync: once, before training
    sent = bytearray(content or length)
    if not length:
        return b""
    buffer = torch.frombuffer(sent, dtype=torch.uint8).to(backend.device)
    backend.broadcast(buffer)
    if content is not None:
        return content
    return buffer.cpu().numpy().tobytes()  # sync: once, before training

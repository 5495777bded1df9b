"""Join the workers of a run: which communication library connects them is chosen at run time."""

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
    launched_rank,
    launched_size,
)
from largebatch.distributed.horovod import RunningHorovod, open_horovod
from largebatch.distributed.serial import Serial
from largebatch.distributed.torch_distributed import RunningTorch, TorchDistributed
from largebatch.distributed.watch import leave_with
from largebatch.errors import BackendError


def connect(
    name: BackendName,
    *,
    timeout: float = TIMEOUT_SECONDS,
    starting: bool = False,
    splits: bool = True,
) -> Backend:
    """Join the workers. `auto` is torch under torchrun or --workers, horovod under horovodrun.

    A process group of torch.distributed, or Horovod, that this process has initialised is used as
    it is and stays open. Else a worker that waits for another one for `timeout` s ends, and so it
    does soon after what started it. `starting`: STARTING times as long until `started` is called.
    `splits`: the workers may be divided into groups.

    Raises BackendError or MissingPackageError saying how to start what was asked for.
    """
    join_slurm()
    adopted = _adopted(name)
    if adopted is not None:
        return adopted
    if name == "auto":
        if "RANK" in os.environ:
            name = "torch"
        else:
            name = "serial" if launched_rank() is None else "horovod"
    if launched_rank() is not None and LAUNCHER not in os.environ:
        leave_with(os.getppid())
    match name:
        case "torch":
            return TorchDistributed(timeout, starting=starting)
        case "horovod":
            return open_horovod(timeout, starting=starting, splits=splits)
        case _:
            if launched_rank() is not None:
                raise BackendError(
                    "--backend serial is for a single process, and this one was started as one of "
                    "several workers; leave --backend out"
                )
            return Serial()


def _adopted(name: BackendName) -> Backend | None:
    """Return the workers that this process has connected by itself, on the device it has chosen."""
    running = _running(accelerator.current())
    return running if running is not None and name in {"auto", running.name} else None


def _running(device: torch.device) -> Backend | None:
    if dist.is_available() and dist.is_initialized():
        return RunningTorch(device)
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized():
        return RunningHorovod(hvd, device)
    return None


def running_backend(device: torch.device) -> Backend:
    """Return the workers that are connected already, for tensors on `device`; nothing is opened.

    That is the default process group of torch.distributed if it is initialised, else Horovod if it
    is, else this process alone. `close` leaves all of them as they are.

    Raises BackendError where a launcher started several workers and neither is initialised: each
    would take its own share of the data for all of it.
    """
    running = _running(device)
    if running is not None:
        return running
    if launched_size() > 1:
        raise BackendError(
            f"this process was started as worker {launched_rank()} of {launched_size()}, and "
            "neither torch.distributed nor Horovod is initialised; call init_process_group or "
            "hvd.init first, or pass backend=Serial() for this worker's batches alone"
        )
    return Serial(device)


def broadcast_bytes(content: bytes | None, backend: Backend) -> bytes:
    """Return worker 0's `content` on every worker; the others pass None."""
    size = torch.tensor([len(content or b"")], device=backend.device)
    backend.broadcast(size)
    length = int(size.item())  # sync: once, before training
    buffer = torch.zeros(length, dtype=torch.uint8)
    if content is not None:
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    buffer = buffer.to(backend.device)
    if length:
        backend.broadcast(buffer)
    return buffer.cpu().numpy().tobytes()  # sync: once, before training

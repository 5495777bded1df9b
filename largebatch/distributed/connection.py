"""Join the workers of a run: which communication library connects them is chosen at run time."""

import os
from typing import Literal

import torch

from largebatch.distributed.backend import Backend
from largebatch.distributed.environment import launched_rank
from largebatch.distributed.horovod import open_horovod
from largebatch.distributed.serial import Serial
from largebatch.distributed.torch_distributed import TorchDistributed
from largebatch.errors import BackendError

Name = Literal["auto", "serial", "torch", "horovod"]


def connect(name: Name) -> Backend:
    """Join the workers. `auto` is torch under torchrun or --workers, horovod under horovodrun.

    Raises BackendError or MissingPackageError saying how to start what was asked for.
    """
    if name == "auto":
        if "RANK" in os.environ:
            name = "torch"
        else:
            name = "serial" if launched_rank() is None else "horovod"
    match name:
        case "torch":
            return TorchDistributed()
        case "horovod":
            return open_horovod()
        case _:
            if launched_rank() is not None:
                raise BackendError(
                    "--backend serial is for a single process, and this one was started as one of "
                    "several workers; leave --backend out"
                )
            return Serial()


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

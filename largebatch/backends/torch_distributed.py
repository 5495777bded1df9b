"""torch.distributed: NCCL where there are GPUs, Gloo elsewhere.

The workers are already there, started by `--workers`, torchrun or a scheduler, and described by
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

import os
import re
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from largebatch.backends.devices import pick_device
from largebatch.errors import BackendError, PeerLostError

TIMEOUT = timedelta(minutes=30)
"""How long an operation waits for a worker that is alive and silent."""

_CONNECTION = re.compile("connection|closed|reset|timed? ?out|broken pipe|socket", re.IGNORECASE)
"""How Gloo words the loss of a peer, which it reports as a plain RuntimeError."""

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class _Pending:
    """An operation under way."""

    def __init__(self, work: dist.Work, rank: int) -> None:
        self._work = work
        self._rank = rank

    def wait(self) -> None:
        """Block until the result is there."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerLostError(_lost(self._rank, error)) from error


class TorchDistributed:
    """A Backend over the default process group of torch.distributed, which it opens and closes."""

    name = "torch"

    def __init__(self) -> None:
        missing = [name for name in _NEEDED if name not in os.environ]
        if missing:
            raise BackendError(
                f"the torch backend needs {', '.join(missing)} in the environment; start the "
                "workers with --workers N or with torchrun"
            )
        self.local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        self.device = pick_device(self.local_rank, self.local_size)
        kind = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(kind, timeout=TIMEOUT)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def all_reduce(self, tensor: Tensor) -> _Pending:
        """Start to sum `tensor` over all workers, in place."""
        try:
            work = dist.all_reduce(tensor, async_op=True)
        except RuntimeError as error:
            raise PeerLostError(_lost(self.rank, error)) from error
        assert work is not None
        return _Pending(work, self.rank)

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor` by worker 0's, in place."""
        try:
            dist.broadcast(tensor, src=0)
        except RuntimeError as error:
            raise PeerLostError(_lost(self.rank, error)) from error

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return world_size x tensor.shape."""
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        try:
            dist.all_gather(gathered, tensor.contiguous())
        except RuntimeError as error:
            raise PeerLostError(_lost(self.rank, error)) from error
        return torch.stack(gathered)

    def barrier(self) -> None:
        """Wait for every worker."""
        self.all_reduce(torch.zeros(1, device=self.device)).wait()

    def close(self) -> None:
        """Destroy the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _lost(rank: int, error: RuntimeError) -> str:
    """Say that a peer is gone; raise the error again if it says something else."""
    if not isinstance(error, dist.DistError) and not _CONNECTION.search(str(error)):
        raise error
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"worker {rank} lost contact with another worker ({reason})"

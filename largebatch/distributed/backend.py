"""The interface of a communication library, and functions shared by its implementations.

Implementations do not inherit from these protocols; mypy checks them where objects are passed.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from largebatch import accelerator
from largebatch.errors import BackendError
from largebatch.formatting import plural


class Work(Protocol):
    """A collective operation in progress."""

    def wait(self) -> None:
        """Block until the tensors hold the result; raise PeerLostError if a worker is lost."""


class Group(Protocol):
    """A group of workers. Every call must be made by all of its workers."""

    @property
    def rank(self) -> int:
        """Number of this worker in the group, 0 .. world_size - 1."""

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """Start to replace `tensor`, in place, with its elementwise sum over the group."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return world_size x tensor.shape: every worker's tensor (all of one shape), by rank."""


class Backend(Group, Protocol):
    """The group of all workers, with the operations that only this group has."""

    @property
    def name(self) -> str:
        """Name of the library on the command line: serial, torch or horovod."""

    @property
    def local_rank(self) -> int:
        """Number of this worker on its machine."""

    @property
    def local_size(self) -> int:
        """Number of workers on this machine."""

    @property
    def device(self) -> torch.device:
        """Device of this worker's tensors."""

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor`, in place, with worker 0's."""

    def split(self, parts: Sequence[Sequence[int]]) -> Group:
        """Divide the workers into groups, given by their ranks, and return this worker's group.

        Every worker is in exactly one part, in rising order. A group must be used by one thread
        only.
        """

    def started(self) -> None:
        """Mark the end of the first update: from here on, wait for at most --timeout."""

    def barrier(self) -> None:
        """Wait until every worker has called this."""

    def close(self) -> None:
        """Leave the group. Safe to call twice."""


def in_graphs(group: Group) -> bool:
    """Return True if the sums of a group can be recorded in a graph: NCCL's, and those of one."""
    return getattr(group, "in_graphs", False)


def sum_over_workers(tensor: Tensor, backend: Backend) -> None:
    """Replace `tensor`, in place and on any device, with its elementwise sum over all workers."""
    sent = tensor.to(backend.device)
    backend.all_reduce(sent).wait()
    if sent is not tensor:
        tensor.copy_(sent)


def own_part(parts: Sequence[Sequence[int]], *, rank: int, world_size: int) -> list[int]:
    """Return the part that contains `rank`; raise ValueError if the parts are not a partition.

    Both libraries number the workers of a group in rising order.

    >>> own_part([[0, 2], [1, 3]], rank=3, world_size=4)
    [1, 3]
    """
    if sorted(member for part in parts for member in part) != list(range(world_size)):
        raise ValueError(
            f"every worker, 0 to {world_size - 1}, must be in exactly one part, got {parts}"
        )
    if any(list(part) != sorted(part) for part in parts):
        raise ValueError(f"the ranks in a part must rise, got {parts}")
    return next(list(part) for part in parts if rank in part)


def remedy() -> str:
    """Return what to do about too few accelerators, as part of a message."""
    hide = accelerator.visible_devices_variable()
    return f"start as many workers as GPUs, or set {hide}= to compute on the CPU"


def pick_device(local_rank: int, local_size: int, *, compared: bool = False) -> torch.device:
    """Return this worker's GPU, or the CPU if there is none, and make it the current device.

    With `compared`, the workers check later that no two of them use the same GPU. Then a worker
    that sees one GPU uses it: SLURM shows each task only its own GPU, as number 0.

    Raises BackendError if a machine has GPUs, but fewer than workers.
    """
    number = accelerator.count()
    if number == 0:
        return accelerator.CPU
    if compared and number == 1:
        local_rank = 0
        local_size = 1
    if local_size > number:
        raise BackendError(
            f"{plural(local_size, 'worker')} on a machine with {number} GPU; {remedy()}"
        )
    return accelerator.choose(local_rank)

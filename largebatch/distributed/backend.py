"""What training asks of a communication library, and what every implementation of it shares.

Implementations do not inherit from these classes; mypy compares the shapes where the objects are
put together.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from largebatch import accelerator
from largebatch.distributed.watch import Rescue
from largebatch.errors import BackendError


class Work(Protocol):
    """A collective operation under way."""

    def wait(self) -> None:
        """Block until the tensors handed in hold the result; raise PeerLostError if they cannot."""


class Group(Protocol):
    """Some workers that compute together. Every call is made by all of its workers alike."""

    @property
    def rank(self) -> int:
        """This worker, 0 .. world_size - 1."""

    @property
    def world_size(self) -> int:
        """How many workers the group has."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """Start to replace `tensor`, in place, by its elementwise sum over the group."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return world_size x tensor.shape: every worker's tensor (all of one shape), by rank."""


class Backend(Group, Protocol):
    """What training asks of a communication library: the group of all workers, and more."""

    @property
    def name(self) -> str:
        """The word for it on the command line: serial, torch or horovod."""

    @property
    def local_rank(self) -> int:
        """This worker among those on the same machine."""

    @property
    def local_size(self) -> int:
        """How many workers are on this machine."""

    @property
    def device(self) -> torch.device:
        """Where this worker's tensors live."""

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor`, in place, by worker 0's."""

    def split(self, parts: Sequence[Sequence[int]]) -> Group:
        """Divide the workers into groups, given by their ranks, and return this worker's.

        Every worker is in exactly one part, in rising order; a worker's rank in its group is its
        place there. A group belongs to the thread that uses it; another thread asks for its own.
        """

    def busy(self) -> AbstractContextManager[None]:
        """Let the others wait in this block for what this worker does, longer than --timeout."""

    def started(self) -> None:
        """Note that the first update is made: from here on, wait for no longer than --timeout."""

    def before_leaving(self, rescue: Rescue | None) -> None:
        """Call this before the process ends itself because another worker is lost or silent."""

    def barrier(self) -> None:
        """Wait until every worker is here."""

    def close(self) -> None:
        """Leave the group. Safe to call twice."""


def sum_over_workers(tensor: Tensor, backend: Backend) -> None:
    """Replace `tensor`, in place and wherever it lives, by its elementwise sum over all workers."""
    sent = tensor.to(backend.device)
    backend.all_reduce(sent).wait()
    if sent is not tensor:
        tensor.copy_(sent)


def own_part(parts: Sequence[Sequence[int]], *, rank: int, world_size: int) -> list[int]:
    """Return the part that holds `rank`; raise ValueError if the parts are no division of all.

    Both libraries number the workers of a group in rising order whatever is asked for, so that is
    the only order that is taken.

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


def on_cpu() -> str:
    """Return how to compute without accelerators, for messages."""
    return f"set {accelerator.visible_devices_variable()}= to compute on the CPU"


def remedy() -> str:
    """Return what to do about too few accelerators, for messages."""
    return f"start as many workers as GPUs, or {on_cpu()}"


def pick_device(local_rank: int, local_size: int, *, compared: bool = False) -> torch.device:
    """Return this worker's own GPU, or the CPU where there is none, and make it the current one.

    `compared`: the workers will find out whether two of them took one GPU. Then the only one that a
    worker sees is taken to be its own: SLURM shows to each task the GPU it gave it, as number 0.

    Raises BackendError where a machine has GPUs, but fewer than workers.
    """
    number = accelerator.count()
    if number == 0:
        return accelerator.CPU
    if compared and number == 1:
        local_rank, local_size = 0, 1
    if local_size > number:
        raise BackendError(f"{local_size} workers on a machine with {number} GPU; {remedy()}")
    return accelerator.choose(local_rank)


def identify(device: torch.device) -> str | None:
    """Return what tells this device from all others of all machines; None: nothing does."""
    unit = accelerator.uuid(device)
    return None if unit is None else f"GPU {unit}"

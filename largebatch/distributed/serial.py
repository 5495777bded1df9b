"""One worker: every collective operation is the identity."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from largebatch.distributed.backend import own_part, pick_device


class Done:
    """A completed operation."""

    def wait(self) -> None:
        """Return immediately."""


class Serial:
    """A Backend with one worker and no communication library."""

    name = "serial"
    rank = 0
    world_size = 1
    local_rank = 0
    local_size = 1
    in_graphs = True

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or pick_device(local_rank=0, local_size=1)

    def all_reduce(self, tensor: Tensor) -> Done:  # noqa: ARG002 -- a sum over one worker
        """Leave `tensor` as it is."""
        return Done()

    def broadcast(self, tensor: Tensor) -> None:
        """Leave `tensor` as it is."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return 1 x tensor.shape."""
        return tensor.unsqueeze(0)

    def split(self, parts: Sequence[Sequence[int]]) -> Self:
        """Return this backend, as the group of the only worker."""
        own_part(parts, rank=self.rank, world_size=self.world_size)
        return self

    def barrier(self) -> None:
        """Return immediately."""

    def started(self) -> None:
        """Do nothing: no other worker is waited for."""

    def close(self) -> None:
        """Do nothing: there is no connection."""

"""Groups of workers that are threads of this process, to test what a group exchanges."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Done:
    """An operation that is over."""

    def wait(self) -> None:
        """Return at once."""


class Thread:
    """One worker of a Group (distributed/backend.py), with a place in a table that all see."""

    def __init__(self, rank: int, table: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = len(table)
        self._table = table
        self._barrier = barrier
        self.calls = 0
        self.device = torch.device("cpu")

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Write down one's own, wait for the others, read everybody's."""
        self.calls += 1
        self._table[self.rank] = tensor
        self._barrier.wait()
        gathered = torch.stack(self._table)
        self._barrier.wait()
        return gathered

    def all_reduce(self, tensor: Tensor) -> Done:
        """Add everybody's up."""
        tensor.copy_(self.all_gather(tensor.clone()).sum(0))
        return Done()

    def split(self, parts: Sequence[Sequence[int]]) -> Self:
        """Return the group of all workers, the only one there is."""
        assert [list(part) for part in parts] == [list(range(self.world_size))]
        return self


def on_threads(work: Callable[[Thread], T], *, workers: int) -> list[T]:
    """Run the work on `workers` threads and return the results."""
    table = [torch.empty(0)] * workers
    barrier = threading.Barrier(workers, timeout=600)
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, [Thread(rank, table, barrier) for rank in range(workers)]))

"""Groups of workers that are threads of this process, to test what a group exchanges."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from largebatch.distributed.backend import own_part

T = TypeVar("T")


class Done:
    """An operation that is over."""

    def wait(self) -> None:
        """Return at once."""


class Exchange:
    """What the workers of a group share: a table, and the groups of its parts by first worker."""

    def __init__(self, workers: int) -> None:
        self.table = [torch.empty(0)] * workers
        self.barrier = threading.Barrier(workers, timeout=600)
        self.lock = threading.Lock()
        self.parts: dict[int, Exchange] = {}


class Thread:
    """One worker of a Group (distributed/backend.py), with a place in a table that all see."""

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank = rank
        self.world_size = len(exchange.table)
        self._table = exchange.table
        self._barrier = exchange.barrier
        self._lock = exchange.lock
        self._parts = exchange.parts
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

    def barrier(self) -> None:
        """Wait for the other workers."""
        self._barrier.wait()

    def split(self, parts: Sequence[Sequence[int]]) -> "Thread":
        """Return the group of this worker's part."""
        own = own_part(parts, rank=self.rank, world_size=self.world_size)
        if len(own) == self.world_size:
            return self
        with self._lock:
            if own[0] not in self._parts:
                self._parts[own[0]] = Exchange(len(own))
        return Thread(own.index(self.rank), self._parts[own[0]])


def on_threads(work: Callable[[Thread], T], *, workers: int) -> list[T]:
    """Run the work on `workers` threads and return the results."""
    exchange = Exchange(workers)
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, [Thread(rank, exchange) for rank in range(workers)]))

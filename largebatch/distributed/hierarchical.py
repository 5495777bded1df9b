"""Sums in two levels: inside each machine, then across machines, each worker a part.

Workers of a machine share out a tensor: each sums one part of it over its machine, then over the
workers with its number on the other machines, and at the end all parts are gathered in the machine.
The slow network carries 1 / (workers a machine) of what a flat sum makes each worker send.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from largebatch.distributed.backend import Backend, Work
from largebatch.errors import BackendError


@dataclass(frozen=True, slots=True)
class _Running:
    """A sum that a thread, a CUDA stream or both are busy with."""

    done: Future[None]
    stream: torch.cuda.Stream | None

    def wait(self) -> None:
        """Block until the result is there; raise what went wrong."""
        self.done.result()
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


class Hierarchical:
    """Sums over all workers of a backend in two levels, while the caller goes on.

    Every worker has to run the collectives of a sum in the same order. Those of NCCL are only
    queued here, in a stream of their own, in the order in which sums are asked for; several
    communicators used from several threads could wait for each other. All others block, so each
    sum has a thread, which waits for the one before.
    """

    def __init__(self, backend: Backend, *, node_size: int) -> None:
        workers = range(backend.world_size)
        self.world_size = backend.world_size
        self._node = backend.split([workers[i : i + node_size] for i in workers[::node_size]])
        self._across = backend.split([workers[i::node_size] for i in range(node_size)])
        on_gpu = backend.device.type == "cuda"
        self._stream = torch.cuda.Stream(backend.device) if on_gpu else None
        self._queued = on_gpu and backend.name == "torch"
        self._last: Future[None] | None = None

    def all_reduce(self, tensor: Tensor) -> Work:
        """Start to sum `tensor` over all workers, in place; it must be contiguous."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        done, before = Future[None](), self._last
        self._last = done

        def run() -> None:
            _fulfil(done, lambda: self._sum(tensor), after=before)

        if self._queued:
            run()
        else:  # a daemon, because a lost peer may leave it waiting for ever
            threading.Thread(target=run, daemon=True).start()
        return _Running(done, self._stream)

    def _sum(self, tensor: Tensor) -> None:
        flat, size = tensor.detach().view(-1), self._node.world_size
        with self._in_stream():
            whole = F.pad(flat, (0, -flat.numel() % size)).view(size, -1)
            part = self._node.reduce_scatter(whole)
            self._across.all_reduce(part).wait()
            flat.copy_(self._node.all_gather(part).view(-1)[: flat.numel()])

    @contextmanager
    def _in_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield


def in_two_levels(backend: Backend) -> Backend | Hierarchical:
    """Return what sums hierarchically: the backend itself where there is only one level.

    Raises BackendError if the machines have different numbers of workers.
    """
    node_size = _node_size(backend)
    if node_size in {1, backend.world_size}:
        return backend
    return Hierarchical(backend, node_size=node_size)


def _node_size(backend: Backend) -> int:
    """Return how many workers each machine has."""
    own = torch.tensor([backend.local_rank, backend.local_size], device=backend.device)
    places = backend.all_gather(own).tolist()  # sync: once, before training
    size: int = places[0][1]
    for worker, (local_rank, local_size) in enumerate(places):
        if (local_rank, local_size) != (worker % size, size) or len(places) % size:
            raise BackendError(
                "reduction.hierarchical needs the same number of workers on every machine, "
                f"numbered machine after machine; worker 0's machine has {size} of "
                f"{len(places)}, and worker {worker} is number {local_rank} of {local_size} on "
                "its own; start them so, or set reduction.hierarchical=false"
            )
    return size


def _fulfil(done: Future[None], action: Callable[[], None], *, after: Future[None] | None) -> None:
    """Do it when the one before is done, unless that failed: then this one fails alike."""
    try:
        if after is not None:
            after.result()
        action()
    except BaseException as error:  # `wait` raises it, in the thread that asked
        done.set_exception(error)
    else:
        done.set_result(None)

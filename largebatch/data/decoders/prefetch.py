"""Batches that threads fill in ahead of their use, part by part.

A GPU receives bytes, a quarter of the floats' size, and normalises them itself.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from largebatch.data.transfer import Transfer
from largebatch.data.types import Batch, Batches, Bytes, Floats, IntArray, Resources, View

Order = TypeVar("Order")  # description of a batch: a request, alone or with the bytes read for it


AHEAD = 2  # number of batches filled in while one is used


class Part(NamedTuple):
    """Rows of a batch that one thread fills in."""

    rows: slice
    fill: Callable[[Bytes | Floats], None]
    """Writes the rows' pixels, n x H x W x 3, values 0 .. 255 of either type."""


def in_parts(number: int, *, threads: int, most: int) -> Iterator[slice]:
    """Divide rows for the threads: at most `most` per part, fewer if threads would be idle.

    >>> [rows.stop - rows.start for rows in in_parts(20, threads=2, most=8)]
    [8, 8, 4]
    >>> [rows.stop - rows.start for rows in in_parts(20, threads=6, most=8)]
    [4, 4, 4, 4, 4]
    """
    each = min(most, -(-number // threads)) or 1
    return (slice(first, min(first + each, number)) for first in range(0, number, each))


class _Scale(NamedTuple):
    """Mean and standard deviation for bytes, 3 x 1 x 1."""

    center: Tensor
    spread: Tensor


class _Pending(NamedTuple):
    jobs: list[Future[None]]
    images: Tensor
    """N x 3 x H x W. On a CPU float32, normalised; otherwise uint8, channels last, because the copy
    takes a quarter of the time."""

    labels: IntArray


class Prefetcher:
    """Threads that fill in batches ahead of their use; `open_prefetcher` starts them."""

    def __init__(self, view: View, resources: Resources) -> None:
        self.pool = ThreadPoolExecutor(resources.threads, thread_name_prefix="decode")
        self._view = view
        self._transfer = Transfer(resources.device)
        scale = (torch.tensor(values).mul_(255).view(3, 1, 1) for values in (view.mean, view.std))
        self._scale = _Scale(*scale)
        self._scale_there = _Scale(*self._transfer.send(*self._scale))

    def batches(
        self,
        orders: Iterable[Order],
        divide: Callable[[Order], tuple[IntArray, Sequence[Part]]],
    ) -> Batches:
        """Yield batches, with AHEAD more in progress; `divide` returns the labels and the parts."""
        started: deque[_Pending] = deque()
        try:
            for order in orders:
                started.append(self._start(*divide(order)))
                if len(started) > AHEAD:
                    yield self._finish(started.popleft())
            while started:
                yield self._finish(started.popleft())
        finally:
            for job in (job for pending in started for job in pending.jobs):
                job.cancel()

    def _start(self, labels: IntArray, parts: Sequence[Part]) -> _Pending:
        pending = _Pending([], self._room(len(labels)), labels)
        jobs = (self.pool.submit(_make, part, pending, self._scale) for part in parts)
        pending.jobs.extend(jobs)
        return pending

    def _room(self, number: int) -> Tensor:
        size = self._view.image_size
        if self._transfer.is_remote:
            return self._transfer.room(number, size, size, 3).permute(0, 3, 1, 2)
        order = torch.channels_last if self._view.channels_last else torch.contiguous_format
        return torch.empty((number, 3, size, size), memory_format=order)

    def _finish(self, batch: _Pending) -> Batch:
        """Wait for a batch; on a GPU, queue its copy and normalisation without waiting for them."""
        for job in batch.jobs:
            job.result()
        images, labels = self._transfer.send(batch.images, torch.from_numpy(batch.labels))
        if images.dtype == torch.uint8:
            images = images.sub(self._scale_there.center).div_(self._scale_there.spread)
            images = images if self._view.channels_last else images.contiguous()
        return Batch(images, labels)


@contextmanager
def open_prefetcher(view: View, resources: Resources) -> Iterator[Prefetcher]:
    """Yield a prefetcher whose threads end with the block."""
    prefetcher = Prefetcher(view, resources)
    with prefetcher.pool:
        yield prefetcher


def _make(part: Part, pending: _Pending, scale: _Scale) -> None:
    """Fill in rows, with NumPy, whose operations start no threads."""
    images = pending.images.numpy()[part.rows]
    part.fill(images.transpose(0, 2, 3, 1))
    if images.dtype == np.float32:
        images -= scale.center.numpy()
        images /= scale.spread.numpy()

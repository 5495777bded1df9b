"""Batches that threads fill in ahead of their use, part by part, and their copies to the device.

A GPU receives bytes, a quarter of the floats' size, and normalises them itself. They are copied
from pinned memory on a separate stream, where the copies overlap with computation.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from largebatch import accelerator
from largebatch.data.types import Batch, Bytes, Floats, IntArray, Resources, View

Order = TypeVar("Order")  # description of a batch: a request, alone or with the bytes read for it

AHEAD = 2  # number of batches filled in while one is used


class Transfer:
    """Copies tensors to one device; on a CPU it returns them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = accelerator.stream(device)

    @property
    def is_remote(self) -> bool:
        """True if the device has its own memory."""
        return accelerator.is_remote(self.device)

    def room(self, *shape: int) -> Tensor:
        """Return an empty uint8 tensor whose copy does not block the host (pinned memory)."""
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._stream is not None)

    def send(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors on the device, for use in its current stream."""
        if self._stream is None:
            return [tensor.to(self.device) for tensor in tensors]
        current = torch.accelerator.current_stream(self.device)
        # On a stream of its own a copy overlaps with the kernels of the update.
        with accelerator.on(self._stream):
            pinned = (tensor.pin_memory() for tensor in tensors)  # no copy if already pinned
            sent = [tensor.to(self.device, non_blocking=True) for tensor in pinned]
        # The current stream waits on the device; the host does not.
        current.wait_stream(self._stream)
        for tensor in sent:
            tensor.record_stream(current)  # else its memory could be reused too early
        return sent


def ahead(items: Iterable[Order]) -> Generator[Order, None, None]:
    """Yield the items, with AHEAD more of them computed by a thread, which ends with the last."""
    # One thread: items are drawn from one iterator, in order.
    source = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        started = deque(pool.submit(next, source, None) for _ in range(AHEAD))
        try:
            while (item := started.popleft().result()) is not None:
                started.append(pool.submit(next, source, None))
                yield item
        finally:
            for pending in started:  # else they would be computed for nobody
                pending.cancel()


class FillTask(NamedTuple):
    """Rows of a batch that one thread fills in."""

    rows: slice
    fill: Callable[[Bytes | Floats], None]
    """Writes the rows' pixels, n x H x W x 3, values 0 .. 255 of either type."""


def in_parts(number: int, *, threads: int, most: int) -> Iterator[slice]:
    """Divide rows for the threads: at most `most` per part, fewer if threads would be idle."""
    # A part of one image has the overhead of a task; all images in one part leave threads idle.
    rows_in_part = min(most, -(-number // threads)) or 1
    return (
        slice(first, min(first + rows_in_part, number)) for first in range(0, number, rows_in_part)
    )


Divide = Callable[[Order], tuple[IntArray, Sequence[FillTask]]]
"""Returns the labels of a batch, and its parts."""

FillAhead = Callable[[Iterable[Order], Divide[Order]], Generator[tuple[Order, Batch], None, None]]
"""Yields each order with its batch, with AHEAD more in progress."""


class _BatchInProgress(NamedTuple):
    jobs: list[Future[None]]
    images: Tensor
    """N x 3 x H x W. On a CPU float32, normalised, unless the view is of bytes; otherwise uint8,
    channels last, because the copy takes a quarter of the time."""

    labels: IntArray


@contextmanager
def open_prefetcher(view: View, resources: Resources) -> Iterator[FillAhead[Any]]:
    """Yield a function that fills in batches with threads, which end with the block."""
    size = view.image_size
    transfer = Transfer(resources.device)
    scale = view.pixel_scale()
    (scale_there,) = transfer.send(scale)

    def start(labels: IntArray, parts: Sequence[FillTask]) -> _BatchInProgress:
        if transfer.is_remote or view.dtype == torch.uint8:
            # Filled as N x H x W x 3, which is how decoders write; permuted, it is N x 3 x H x W
            # in the channels-last order.
            images = transfer.room(len(labels), size, size, 3).permute(0, 3, 1, 2)
        else:
            order = torch.channels_last if view.channels_last else torch.contiguous_format
            images = torch.empty((len(labels), 3, size, size), memory_format=order)
        return _BatchInProgress(
            [pool.submit(_make, part, images, scale) for part in parts], images, labels
        )

    def finish(batch: _BatchInProgress) -> Batch:
        """Wait for a batch; on a GPU, queue its copy and normalisation without waiting for them."""
        for job in batch.jobs:
            job.result()
        images, labels = transfer.send(batch.images, torch.from_numpy(batch.labels))
        if images.dtype != view.dtype and images.dtype == torch.uint8:
            center, spread = scale_there
            images = images.sub(center).div_(spread)
            images = images if view.channels_last else images.contiguous()
        return Batch(images.to(view.dtype), labels)

    def batches(
        orders: Iterable[Order], divide: Divide[Order]
    ) -> Generator[tuple[Order, Batch], None, None]:
        started: deque[tuple[Order, _BatchInProgress]] = deque()
        try:
            for order in orders:
                started.append((order, start(*divide(order))))
                if len(started) > AHEAD:
                    oldest, pending = started.popleft()
                    yield oldest, finish(pending)
            while started:
                oldest, pending = started.popleft()
                yield oldest, finish(pending)
        finally:
            # The consumer has stopped early: what is queued would decode for nobody.
            for _, pending in started:
                for job in pending.jobs:
                    job.cancel()

    with ThreadPoolExecutor(resources.threads, thread_name_prefix="decode") as pool:
        yield batches


def _make(part: FillTask, batch: Tensor, scale: Tensor) -> None:
    """Fill in rows, with NumPy, whose operations start no threads."""
    images = batch.numpy()[part.rows]
    part.fill(images.transpose(0, 2, 3, 1))
    if images.dtype == np.float32:
        center, spread = scale
        images -= center.numpy()
        images /= spread.numpy()

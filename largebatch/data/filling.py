"""Batches of bytes that threads fill in ahead of their use, made into normalised numbers.

On a processor the same threads do that, part by part; a GPU is sent the bytes, a quarter as much.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from largebatch.contracts import Batch, Batches, Bytes, IntArray, View

Order = TypeVar("Order")
"""What says what a batch is to be: a request, alone or with bytes that were read for it."""


AHEAD = 2
"""How many batches are being filled in while one is used."""


class Part(NamedTuple):
    """Some rows of a batch, which one thread makes."""

    rows: slice
    fill: Callable[[Bytes], None]
    """Writes their pixels, n x H x W x 3."""


class _Scale(NamedTuple):
    """What bytes are subtracted and divided by, 3 x 1 x 1."""

    center: Tensor
    spread: Tensor


class _Filling(NamedTuple):
    """A batch that is being filled in."""

    jobs: list[Future[None]]
    pixels: Tensor
    """uint8, N x H x W x 3, where a copy to the device is quick."""

    images: Tensor | None
    """float32, N x 3 x H x W, normalised; None: made by the GPU."""

    labels: IntArray


def fill_ahead(
    orders: Iterable[Order],
    divide: Callable[[Order], tuple[IntArray, Sequence[Part]]],
    *,
    view: View,
    device: torch.device,
    threads: int,
) -> Batches:
    """Keep AHEAD batches started while one is used; the threads end with the batches.

    `divide` gives a batch's labels and its parts.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
    scale = _Scale(*(torch.tensor(each).mul_(255).view(3, 1, 1) for each in (view.mean, view.std)))
    there = _Scale(*(each.to(device) for each in scale))
    started: deque[_Filling] = deque()
    try:
        for order in orders:
            labels, parts = divide(order)
            filling = _room(labels, view.image_size, on_gpu=device.type == "cuda")
            filling.jobs.extend(pool.submit(_make, part, filling, scale) for part in parts)
            started.append(filling)
            if len(started) > AHEAD:
                yield _finish(started.popleft(), there)
        while started:
            yield _finish(started.popleft(), there)
    finally:
        pool.shutdown(cancel_futures=True)


def _room(labels: IntArray, size: int, *, on_gpu: bool) -> _Filling:
    pixels = torch.empty((len(labels), size, size, 3), dtype=torch.uint8, pin_memory=on_gpu)
    images = None if on_gpu else torch.empty((len(labels), 3, size, size))
    return _Filling([], pixels, images, labels)


def _make(part: Part, filling: _Filling, scale: _Scale) -> None:
    """Fill some rows in; with NumPy, whose operations start no threads of their own."""
    pixels = filling.pixels.numpy()[part.rows]
    part.fill(pixels)
    if filling.images is not None:
        images = filling.images.numpy()[part.rows]
        images[:] = pixels.transpose(0, 3, 1, 2)
        images -= scale.center.numpy()
        images /= scale.spread.numpy()


def _finish(batch: _Filling, scale: _Scale) -> Batch:
    """Wait for a batch; on a GPU, copy and normalise it there without waiting for that."""
    for job in batch.jobs:
        job.result()
    device = scale.center.device
    images = batch.images
    if images is None:
        images = batch.pixels.to(device, non_blocking=True).permute(0, 3, 1, 2)
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
        images = images.sub_(scale.center).div_(scale.spread)
    return Batch(images, torch.from_numpy(batch.labels).to(device, non_blocking=True))

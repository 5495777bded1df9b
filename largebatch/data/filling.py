"""Batches of bytes that threads fill in ahead of their use, made into normalised numbers.

On a processor the same threads do that, part by part; a GPU is sent the bytes, a quarter as much.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from largebatch.contracts import Batch, Batches, Bytes, IntArray, View
from largebatch.section import Triple

Order = TypeVar("Order")
"""What says what a batch is to be: a request, alone or with bytes that were read for it."""

Floats = npt.NDArray[np.float32]

AHEAD = 2
"""How many batches are being filled in while one is used."""


class Part(NamedTuple):
    """Some rows of a batch, which one thread makes."""

    rows: slice
    fill: Callable[[Bytes], None]
    """Writes their pixels, n x H x W x 3."""


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
    started: deque[_Filling] = deque()
    try:
        for order in orders:
            started.append(_start(pool, *divide(order), view, device))
            if len(started) > AHEAD:
                yield _finish(started.popleft(), view, device)
        while started:
            yield _finish(started.popleft(), view, device)
    finally:
        pool.shutdown(cancel_futures=True)


def _start(
    pool: ThreadPoolExecutor,
    labels: IntArray,
    parts: Sequence[Part],
    view: View,
    device: torch.device,
) -> _Filling:
    size, on_gpu = view.image_size, device.type == "cuda"
    pixels = torch.empty((len(labels), size, size, 3), dtype=torch.uint8, pin_memory=on_gpu)
    images = None if on_gpu else torch.empty((len(labels), 3, size, size))
    numbers = None if images is None else images.numpy()
    jobs = [pool.submit(_make, part, pixels.numpy(), numbers, view) for part in parts]
    return _Filling(jobs, pixels, images, labels)


def _make(part: Part, pixels: Bytes, images: Floats | None, view: View) -> None:
    """Fill some rows in; with NumPy, whose operations start no threads of their own."""
    rows, fill = part
    fill(pixels[rows])
    if images is not None:
        images[rows] = pixels[rows].transpose(0, 3, 1, 2)
        images[rows] -= _scaled(view.mean).numpy()
        images[rows] /= _scaled(view.std).numpy()


def _finish(batch: _Filling, view: View, device: torch.device) -> Batch:
    """Wait for a batch; on a GPU, copy and normalise it there without waiting for that."""
    for job in batch.jobs:
        job.result()
    images = batch.images
    if images is None:
        images = batch.pixels.to(device, non_blocking=True).permute(0, 3, 1, 2)
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
        center, spread = _scaled(view.mean).to(device), _scaled(view.std).to(device)
        images = images.sub_(center).div_(spread)
    return Batch(images, torch.from_numpy(batch.labels).to(device, non_blocking=True))


def _scaled(values: Triple) -> Tensor:
    """Return what stands for each colour on the scale 0 .. 1 on the scale 0 .. 255, 3 x 1 x 1."""
    return torch.tensor(values).mul_(255).view(3, 1, 1)

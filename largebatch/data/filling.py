"""Batches of bytes that threads fill in ahead of their use, made into numbers on the device."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from largebatch.contracts import Batch, Batches, IntArray, View

Order = TypeVar("Order")
"""What says what a batch is to be: a request, alone or with bytes that were read for it."""

AHEAD = 2
"""How many batches are being filled in while one is used."""


class Filling(NamedTuple):
    """A batch that is being filled in."""

    jobs: list[Future[None]]
    pixels: Tensor
    """uint8, N x H x W x 3, which the jobs fill in."""

    labels: IntArray


def fill_ahead(
    orders: Iterable[Order],
    start: Callable[[ThreadPoolExecutor, Order], Filling],
    finish: Callable[[Filling], Batch],
    *,
    threads: int,
) -> Batches:
    """Keep AHEAD batches started while one is used; the threads end with the batches."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
    started: deque[Filling] = deque()
    try:
        for order in orders:
            started.append(start(pool, order))
            if len(started) > AHEAD:
                yield finish(started.popleft())
        while started:
            yield finish(started.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def empty_pixels(number: int, view: View, device: torch.device) -> Tensor:
    """Return room for a batch's pixels, from where it can be copied to the device quickly."""
    size = (number, view.image_size, view.image_size, 3)
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def finisher(view: View, device: torch.device) -> Callable[[Filling], Batch]:
    """Return what waits for a batch and normalises it on the device, in one operation."""
    center = torch.tensor(view.mean, device=device).mul_(255).view(3, 1, 1)
    spread = torch.tensor(view.std, device=device).mul_(255).view(3, 1, 1)

    def finish(batch: Filling) -> Batch:
        for job in batch.jobs:
            job.result()
        images = batch.pixels.to(device, non_blocking=True).permute(0, 3, 1, 2)
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
        labels = torch.from_numpy(batch.labels).to(device, non_blocking=True)
        return Batch(images.sub_(center).div_(spread), labels)

    return finish

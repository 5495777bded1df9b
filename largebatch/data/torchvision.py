"""Pillow and torchvision as the decoder: runs everywhere, and is what DALI is compared with.

Pillow lets go of the interpreter lock while it decodes and resizes, so threads are enough. They
fill in bytes; turning those into normalised numbers is one operation a batch, on the device.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from largebatch.contracts import Batch, Batches, IntArray, Request
from largebatch.data.index import Index
from largebatch.recipe import Triple
from largebatch.vision import require_torchvision

AHEAD = 2
"""How many batches are being decoded while one is used."""


class _Pending(NamedTuple):
    """A batch whose pictures are being decoded."""

    jobs: list[Future[None]]
    pixels: Tensor
    """uint8, N x H x W x 3, which the jobs fill in."""

    labels: IntArray


def decode(  # noqa: PLR0913 -- every decoder is called alike
    index: Index,
    requests: Iterable[Request],
    *,
    image_size: int,
    mean: Triple,
    std: Triple,
    device: torch.device,
    threads: int,
    batch_size: int,  # noqa: ARG001 -- every decoder is called alike
) -> Batches:
    """Return one batch for each request, in order; the threads end when it ends or is closed.

    A box is cut out, resized with antialiased bilinear interpolation, then mirrored if asked for.
    """
    require_torchvision()
    center = torch.tensor(mean, device=device).mul_(255).view(3, 1, 1)
    spread = torch.tensor(std, device=device).mul_(255).view(3, 1, 1)

    def finish(batch: _Pending) -> Batch:
        for job in batch.jobs:
            job.result()
        images = batch.pixels.to(device, non_blocking=True).permute(0, 3, 1, 2)
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
        labels = torch.from_numpy(batch.labels).to(device, non_blocking=True)
        return Batch(images.sub_(center).div_(spread), labels)

    def start(pool: ThreadPoolExecutor, request: Request) -> _Pending:
        size = (len(request.samples), image_size, image_size, 3)
        pixels = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        paths = [index.root / index.paths[sample] for sample in request.samples]
        each = zip(paths, request.boxes, request.flips, pixels.numpy(), strict=True)
        jobs = [pool.submit(_decode_one, *arguments) for arguments in each]
        return _Pending(jobs, pixels, index.labels[request.samples])

    return _ahead(requests, start, finish, threads=threads)


def _ahead(
    requests: Iterable[Request],
    start: Callable[[ThreadPoolExecutor, Request], _Pending],
    finish: Callable[[_Pending], Batch],
    *,
    threads: int,
) -> Batches:
    """Keep AHEAD batches started while one is used."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
    pending: deque[_Pending] = deque()
    try:
        for request in requests:
            pending.append(start(pool, request))
            if len(pending) > AHEAD:
                yield finish(pending.popleft())
        while pending:
            yield finish(pending.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _decode_one(path: Path, box: IntArray, flip: np.bool_, pixels: npt.NDArray[np.uint8]) -> None:
    """Write the part of a picture that was asked for into `pixels`, H x W x 3."""
    from torchvision.transforms import functional

    with Image.open(path) as image:
        part = functional.resized_crop(image.convert("RGB"), *box.tolist(), list(pixels.shape[:2]))
    pixels[:] = functional.hflip(part) if flip else part

"""Small sets on a GPU: kept there as bytes, cut, mirrored and resized there a batch at a time.

Nothing is read, decoded or copied from the host but a few numbers for each picture, and nothing
waits for the device. On a processor the batched products would do many times the arithmetic of
resizing one picture after the other, and pay for small ones only.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from largebatch.contracts import Batch, Batches, BoolArray, Bytes, IntArray, Request, View
from largebatch.data.cached import Kept, kept
from largebatch.data.resampling import resample
from largebatch.errors import DataError

AT_ONCE = 2**25
"""How many pixels of pictures are resized at once; as floats they take twelve bytes each."""


def upload(on_host: Kept[Bytes], device: torch.device) -> Kept[Tensor]:
    """Copy the pixels to a device; raise DataError if they do not fit."""
    try:
        pixels = torch.from_numpy(on_host.pixels).to(device)
    except torch.OutOfMemoryError:
        raise DataError(
            f"{on_host.index.root}: {len(on_host.pixels) / 1e9:.1f} GB of decoded pictures do not "
            f"fit on {device}; use data.cache: memory"
        ) from None
    return kept(on_host.index, pixels, on_host.starts)


def decode(pictures: Kept[Tensor], requests: Iterable[Request], view: View) -> Batches:
    """Return one batch for each request, in order."""
    device = pictures.pixels.device
    center = torch.tensor(view.mean, device=device).mul_(255).view(3, 1, 1)
    spread = torch.tensor(view.std, device=device).mul_(255).view(3, 1, 1)
    for request in requests:
        labels = pictures.index.labels[request.samples]
        numbers = _copied(device, request.samples, *request.boxes.T, request.flips, labels)
        images = _resized(pictures, request, numbers, view)
        yield Batch(images.sub_(center).div_(spread), numbers[-1])


def _copied(device: torch.device, *rows: IntArray | BoolArray) -> Tensor:
    """Return rows of numbers on the device, copied in one go.

    From pinned memory, because a copy from any other may wait until the device has done all that
    was asked of it before.
    """
    numbers = torch.from_numpy(np.stack(rows).astype(np.int64, copy=False))
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def _resized(pictures: Kept[Tensor], request: Request, numbers: Tensor, view: View) -> Tensor:
    """Return N x 3 x H x W values 0 .. 255, made from AT_ONCE pixels at a time.

    `numbers` has the request's samples, boxes and flips, row by row.
    """
    size = view.image_size
    if pictures.alike is not None:
        pixels = pictures.alike[0].numel() // 3
    else:
        pixels = int(request.boxes[:, 2:].max(axis=0).prod())
    number = max(1, AT_ONCE // pixels)
    samples, boxes, flips = numbers[0], numbers[1:5].T, numbers[5] > 0
    images = torch.empty(len(samples), 3, size, size, device=numbers.device)
    for first in range(0, len(images), number):
        part = slice(first, first + number)
        if pictures.alike is not None:
            parts, places = pictures.alike[samples[part]], boxes[part]
        else:
            parts = _cut_out(pictures, request.samples[part], request.boxes[part])
            places = boxes[part].clone()
            places[:, :2] = 0
        images[part] = resample(
            parts, places, flips[part], size=size, interpolation=view.interpolation
        )
    return images


def _cut_out(pictures: Kept[Tensor], samples: IntArray, boxes: IntArray) -> Tensor:
    """Return N x H x W x 3 bytes with a box in the upper left corner of each."""
    height, width = boxes[:, 2:].max(axis=0).tolist()
    shape = len(samples), height, width, 3
    parts = torch.zeros(shape, dtype=torch.uint8, device=pictures.pixels.device)
    for part, sample, box in zip(parts, samples.tolist(), boxes.tolist(), strict=True):
        part[: box[2], : box[3]] = pictures.part(sample, box)
    return parts

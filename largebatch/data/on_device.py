"""Small sets on a GPU: kept there as bytes, cut, mirrored and resized there a batch at a time.

Nothing is read, decoded or copied from the host but a few numbers for each picture, and nothing
waits for the device. On a processor the batched products would do many times the arithmetic of
resizing one picture after the other.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from largebatch.contracts import Batch, Batches, IntArray, Request, View
from largebatch.data.cached import Bytes, Kept, kept
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
        images = _resized(pictures, request, view)
        labels = torch.from_numpy(pictures.index.labels[request.samples])
        yield Batch(images.sub_(center).div_(spread), labels.to(device, non_blocking=True))


def _resized(pictures: Kept[Tensor], request: Request, view: View) -> Tensor:
    """Return N x 3 x H x W values 0 .. 255, made from AT_ONCE pixels at a time."""
    device, size = pictures.pixels.device, view.image_size
    if pictures.alike is not None:
        pixels = pictures.alike[0].numel() // 3
    else:
        pixels = int(request.boxes[:, 2:].max(axis=0).prod())
    number = max(1, AT_ONCE // pixels)
    flips = torch.from_numpy(request.flips).to(device, non_blocking=True)
    images = torch.empty(len(request.samples), 3, size, size, device=device)
    for first in range(0, len(images), number):
        rows = slice(first, first + number)
        gathered, boxes = _gather(pictures, request.samples[rows], request.boxes[rows])
        images[rows] = resample(
            gathered, boxes, flips[rows], size=size, interpolation=view.interpolation
        )
    return images


def _gather(pictures: Kept[Tensor], samples: IntArray, boxes: IntArray) -> tuple[Tensor, Tensor]:
    """Return N x H x W x 3 bytes that hold all boxes, and where these lie in them."""
    device = pictures.pixels.device
    if pictures.alike is not None:
        rows = torch.from_numpy(samples).to(device, non_blocking=True)
        return pictures.alike[rows], torch.from_numpy(boxes).to(device, non_blocking=True)
    height, width = boxes[:, 2:].max(axis=0).tolist()
    parts = torch.zeros(len(samples), height, width, 3, dtype=torch.uint8, device=device)
    for part, sample, box in zip(parts, samples.tolist(), boxes.tolist(), strict=True):
        part[: box[2], : box[3]] = pictures.part(sample, box)
    places = np.concatenate([np.zeros_like(boxes[:, :2]), boxes[:, 2:]], axis=1)
    return parts, torch.from_numpy(places).to(device, non_blocking=True)

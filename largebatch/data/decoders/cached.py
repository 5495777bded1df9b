"""Crops, flips and resizing of cached pixels, for small data sets that are decoded once.

On a CPU, threads crop and resize one image after the other (`open_decoder`). On a GPU the bytes
stay on the device and are cropped, mirrored and resized in batches (`upload`, `decode_on_device`):
only a few numbers per image are copied from the host, and nothing waits for the device. On a CPU
the batched products need many times the arithmetic of resizing single images, and are faster only
for small ones.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from largebatch.data.decoders.pixel_cache import EACH, PixelCache, make_cache
from largebatch.data.decoders.prefetch import Part, open_prefetcher
from largebatch.data.decoders.resample import resample, resample_small
from largebatch.data.transfer import Transfer
from largebatch.data.types import (
    Batch,
    Batches,
    Bytes,
    Decode,
    Floats,
    IntArray,
    Request,
    Resources,
    View,
)
from largebatch.errors import DataError
from largebatch.recipe.data import Interpolation

SMALL = 40
"""Maximum side in pixels of images of one size that are resized together: one by one, the threads
would mostly wait for Python's lock. The weights of all boxes then take 20 MB."""

AT_ONCE = 2**25
"""Number of pixels resized at once on a device; as floats they take twelve bytes each."""


@contextmanager
def open_decoder(cache: PixelCache[Bytes], view: View, resources: Resources) -> Iterator[Decode]:
    """Yield a decoder whose threads end with the block."""

    def divide(request: Request) -> tuple[IntArray, list[Part]]:
        cache.require_whole()
        rows = (slice(first, first + EACH) for first in range(0, len(request.samples), EACH))
        parts = [Part(r, partial(_fill, cache, request, r, view.interpolation)) for r in rows]
        return cache.index.labels[request.samples], parts

    with open_prefetcher(view, resources) as prefetcher:
        yield lambda requests: prefetcher.batches(requests, divide)


def _fill(
    cache: PixelCache[Bytes],
    request: Request,
    rows: slice,
    interpolation: Interpolation,
    pixels: Bytes | Floats,
) -> None:
    """Write the images of these rows of a request into `pixels`."""
    samples, boxes, flips = request.samples[rows], request.boxes[rows], request.flips[rows]
    size = pixels.shape[1:3]
    if cache.alike is not None and max(*cache.alike.shape[1:3], *size) <= SMALL:
        whole = cache.alike[samples]
        pixels[:] = resample_small(
            whole, boxes, flips, size=size[0], interpolation=interpolation
        ).transpose(0, 2, 3, 1)
        return
    images = zip(samples.tolist(), boxes.tolist(), flips.tolist(), pixels, strict=True)
    for sample, box, flip, out in images:
        # unsqueeze, not [None]: with its stride of 0 PyTorch would not detect channels-last.
        part = torch.from_numpy(cache.part(sample, box)).unsqueeze(0).permute(0, 3, 1, 2)
        resized = F.interpolate(part, size=size, mode=interpolation, antialias=True)
        whole = resized.permute(0, 2, 3, 1).numpy()[0]
        out[:] = whole[:, ::-1] if flip else whole


def upload(on_host: PixelCache[Bytes], device: torch.device) -> PixelCache[Tensor]:
    """Copy the pixels to a device; raise DataError if they do not fit."""
    on_host.require_whole()
    try:
        pixels = torch.from_numpy(on_host.pixels).to(device)
    except torch.OutOfMemoryError:
        raise DataError(
            f"{on_host.index.root}: {len(on_host.pixels) / 1e9:.1f} GB of decoded images do not "
            f"fit on {device}; use execution.cache: memory"
        ) from None
    return make_cache(on_host.index, pixels, on_host.starts)


def decode_on_device(cache: PixelCache[Tensor], view: View, requests: Iterable[Request]) -> Batches:
    """Return one batch for each request, in order."""
    device = cache.pixels.device
    transfer = Transfer(device)
    center = torch.tensor(view.mean, device=device).mul_(255).view(3, 1, 1)
    spread = torch.tensor(view.std, device=device).mul_(255).view(3, 1, 1)
    for request in requests:
        labels = cache.index.labels[request.samples]
        rows = request.samples, *request.boxes.T, request.flips, labels
        numbers = torch.from_numpy(np.stack(rows).astype(np.int64, copy=False))
        (numbers,) = transfer.send(numbers)
        images = _resized(cache, request, numbers, view)
        yield Batch(images.sub_(center).div_(spread), numbers[-1])


def _resized(cache: PixelCache[Tensor], request: Request, numbers: Tensor, view: View) -> Tensor:
    """Return N x 3 x H x W values 0 .. 255, computed from AT_ONCE pixels at a time.

    The rows of `numbers` are the request's samples, boxes (four rows) and flips.
    """
    size = view.image_size
    if cache.alike is not None:
        pixels = cache.alike[0].numel() // 3
    else:
        pixels = int(request.boxes[:, 2:].max(axis=0).prod())
    number = max(1, AT_ONCE // pixels)
    samples, boxes, flips = numbers[0], numbers[1:5].T, numbers[5] > 0
    order = torch.channels_last if view.channels_last else torch.contiguous_format
    shape = len(samples), 3, size, size
    images = torch.empty(shape, device=numbers.device, memory_format=order)
    for first in range(0, len(images), number):
        part = slice(first, first + number)
        if cache.alike is not None:
            parts, places = cache.alike[samples[part]], boxes[part]
        else:
            parts = _cut_out(cache, request.samples[part], request.boxes[part])
            places = boxes[part].clone()
            places[:, :2] = 0
        images[part] = resample(
            parts, places, flips[part], size=size, interpolation=view.interpolation
        )
    return images


def _cut_out(cache: PixelCache[Tensor], samples: IntArray, boxes: IntArray) -> Tensor:
    """Return N x H x W x 3 bytes, each with its box in the upper left corner."""
    height, width = boxes[:, 2:].max(axis=0).tolist()
    shape = len(samples), height, width, 3
    parts = torch.zeros(shape, dtype=torch.uint8, device=cache.pixels.device)
    for part, sample, box in zip(parts, samples.tolist(), boxes.tolist(), strict=True):
        part[: box[2], : box[3]] = cache.part(sample, box)
    return parts

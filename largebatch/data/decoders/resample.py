"""Batched crop, resize and flip with the results of torchvision's functions for single images.

Resizing is separable: out = Wy . image . Wx^T, with a row of weights for each output pixel. Boxes
differ between images, so each image has its own weights, and a batch is two batched matrix
products. The width is resized first, with rounding to integers between the two, like PyTorch on
bytes and Pillow before version 13 (which starts with the height of a tall box).
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from largebatch.data.types import BoolArray, Bytes, Floats, IntArray
from largebatch.recipe.data import Interpolation


def resample(
    images: Tensor, boxes: Tensor, flips: Tensor, *, size: int, interpolation: Interpolation
) -> Tensor:
    """Resize the boxes of N x H x W x 3 bytes to N x 3 x size x size floats of whole 0 .. 255.

    `boxes` is N x 4: top, left, height, width; `flips` N: mirror left to right. The filter is
    widened when a box shrinks (antialiasing) and ignores pixels outside the box.
    """
    number, height, width, _ = images.shape
    top, left, box_height, box_width = boxes.to(torch.float32).unbind(dim=1)
    places = torch.arange(size, device=images.device).expand(number, size)
    across = torch.where(flips[:, None], places.flip(1), places)
    rows = _weights(top, box_height, places, num_pixels=height, interpolation=interpolation)
    columns = _weights(left, box_width, across, num_pixels=width, interpolation=interpolation)

    planes = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    narrow = _whole(torch.bmm(planes.view(number, 3 * height, width), columns.transpose(1, 2)))
    narrow = narrow.view(number, 3, height, size).transpose(1, 2).reshape(number, height, 3 * size)
    result = _whole(torch.bmm(rows, narrow))
    return result.view(number, size, 3, size).transpose(1, 2)


def resample_small(
    images: Bytes,
    boxes: IntArray,
    flips: BoolArray,
    *,
    size: int,
    interpolation: Interpolation,
) -> Floats:
    """Resize like `resample`, on a CPU with precomputed weights.

    For small images, which have few possible boxes. NumPy is used because its operations start no
    threads.
    """
    number, height, width, _ = images.shape
    top, left, box_height, box_width = boxes.T
    rows = _all_weights(height, size, interpolation)[0, top, box_height - 1]
    columns = _all_weights(width, size, interpolation)[flips.astype(int), left, box_width - 1]

    planes = np.empty((number, 3, height, width), dtype=np.float32)
    planes[:] = images.transpose(0, 3, 1, 2)
    narrow = planes.reshape(number, 3 * height, width) @ columns.transpose(0, 2, 1)
    narrow = _to_whole(narrow).reshape(number, 3, height, size)
    return _to_whole(rows[:, None] @ narrow)


@lru_cache(maxsize=4)
def _all_weights(num_pixels: int, size: int, interpolation: Interpolation) -> Floats:
    """Return the weights of all boxes along an axis, by flip, first pixel and length - 1."""
    numbers = torch.arange(num_pixels, dtype=torch.float32)
    starts, lengths = numbers.repeat_interleave(num_pixels), 1.0 + numbers.repeat(num_pixels)
    places = torch.arange(size).expand(len(starts), size)
    weights = _weights(starts, lengths, places, num_pixels=num_pixels, interpolation=interpolation)
    both = torch.stack([weights, weights.flip(1)])
    return both.view(2, num_pixels, num_pixels, size, num_pixels).numpy()


def _weights(
    start: Tensor, length: Tensor, places: Tensor, *, num_pixels: int, interpolation: Interpolation
) -> Tensor:
    """Return N x size x num_pixels weights along one axis; every row sums to 1.

    Output pixel `place` of a box that starts at `start` is at start + (place + 1/2) * scale.
    """
    scale = (length / places.shape[1])[:, None, None]
    width = scale.clamp(min=1.0)
    centers = start[:, None, None] + (places[:, :, None] + 0.5) * scale
    pixels = torch.arange(num_pixels, device=places.device) + 0.5
    distance = ((pixels - centers) / width).abs_()
    weights = _triangle(distance) if interpolation == "bilinear" else _cubic(distance)
    first, end = start[:, None], (start + length)[:, None]
    weights *= ((pixels > first) & (pixels < end))[:, None, :]
    return weights / weights.sum(dim=2, keepdim=True)


def _triangle(distance: Tensor) -> Tensor:
    return (1.0 - distance).clamp_(min=0.0)


def _cubic(distance: Tensor) -> Tensor:
    """Catmull and Rom's cubic, a = -1/2 (Keys 1981, doi 10.1109/TASSP.1981.1163711, eq. 4)."""
    near = (1.5 * distance - 2.5) * distance * distance + 1.0
    far = ((2.5 - 0.5 * distance) * distance - 4.0) * distance + 2.0
    return torch.where(distance < 1.0, near, torch.where(distance < 2.0, far, 0.0))


def _whole(values: Tensor) -> Tensor:
    return values.add_(0.5).floor_().clamp_(0.0, 255.0)


def _to_whole(values: Floats) -> Floats:
    values += 0.5
    return np.clip(np.floor(values, out=values), 0.0, 255.0, out=values)

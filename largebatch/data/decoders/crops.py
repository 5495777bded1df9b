"""Crop and resize: what it means, and its implementations.

A box is cut out of the image, resized to a square by a linear or Catmull and Rom's cubic filter,
and mirrored left to right if requested. The filter is widened where the box shrinks (antialiasing),
ignores pixels outside the box, and rounds to whole numbers from 0 to 255. A box of the square's
size is copied. There is an implementation for each kind of memory that the image is in:

- a Pillow image on the host: Pillow, the reference (`crop_and_resize`)
- bytes on the host: PyTorch's resizing of bytes, which takes a seventh of Pillow's time, and rounds
  differently, as Pillow 13 begins with the height of a tall box (`crop_and_resize`)
- bytes on a device, images of one size: matrix products (`resample`); boxes that are copied, in one
  launch of Triton (`cut_out_by_kernel`) or in a few of PyTorch (`cut_out`)
- an encoded image: DALI, which decodes only the box (`dali.py`)

Resizing is separable: out = Wy . image . Wx^T, with a row of weights for each output pixel, so a
batch is two batched matrix products. The width is resized first, with rounding to integers between
the two, like PyTorch on bytes and Pillow before version 13.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from largebatch import accelerator
from largebatch.data.augment import reflected, translate
from largebatch.data.types import BoolArray, Bytes, Floats, IntArray, Request, View
from largebatch.recipe.data import Interpolation

PIXELS_AT_ONCE = 2**25
"""Number of pixels resized at once on a device; as floats they take twelve bytes each."""

BLOCK = 1024  # numbers of a batch that a program of the kernel writes


def crop_and_resize(
    image: Image.Image | Bytes,
    box: Sequence[int],
    *,
    flip: bool,
    size: int,
    interpolation: Interpolation,
) -> Bytes:
    """Return the box (top, left, height, width) of an image on the host, size x size x 3 bytes.

    `image` is a Pillow image, or H x W x 3 bytes.
    """
    if isinstance(image, Image.Image):
        square = _by_pillow(image, box, size=size, interpolation=interpolation)
    else:
        top, left, height, width = box
        square = image[top : top + height, left : left + width]
        if (height, width) != (size, size):
            square = _on_bytes(square, size=size, interpolation=interpolation)
    return square[:, ::-1] if flip else square


def _by_pillow(
    image: Image.Image, box: Sequence[int], *, size: int, interpolation: Interpolation
) -> Bytes:
    from torchvision.transforms import InterpolationMode, functional

    mode = InterpolationMode(interpolation)
    return np.asarray(functional.resized_crop(image, *box, [size, size], mode))


def _on_bytes(pixels: Bytes, *, size: int, interpolation: Interpolation) -> Bytes:
    # unsqueeze, not [None]: with its stride of 0 PyTorch would not detect channels-last.
    image = torch.from_numpy(pixels).unsqueeze(0).permute(0, 3, 1, 2)
    resized = F.interpolate(image, size=(size, size), mode=interpolation, antialias=True)
    square: Bytes = resized.permute(0, 2, 3, 1).numpy()[0]
    return square


def is_cut_out(request: Request, size: int) -> bool:
    """Return True if every box has the size of the square, so that nothing is resized."""
    return bool((request.boxes[:, 2:] == size).all())


SAMPLE, TOP, LEFT, HEIGHT, WIDTH, FLIP, DOWN, RIGHT, LABEL = range(9)
"""Rows of the table of a request. `triton_crop.cut_out` reads all but the last."""


def table_of(request: Request, labels: IntArray) -> Tensor:
    """Return a request and its labels as one table of 9 x N int64: a device gets it by one copy."""
    shifts = np.zeros_like(request.boxes[:, :2]) if request.shifts is None else request.shifts
    rows = (request.samples, *request.boxes.T, request.flips, *shifts.T, labels)
    return torch.from_numpy(np.stack(rows).astype(np.int64, copy=False))


def cut_out_by_kernel(pixels: Tensor, table: Tensor, scale: Tensor, view: View) -> Tensor:
    """Return the boxes of N x H x W x 3 bytes, mirrored, moved and normalised, in one launch."""
    from largebatch.data.decoders.triton_crop import cut_out as kernel

    size = view.image_size
    num = table.shape[1]
    out = torch.empty(
        (num, 3, size, size),
        dtype=view.dtype,
        device=pixels.device,
        memory_format=torch.channels_last if view.channels_last else torch.contiguous_format,
    )
    grid = (num, -(-3 * size * size // BLOCK))
    height, width = pixels.shape[1:3]
    accelerator.launch(
        kernel, grid, out, pixels, table, scale, height, width, size, num,
        CHANNELS_LAST=view.channels_last, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def cut_out(pixels: Tensor, table: Tensor, *, size: int, at_corner: bool) -> Tensor:
    """Return boxes of this size, mirrored and moved: N x 3 x size x size bytes.

    `at_corner`: every box begins at the image's first pixel.
    """
    row_places, column_places = _places(size, pixels.device)
    rows = row_places[table[DOWN]]
    columns = column_places[table[FLIP], table[RIGHT]]
    if not at_corner:  # else two launches less
        rows = rows + table[TOP, :, None]
        columns = columns + table[LEFT, :, None]
    samples = table[SAMPLE, :, None, None]
    return pixels[samples, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@lru_cache(maxsize=8)
def _places(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows to read by shift (negative: from the end), and columns by flip and shift."""
    shifts = torch.cat([torch.arange(size), torch.arange(1 - size, 0)])
    rows = reflected(shifts, num_pixels=size)
    columns = torch.stack([rows, size - 1 - rows])
    return rows.to(device), columns.to(device)


def resize(pixels: Tensor, table: Tensor, view: View, *, moves: bool) -> Tensor:
    """Return the boxes of N x H x W x 3 bytes, resized, mirrored and, if `moves`, moved."""
    images_at_once = max(1, PIXELS_AT_ONCE // (pixels.shape[1] * pixels.shape[2]))
    squares = []
    for columns in table.split(images_at_once, dim=1):
        square = resample(
            pixels[columns[SAMPLE]],
            columns[TOP : WIDTH + 1].T,
            columns[FLIP] > 0,
            size=view.image_size,
            interpolation=view.interpolation,
        )
        if moves:
            square = translate(square, columns[DOWN : RIGHT + 1].T)
        squares.append(square)
    return torch.cat(squares) if len(squares) > 1 else squares[0]


def resample(
    images: Tensor, boxes: Tensor, flips: Tensor, *, size: int, interpolation: Interpolation
) -> Tensor:
    """Resize the boxes of N x H x W x 3 bytes to N x 3 x size x size floats of whole 0 .. 255.

    `boxes` is N x 4: top, left, height, width; `flips` N: mirror left to right.
    """
    number, height, width, _ = images.shape
    top, left, box_height, box_width = boxes.to(torch.float32).unbind(dim=1)
    places = torch.arange(size, device=images.device).expand(number, size)
    # Mirrored columns of weights cost less than mirrored images.
    across = torch.where(flips[:, None], places.flip(1), places)
    rows = _weights(top, box_height, places, num_pixels=height, interpolation=interpolation)
    columns = _weights(left, box_width, across, num_pixels=width, interpolation=interpolation)
    planes = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    narrow = _to_whole(torch.bmm(planes.view(number, 3 * height, width), columns.transpose(1, 2)))
    # The three channels side by side, so that the second product is one matrix per image, too.
    narrow = narrow.view(number, 3, height, size).transpose(1, 2).reshape(number, height, 3 * size)
    result = _to_whole(torch.bmm(rows, narrow))
    return result.view(number, size, 3, size).transpose(1, 2)


def resample_small(
    images: Bytes,
    boxes: IntArray,
    flips: BoolArray,
    *,
    size: int,
    interpolation: Interpolation,
) -> Floats:
    """Resize like `resample`, with precomputed weights; NumPy starts no threads."""
    number, height, width, _ = images.shape
    top, left, box_height, box_width = boxes.T
    rows = _all_weights(height, size, interpolation)[0, top, box_height - 1]
    columns = _all_weights(width, size, interpolation)[flips.astype(int), left, box_width - 1]

    planes = np.empty((number, 3, height, width), dtype=np.float32)
    planes[:] = images.transpose(0, 3, 1, 2)
    narrow = planes.reshape(number, 3 * height, width) @ columns.transpose(0, 2, 1)
    narrow = _round_array(narrow).reshape(number, 3, height, size)
    return _round_array(rows[:, None] @ narrow)


@lru_cache(maxsize=4)
def _all_weights(num_pixels: int, size: int, interpolation: Interpolation) -> Floats:
    """Return the weights of all boxes along an axis, by flip, first pixel and length - 1."""
    numbers = torch.arange(num_pixels, dtype=torch.float32)
    starts = numbers.repeat_interleave(num_pixels)
    lengths = 1.0 + numbers.repeat(num_pixels)
    places = torch.arange(size).expand(len(starts), size)
    weights = _weights(starts, lengths, places, num_pixels=num_pixels, interpolation=interpolation)
    with_flips = torch.stack([weights, weights.flip(1)])
    return with_flips.view(2, num_pixels, num_pixels, size, num_pixels).numpy()


def _weights(
    start: Tensor, length: Tensor, places: Tensor, *, num_pixels: int, interpolation: Interpolation
) -> Tensor:
    """Return N x size x num_pixels weights along one axis; every row sums to 1.

    Output pixel `place` of a box that starts at `start` is at start + (place + 1/2) * scale.
    """
    scale = (length / places.shape[1])[:, None, None]
    width = scale.clamp(min=1.0)  # antialiasing: the filter is widened where the box shrinks
    centers = start[:, None, None] + (places[:, :, None] + 0.5) * scale
    pixels = torch.arange(num_pixels, device=places.device) + 0.5
    distance = ((pixels - centers) / width).abs_()
    is_linear = interpolation == "bilinear"
    weights = (1.0 - distance).clamp_(min=0.0) if is_linear else _cubic(distance)
    first = start[:, None]
    end = (start + length)[:, None]
    weights *= ((pixels > first) & (pixels < end))[:, None, :]
    return weights / weights.sum(dim=2, keepdim=True)


def _cubic(distance: Tensor) -> Tensor:
    """Catmull and Rom's cubic, a = -1/2 (Keys 1981, doi 10.1109/TASSP.1981.1163711, eq. 4)."""
    near = (1.5 * distance - 2.5) * distance * distance + 1.0
    far = ((2.5 - 0.5 * distance) * distance - 4.0) * distance + 2.0
    return torch.where(distance < 1.0, near, torch.where(distance < 2.0, far, 0.0))


def _to_whole(values: Tensor) -> Tensor:
    return values.add_(0.5).floor_().clamp_(0.0, 255.0)


def _round_array(values: Floats) -> Floats:
    values += 0.5
    return np.clip(np.floor(values, out=values), 0.0, 255.0, out=values)

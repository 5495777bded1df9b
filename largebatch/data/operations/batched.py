"""The operations on a batch of a device, with Pillow's arithmetic, without a wait of the host.

Which image gets which operation is known on the host, so the images of one operation are computed
together. All numbers of a batch are sent by one copy.

Tables, blends, the nearest pixel and hues are Pillow's exactly. Bilinear and bicubic pixels are
computed in float32 where Pillow has float64, and truncated, so a few differ by 1 of 255.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from largebatch.data.decoders.prefetch import Transfer
from largebatch.data.operations import numbers
from largebatch.data.operations.draws import Filter, Operation
from largebatch.data.types import FloatArray, IntArray, Operations

Array = npt.NDArray[Any]

NEAREST_BITS = 16  # bits after the point of Pillow's coordinates for the nearest pixel
OTHER_BITS = 32  # bits after the point of other coordinates, which Pillow has in float64

Change = Callable[[Tensor, Tensor], Tensor]
"""Returns images, n x 3 x H x W bytes, changed by their numbers, n rows."""


class _Group(NamedTuple):
    """Images of a batch that get the same operation."""

    rows: IntArray  # n
    values: Array  # numbers of the operation, n rows
    change: Change


def apply(images: Tensor, operations: Operations) -> Tensor:
    """Return images, N x 3 x H x W bytes on a device, after all of their operations."""
    height, width = images.shape[2:]
    layers = [
        list(_groups(operations, layer, height=height, width=width))
        for layer in range(operations.kinds.shape[1])
    ]
    arrays = [
        array for groups in layers for group in groups for array in (group.rows, group.values)
    ]
    if not arrays:
        return images
    sent = iter(_send_together(arrays, images.device))
    images = images.clone()
    for groups in layers:
        for group in groups:
            rows = next(sent)
            values = next(sent)
            changed = group.change(images.index_select(0, rows), values)
            images.index_copy_(0, rows, changed)
    return images


def _send_together(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Return the arrays on the device, by one copy: many small ones would cost the host more."""
    sizes = [-(-array.nbytes // 8) * 8 for array in arrays]  # a type of 8 bytes begins at these
    buffer = np.zeros(sum(sizes), dtype=np.uint8)
    ends = np.cumsum(sizes)
    for array, end, size in zip(arrays, ends, sizes, strict=True):
        buffer[end - size : end - size + array.nbytes] = array.reshape(-1).view(np.uint8)
    (sent,) = Transfer(device).send(torch.from_numpy(buffer))
    return [
        part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for part, array in zip(sent.split(sizes), arrays, strict=True)
    ]


def _groups(operations: Operations, layer: int, *, height: int, width: int) -> Iterator[_Group]:
    kinds = operations.kinds[:, layer]
    strengths = operations.strengths[:, layer]
    is_by_table = np.isin(kinds, numbers.BY_TABLE)
    if is_by_table.any():
        (rows,) = is_by_table.nonzero()
        tables = [
            numbers.table(kind, strength, num_pixels=height * width)
            for kind, strength in zip(kinds[rows].tolist(), strengths[rows].tolist(), strict=True)
        ]
        yield _Group(rows, np.stack(tables), _replace_values)
    for kind, change in _BY_STRENGTH.items():
        (rows,) = (kinds == kind).nonzero()
        if len(rows):
            yield _Group(rows, strengths[rows].astype(np.float32), change)
    (rows,) = (kinds == Operation.CUT_OUT).nonzero()
    if len(rows):
        boxes = numbers.boxes(
            operations.centers[rows, layer], strengths[rows], height=height, width=width
        )
        yield _Group(rows, boxes, partial(_cut_out, fill=operations.fill))
    is_moved = np.isin(kinds, numbers.GEOMETRY)
    for filter_, move in _BY_FILTER.items():
        (rows,) = (is_moved & (operations.filters[:, layer] == filter_)).nonzero()
        if len(rows):
            matrices = numbers.matrices(
                kinds[rows],
                strengths[rows],
                height=height,
                width=width,
                shear_axis=operations.shear_axis,
            )
            bits = NEAREST_BITS if filter_ == Filter.NEAREST else OTHER_BITS
            yield _Group(rows, _fixed(matrices, bits), partial(move, fill=operations.fill))


def _replace_values(images: Tensor, tables: Tensor) -> Tensor:
    """Replace every value by that of its table, n x 256 or, by channel, n x 3 x 256."""
    number = tables[..., 0].numel()
    values = images.reshape(number, -1).long()
    changed: Tensor = tables.reshape(number, 256).gather(1, values)
    return changed.view(images.shape)


def _histograms(images: Tensor) -> Tensor:
    """Return n x 3 x 256 numbers of pixels."""
    number, channels = images.shape[:2]
    values = images.reshape(number * channels, -1).long()
    counts = torch.zeros(number * channels, 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(1, values, torch.ones_like(values))
    return counts.view(number, channels, 256)


def _equalize(images: Tensor, _strengths: Tensor) -> Tensor:
    counts = _histograms(images)
    brightest = images.flatten(2).amax(dim=2, keepdim=True).long()
    # Pillow's: each step of a value has as many pixels, those of the brightest value left out.
    step = (counts.sum(dim=2, keepdim=True) - counts.gather(2, brightest)) // 255
    darker = counts.cumsum(dim=2) - counts
    values = (step // 2 + darker) // step.clamp(min=1)
    unchanged = torch.arange(256, device=images.device)
    tables = torch.where(step > 0, values.clamp(max=255), unchanged)
    return _replace_values(images, tables.to(torch.uint8))


def _auto_contrast(images: Tensor, _strengths: Tensor) -> Tensor:
    low, high = images.flatten(2).aminmax(dim=2, keepdim=True)
    low = low.double()
    width = high - low
    # Not 255.0 / width, which PyTorch computes as a product with the reciprocal.
    scale = torch.full_like(width, 255.0) / width.clamp(min=1.0)
    values = torch.arange(256, device=images.device, dtype=low.dtype)
    # In Pillow's order, and truncated: another order would make a 254 of some 255.
    stretched = (values * scale - low * scale).clamp(0.0, 255.0)
    tables = torch.where(width > 0, stretched, values)
    return _replace_values(images, tables.to(torch.uint8))


def _grey(images: Tensor) -> Tensor:
    """Return n x 1 x H x W values of Pillow's mode L, as int32 (ITU-R 601)."""
    red, green, blue = images.int().split(1, dim=1)
    grey: Tensor = (red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16
    return grey


def _blend(begin: Tensor, images: Tensor, factors: Tensor) -> Tensor:
    """Return whole values at `factors`, n, on the way from `begin` to the images' values."""
    begin = begin.float()
    way = (images.float() - begin).mul_(factors.view(-1, 1, 1, 1))
    return way.add_(begin).clamp_(0.0, 255.0).to(torch.uint8)  # truncates, as Pillow


def _color(images: Tensor, factors: Tensor) -> Tensor:
    return _blend(_grey(images), images, factors)


def _contrast(images: Tensor, factors: Tensor) -> Tensor:
    grey = _grey(images).long()
    num_pixels = grey[0].numel()
    total = grey.sum(dim=(2, 3), keepdim=True)
    mean = (2 * total + num_pixels) // (2 * num_pixels)
    return _blend(mean, images, factors)


def _sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with the image smoothed by 3 x 3 weights 1 and, in the middle, 5, except its border."""
    values = images.int()
    rows = values[:, :, :-2] + values[:, :, 1:-1] + values[:, :, 2:]
    sums = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * values[:, :, 1:-1, 1:-1]
    values[:, :, 1:-1, 1:-1] = (2 * sums + 13) // 26
    return _blend(values, images, factors)


def _hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Turn the hues of Pillow's mode HSV, whose three channels are bytes."""
    red, green, blue = images.float().unbind(dim=1)
    value = images.amax(dim=1).float()
    spread = value - images.amin(dim=1).float()
    divisor = spread.clamp(min=1.0)
    from_red = ((value - red) / divisor).double()
    from_green = ((value - green) / divisor).double()
    from_blue = ((value - blue) / divisor).double()
    sixths = torch.where(
        red == value,
        from_blue - from_green,
        torch.where(green == value, 2.0 + from_red - from_blue, 4.0 + from_green - from_red),
    )
    # Rounded to float32 where Pillow stores a float32, because the bytes are truncated from it.
    part_of_circle = (sixths.float().double() / 6.0 + 1.0).remainder(1.0).float()
    hue = (part_of_circle.double() * 255.0).long()
    hue = torch.where(spread > 0, hue, 0)
    saturation = ((spread / value.clamp(min=1.0)).double() * 255.0).long()

    shift = (shifts.double() * 255.0).long().view(-1, 1, 1)
    place = ((hue + shift) % 256).double() * 6.0 / 255.0
    sixth = place.floor()
    within = (place - sixth).float().double()
    share = (saturation.float() / 255.0).double()
    value = value.double()
    low = value * (1.0 - share)
    falling = value * (1.0 - share * within)
    rising = value * (1.0 - share * (1.0 - within))

    def channel(turn: int) -> Tensor:
        """Return red, or the channel whose sixths of the circle begin `turn` sixths before."""
        here = (sixth + turn) % 6
        is_low = (here == 2) | (here == 3)
        middle = torch.where(here == 1, falling, torch.where(here == 4, rising, value))
        return torch.where(is_low, low, middle)

    channels = torch.stack([channel(0), channel(4), channel(2)], dim=1)
    return (channels + 0.5).to(torch.uint8)


def _cut_out(images: Tensor, boxes: Tensor, *, fill: tuple[int, int, int]) -> Tensor:
    top, left, bottom, right = boxes.view(-1, 4, 1, 1).unbind(dim=1)
    rows = torch.arange(images.shape[2], device=images.device).view(1, -1, 1)
    columns = torch.arange(images.shape[3], device=images.device).view(1, 1, -1)
    is_cut = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    return _filled(images, ~is_cut, fill)


def _filled(images: Tensor, is_kept: Tensor, fill: tuple[int, int, int]) -> Tensor:
    """Return the images, with the colour wherever `is_kept`, n x H x W, is False."""
    channels = [
        torch.where(is_kept, channel, value)
        for channel, value in zip(images.unbind(dim=1), fill, strict=True)
    ]
    return torch.stack(channels, dim=1)


def _fixed(matrices: FloatArray, bits: int) -> IntArray:
    """Return matrices for centres of pixels, as whole multiples of 2**-bits.

    Sums of whole numbers are exact on every device, so none finds another pixel. With 16 bits they
    are Pillow's for the nearest pixel.
    """
    centered = matrices.copy()
    centered[:, 2] += matrices[:, 0] * 0.5 + matrices[:, 1] * 0.5
    centered[:, 5] += matrices[:, 3] * 0.5 + matrices[:, 4] * 0.5
    return np.floor(centered * 2.0**bits + 0.5).astype(np.int64)


def _coordinates(images: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns and rows that pixels show, n x H x W fixed-point numbers each."""
    rows = torch.arange(images.shape[2], device=images.device).view(-1, 1)
    columns = torch.arange(images.shape[3], device=images.device)
    a, b, c, d, e, f = matrices.view(-1, 6, 1, 1).unbind(dim=1)
    return a * columns + b * rows + c, d * columns + e * rows + f


def _is_inside(images: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    height, width = images.shape[2:]
    return (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)


def _at(images: Tensor, places: Tensor) -> Tensor:
    """Return the pixels at these places, counted row by row, of n x C x H x W images."""
    number, channels = images.shape[:2]
    places = places.view(number, 1, -1).expand(-1, channels, -1)
    return images.reshape(number, channels, -1).gather(2, places).view(images.shape)


def _nearest(images: Tensor, matrices: Tensor, *, fill: tuple[int, int, int]) -> Tensor:
    height, width = images.shape[2:]
    columns, rows = (place >> NEAREST_BITS for place in _coordinates(images, matrices))
    is_inside = _is_inside(images, columns, rows)
    # Those from outside are not used; they only must be anywhere in the image.
    places = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    return _filled(_at(images, places), is_inside, fill)


def _bilinear(images: Tensor, matrices: Tensor, *, fill: tuple[int, int, int]) -> Tensor:
    return _interpolate(images, matrices, fill, around=2, between=_line)


def _bicubic(images: Tensor, matrices: Tensor, *, fill: tuple[int, int, int]) -> Tensor:
    return _interpolate(images, matrices, fill, around=4, between=_cubic)


def _interpolate(
    images: Tensor,
    matrices: Tensor,
    fill: tuple[int, int, int],
    *,
    around: int,
    between: Callable[[Sequence[Tensor], Tensor], Tensor],
) -> Tensor:
    """Interpolate `around` x `around` pixels; those from outside of the image get the colour."""
    places = _coordinates(images, matrices)
    columns, rows = (place >> OTHER_BITS for place in places)
    is_inside = _is_inside(images, columns, rows)
    one = 1 << OTHER_BITS
    # Values are those of the centres of pixels.
    from_centers = [place - one // 2 for place in places]
    first_column, first_row = (place >> OTHER_BITS for place in from_centers)
    right, down = ((place & (one - 1)).float().mul_(1 / one)[:, None] for place in from_centers)
    height, width = images.shape[2:]
    near = range(1 - around // 2, 1 + around // 2)
    # Beyond the border are the pixels of the border. Columns are limited once for all rows: every
    # operation on this many numbers is a launch, and is repeated for each of the pixels.
    near_columns = [(first_column + column).clamp_(0, width - 1) for column in near]
    values = images.float()
    lines = []
    for row in near:
        row_start = (first_row + row).clamp_(0, height - 1).mul_(width)
        pixels = [_at(values, row_start + column) for column in near_columns]
        lines.append(between(pixels, right))
    moved = between(lines, down).clamp_(0.0, 255.0)
    return _filled(moved.to(torch.uint8), is_inside, fill)


def _line(values: Sequence[Tensor], place: Tensor) -> Tensor:
    """Interpolate two values; equal ones give the same, however they are rounded."""
    first, second = values
    return (second - first).mul_(place).add_(first)


def _cubic(values: Sequence[Tensor], place: Tensor) -> Tensor:
    """Interpolate four values by Keys' cubic with a = -1, between the second and the third.

    Keys 1981, doi 10.1109/TASSP.1981.1163711, equation 4. Pillow resizes with a = -1/2.
    """
    before, first, second, after = values
    linear = second - before
    square = 2.0 * (before - first) + second - after
    cube = first - before + after - second
    return cube.mul_(place).add_(square).mul_(place).add_(linear).mul_(place).add_(first)


_BY_STRENGTH: dict[Operation, Change] = {
    Operation.EQUALIZE: _equalize,
    Operation.AUTO_CONTRAST: _auto_contrast,
    Operation.COLOR: _color,
    Operation.CONTRAST: _contrast,
    Operation.SHARPNESS: _sharpness,
    Operation.HUE: _hue,
}

_BY_FILTER = {
    Filter.NEAREST: _nearest,
    Filter.BILINEAR: _bilinear,
    Filter.BICUBIC: _bicubic,
}

"""Random erasing: boxes of training images become the mean colour or noise.

Boxes are drawn on the host from the seed and the position, as timm draws them. Their pixels are
filled on the device that has the images. A box has 27,000 numbers of noise on average at 224
pixels. They are not drawn on the host: only two keys of each image are copied, and the device
computes the noise from the keys and the place of the pixel. Integer arithmetic and a table do that,
which are the same to the last bit on every device.
"""

from functools import lru_cache
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from largebatch import accelerator
from largebatch.data.decoders.prefetch import Transfer
from largebatch.data.order import Stream, random_words, uniform
from largebatch.data.types import Erasures, FloatArray, IntArray
from largebatch.recipe.data import Erase

ATTEMPTS = 10  # number of boxes drawn before none is erased, as in timm and torchvision

QUANTILES = 2**16  # values of the noise, of equal probability; the largest is 4.3

_WORD = 2**32 - 1  # keeps the lower 32 bits of an integer


def draw_erasures(seed: int, positions: range, settings: Erase) -> Erasures:
    """Return the boxes to erase at these positions of the run, drawn like timm's RandomErasing.

    Each attempt draws a part of the area, uniform in `settings.area`, an aspect ratio (height /
    width), log-uniform in `settings.aspect`, and a position. The first box that is smaller than the
    image is used. Several boxes in an image share the area.
    """
    # A block of four words for the image and one for each attempt, used or not: a position finds
    # its own blocks.
    blocks = 1 + settings.count * ATTEMPTS
    words = random_words(
        seed, Stream.ERASE, block=positions.start * blocks, num_blocks=len(positions) * blocks
    )
    numbers = uniform(words).reshape(len(positions), blocks, 4)
    is_erased = numbers[:, 0, 0] < settings.probability
    num_boxes = 1 + (numbers[:, 0, 1] * settings.count).astype(np.int64)

    attempts = numbers[:, 1:].reshape(len(positions), settings.count, ATTEMPTS, 4)
    u_area, u_aspect, tops, lefts = np.moveaxis(attempts, 3, 0)
    smallest, largest = settings.area
    area = (smallest + (largest - smallest) * u_area) / num_boxes[:, None, None]
    flattest, tallest = np.log(settings.aspect)
    aspect = np.exp(flattest + (tallest - flattest) * u_aspect)
    heights = np.sqrt(area * aspect)
    widths = np.sqrt(area / aspect)
    fits = (heights < 1) & (widths < 1)

    is_used = is_erased[:, None] & (np.arange(settings.count) < num_boxes[:, None])
    rows, box = np.nonzero(is_used & fits.any(axis=2))
    attempt = fits.argmax(axis=2)[rows, box]
    boxes = np.stack([heights, widths, tops, lefts], axis=3)[rows, box, attempt]
    keys = _keys(seed, positions)[rows] if settings.fill == "noise" else None
    return Erasures(rows=rows, boxes=boxes, keys=keys)


def _keys(seed: int, positions: range) -> IntArray:
    """Return two 32-bit numbers for each image; its boxes share them, so they may overlap."""
    words = random_words(
        seed, Stream.ERASE_NOISE, block=positions.start, num_blocks=len(positions)
    )[:, 0]
    return np.stack([words & np.uint64(_WORD), words >> np.uint64(32)], axis=1).astype(np.int64)


def boxes_in_pixels(boxes: FloatArray, *, side: int) -> IntArray:
    """Return relative boxes in pixels of a square image: top, left, height and width, K x 4.

    >>> boxes_in_pixels(np.array([[0.5, 0.25, 0.0, 0.99]]), side=8).tolist()
    [[0, 6, 4, 2]]
    """
    # Rounding must not make a box as large as the image: timm would have drawn another one.
    sizes = np.minimum(np.rint(boxes[:, :2] * side), side - 1).astype(np.int64)
    corners = (boxes[:, 2:] * (side - sizes + 1)).astype(np.int64)
    return np.concatenate([corners, sizes], axis=1)


def erase(images: Tensor, erasures: Erasures) -> Tensor:
    """Fill boxes of N x 3 x S x S normalised images in place: 0, or standard normal noise.

    Returns the images.
    """
    boxes = boxes_in_pixels(erasures.boxes, side=images.shape[3])
    if accelerator.is_remote(images.device):
        _erase_together(images, erasures, boxes)
    else:
        # Slices take a processor an eighth of the time of indexed pixels, without the noise.
        _erase_one_by_one(images, erasures, boxes)
    return images


def _erase_together(images: Tensor, erasures: Erasures, boxes: IntArray) -> None:
    """Fill the boxes in a few launches."""
    side = images.shape[3]
    num_pixels = boxes[:, 2] * boxes[:, 3]
    # The host knows the number of pixels, so it does not wait for the device to count them.
    total = int(num_pixels.sum())
    if total == 0:
        return
    starts = np.cumsum(num_pixels) - num_pixels  # number of pixels in the boxes before
    keys = np.zeros((len(boxes), 2), np.int64) if erasures.keys is None else erasures.keys
    columns = np.column_stack([num_pixels, starts, erasures.rows, boxes[:, [0, 1, 3]], keys])
    (sent,) = Transfer(images.device).send(torch.from_numpy(columns))
    box_of_pixel = torch.repeat_interleave(sent[:, 0], output_size=total)
    _, start, row, top, left, width, *key = sent[box_of_pixel].unbind(1)
    place = torch.arange(total, device=images.device) - start
    y = top + place // width
    x = left + place % width
    if erasures.keys is None:
        fill = images.new_zeros(())
    else:
        fill = noise(key[0], key[1], pixel=y * side + x).to(images.dtype)
    # Boxes of an image that overlap have the same values. To copy the images would take 10 times
    # as long as to erase a part of them.
    images.permute(0, 2, 3, 1)[row, y, x] = fill


def _erase_one_by_one(images: Tensor, erasures: Erasures, boxes: IntArray) -> None:
    pixels = torch.arange(images.shape[2] * images.shape[3]).view(images.shape[2:])
    for number, (row, box) in enumerate(zip(erasures.rows.tolist(), boxes.tolist(), strict=True)):
        top, left, height, width = box
        there = slice(top, top + height), slice(left, left + width)
        part = images[row, :, *there]
        if erasures.keys is None:
            part.zero_()
        else:
            first_key, second_key = erasures.keys[number].tolist()
            values = noise(first_key, second_key, pixel=pixels[there].flatten())
            part.copy_(values.view(height, width, 3).permute(2, 0, 1))


def noise(first_key: Tensor | int, second_key: Tensor | int, *, pixel: Tensor) -> Tensor:
    """Return P x 3 values of a standard normal distribution, float32, for P pixels of images.

    A value depends on the two keys of the image, of 32 bits each, the number of the pixel in the
    image, and the channel; pixels, and keys that differ, are P of int64.
    """
    words = _scrambled(_scrambled(pixel ^ first_key) ^ second_key)
    more = _scrambled(words ^ first_key)
    # 16 bits for each channel choose one of the quantiles.
    ranks = torch.stack([words & 0xFFFF, words >> 16, more & 0xFFFF], dim=1)
    return _quantiles(pixel.device)[ranks]


def _scrambled(words: Tensor) -> Tensor:
    """Return a permutation of the 32-bit integers whose every bit depends on all bits.

    Wellons' hash of two rounds (hash-prospector, 2018, improved by TheIronBorn), in int64.
    """
    # The second factor less 2**32 has the same lower bits, and no product exceeds 63 bits.
    words = words ^ (words >> 16)
    words = (words * 0x21F0AAAD) & _WORD
    words = words ^ (words >> 15)
    words = (words * (0xD35A2D97 - 2**32)) & _WORD
    return words ^ (words >> 15)


@lru_cache(maxsize=8)  # of a worker's device, and of others in tests
def _quantiles(device: torch.device) -> Tensor:
    """Return the centres of QUANTILES parts of the normal distribution of equal probability."""
    normal = NormalDist()
    below = [normal.inv_cdf((rank + 0.5) / QUANTILES) for rank in range(QUANTILES // 2)]
    values = np.array(below, dtype=np.float32)
    (sent,) = Transfer(device).send(torch.from_numpy(np.concatenate([values, -values[::-1]])))
    return sent

"""Crops, flips and translations: pure functions of the seed and the position in the run.

The decoders apply these numbers and draw none; `translated` moves decoded images, after any of
them. A box is (top, left, height, width) in source pixels, resized to the model's square input.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from largebatch.data.decoders.prefetch import Transfer
from largebatch.data.index.index import Index
from largebatch.data.order import WORDS_PER_BLOCK, Stream, random_words, samples_at
from largebatch.data.types import Batches, BoolArray, Decode, IntArray, Request

FloatArray = npt.NDArray[np.float64]

ATTEMPTS = 10  # number of random boxes drawn before the central one is used, as in torchvision


def train_request(  # noqa: PLR0913 -- the settings of the augmentation
    index: Index,
    positions: range,
    *,
    seed: int,
    area: tuple[float, float] | None,
    aspect: tuple[float, float],
    flip: bool | Literal["alternating"],
    translate: int = 0,
) -> Request:
    """Return the request for the samples at these positions of the run, augmented for training.

    Whole images are shown if `area` is None.
    """
    samples = samples_at(positions, seed=seed, num_samples=len(index), trained=index.trained)
    heights, widths = index.heights[samples], index.widths[samples]
    if area is None:
        boxes = whole_boxes(heights, widths)
    else:
        boxes = random_boxes(seed, positions, heights, widths, area=area, aspect=aspect)
    if flip == "alternating":
        trained = len(index) if index.trained is None else len(index.trained)
        epochs = np.arange(positions.start, positions.stop) // trained
        flips = first_flips(seed, len(index))[samples] ^ (epochs % 2).astype(np.bool_)
    elif flip:
        flips = random_flips(seed, positions)
    else:
        flips = np.zeros(len(samples), dtype=np.bool_)
    shifts = random_shifts(seed, positions, largest=translate) if translate else None
    return Request(samples=samples, boxes=boxes, flips=flips, shifts=shifts)


def clean_request(
    index: Index, samples: IntArray, *, image_size: int, resize: int | None
) -> Request:
    """Return the request for these samples as in validation: the centre, or all if no `resize`."""
    boxes = clean_boxes(
        index.heights[samples], index.widths[samples], image_size=image_size, resize=resize
    )
    return Request(samples=samples, boxes=boxes, flips=np.zeros(len(samples), dtype=np.bool_))


def clean_boxes(
    heights: IntArray, widths: IntArray, *, image_size: int, resize: int | None
) -> IntArray:
    """Return the N x 4 boxes of validation: the centre, or whole images if `resize` is None."""
    if resize is None:
        return whole_boxes(heights, widths)
    return center_boxes(heights, widths, image_size=image_size, resize=resize)


def random_boxes(
    seed: int,
    positions: range,
    heights: IntArray,
    widths: IntArray,
    *,
    area: tuple[float, float],
    aspect: tuple[float, float],
) -> IntArray:
    """Return N x 4 random boxes, drawn like torchvision's RandomResizedCrop.

    Each attempt draws a fraction of the area, uniform in `area`, an aspect ratio (width / height),
    log-uniform in `aspect`, and a position. The first box that fits is used; if none of the ten
    fits, the largest central box of a permitted aspect ratio.
    """
    words = random_words(
        seed, Stream.CROP, block=positions.start * ATTEMPTS, num_blocks=len(positions) * ATTEMPTS
    )
    u_area, u_aspect, u_top, u_left = np.moveaxis(_uniform(words).reshape(-1, ATTEMPTS, 4), 2, 0)
    pixels = (heights * widths)[:, None] * (area[0] + (area[1] - area[0]) * u_area)
    narrowest, widest = np.log(aspect)
    shape = np.exp(narrowest + (widest - narrowest) * u_aspect)
    box_widths = np.rint(np.sqrt(pixels * shape)).astype(np.int64)
    box_heights = np.rint(np.sqrt(pixels / shape)).astype(np.int64)

    spare_heights, spare_widths = heights[:, None] - box_heights, widths[:, None] - box_widths
    fits = (box_heights > 0) & (box_widths > 0) & (spare_heights >= 0) & (spare_widths >= 0)
    tops = (u_top * (spare_heights + 1)).astype(np.int64)
    lefts = (u_left * (spare_widths + 1)).astype(np.int64)
    attempts = np.stack([tops, lefts, box_heights, box_widths], axis=-1)
    chosen = attempts[np.arange(len(attempts)), fits.argmax(axis=1)]
    high = np.minimum(heights, np.rint(widths / aspect[0])).astype(np.int64)
    wide = np.minimum(widths, np.rint(heights * aspect[1])).astype(np.int64)
    central = _centered(heights, widths, np.maximum(high, 1), np.maximum(wide, 1))
    return np.where(fits.any(axis=1)[:, None], chosen, central)


def random_flips(seed: int, positions: range) -> BoolArray:
    """Return N booleans, True with probability 1/2."""
    words = random_words(seed, Stream.FLIP, block=positions.start, num_blocks=len(positions))
    return (words[:, 0] >> np.uint64(63)).astype(np.bool_)


@lru_cache(maxsize=2)
def first_flips(seed: int, num_samples: int) -> BoolArray:
    """Return a boolean for each sample: True if alternating flips begin with its mirror image."""
    num_blocks = -(-num_samples // WORDS_PER_BLOCK)
    words = random_words(seed, Stream.FIRST_FLIP, block=0, num_blocks=num_blocks)
    return (words.reshape(-1)[:num_samples] >> np.uint64(63)).astype(np.bool_)


def random_shifts(seed: int, positions: range, *, largest: int) -> IntArray:
    """Return N x 2 whole numbers, uniform from -largest to largest."""
    words = random_words(seed, Stream.TRANSLATION, block=positions.start, num_blocks=len(positions))
    return (_uniform(words[:, :2]) * (2 * largest + 1)).astype(np.int64) - largest


def center_boxes(heights: IntArray, widths: IntArray, *, image_size: int, resize: int) -> IntArray:
    """Return the central squares that replace the usual resize and centre crop.

    The side is short side * image_size / resize, rounded to whole source pixels: edges differ by
    less than one.

    >>> center_boxes(np.array([512]), np.array([640]), image_size=224, resize=256).tolist()
    [[32, 96, 448, 448]]
    """
    sides = np.rint(np.minimum(heights, widths) * image_size / resize).astype(np.int64)
    return _centered(heights, widths, np.maximum(sides, 1), np.maximum(sides, 1))


def whole_boxes(heights: IntArray, widths: IntArray) -> IntArray:
    """Return boxes that cover whole images; resizing may change their aspect ratio."""
    return _centered(heights, widths, heights, widths)


def _centered(
    heights: IntArray, widths: IntArray, box_heights: IntArray, box_widths: IntArray
) -> IntArray:
    tops, lefts = (heights - box_heights) // 2, (widths - box_widths) // 2
    return np.stack([tops, lefts, box_heights, box_widths], axis=-1)


def _uniform(words: npt.NDArray[np.uint64]) -> FloatArray:
    """Convert random words to float64 in [0, 1), from their upper 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


@contextmanager
def translated(opened: AbstractContextManager[Decode]) -> Iterator[Decode]:
    """Open a decoder, and move its images by `Request.shifts`."""
    shifts: deque[IntArray | None] = deque()  # of the requests that the decoder reads ahead

    def noted(requests: Iterable[Request]) -> Iterator[Request]:
        for request in requests:
            shifts.append(request.shifts)
            yield request

    def moved(decode: Decode, requests: Iterable[Request]) -> Batches:
        shifts.clear()
        with closing(decode(noted(requests))) as batches:
            for batch in batches:
                shift = shifts.popleft()
                if shift is None:
                    yield batch
                else:
                    (moves,) = Transfer(batch.images.device).send(torch.from_numpy(shift))
                    yield batch._replace(images=translate(batch.images, moves))

    with opened as decode:
        yield partial(moved, decode)


def translate(images: Tensor, shifts: Tensor) -> Tensor:
    """Return N x C x H x W images moved down and right by `shifts`, N x 2, filled by reflection.

    >>> image = torch.arange(4.0).view(1, 1, 1, 4)
    >>> translate(image, torch.tensor([[0, 1]])).flatten().tolist()
    [1.0, 0.0, 1.0, 2.0]
    """
    channels_last = images.is_contiguous(memory_format=torch.channels_last)
    order = torch.channels_last if channels_last else torch.contiguous_format
    rows = reflected(shifts[:, 0], num_pixels=images.shape[2])[:, None, :, None]
    columns = reflected(shifts[:, 1], num_pixels=images.shape[3])[:, None, None, :]
    numbers = torch.arange(len(images), device=images.device).view(-1, 1, 1, 1)
    channels = torch.arange(images.shape[1], device=images.device).view(1, -1, 1, 1)
    return images[numbers, channels, rows, columns].contiguous(memory_format=order)


def reflected(shifts: Tensor, *, num_pixels: int) -> Tensor:
    """Return N x num_pixels places to read, reflected at the first and the last pixel."""
    last = num_pixels - 1
    places = torch.arange(num_pixels, device=shifts.device) - shifts[:, None]
    return last - (last - places.abs()).abs()

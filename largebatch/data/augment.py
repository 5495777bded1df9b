"""Augmentation of training images: a pure function of the seed and the position in the run.

`train_request` draws all numbers of a batch. A decoder crops and flips; `augment` does the rest on
the device, behind any decoder, cache or prefetcher. A box is (top, left, height, width) in source
pixels, resized to the model's square input.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from largebatch.data.decoders.prefetch import Transfer, ahead
from largebatch.data.erasing import draw_erasures, erase
from largebatch.data.index.index import Index
from largebatch.data.mixing import draw_pairs, mix
from largebatch.data.operations.applying import operate
from largebatch.data.operations.draws import draw
from largebatch.data.order import (
    WORDS_PER_BLOCK,
    Stream,
    occurrences_at,
    random_words,
    samples_at,
    uniform,
)
from largebatch.data.types import (
    Batch,
    Batches,
    BoolArray,
    DecodedBatches,
    IntArray,
    Request,
    View,
)
from largebatch.recipe.data import Data

ATTEMPTS = 10  # number of random boxes drawn before the central one is used, as in torchvision


def train_request(
    index: Index,
    positions: range,
    data: Data,
    view: View,
    *,
    seed: int,
    mixes: bool = False,
) -> Request:
    """Return the request for the samples at these positions of the run, augmented for training.

    `view` is how the model sees them; `mixes` is True if `data.mix` has not ended there.
    """
    samples = samples_at(
        positions,
        seed=seed,
        num_samples=len(index),
        trained=index.trained,
        repeats=data.repeats,
        order=data.order,
    )
    heights = index.heights[samples]
    widths = index.widths[samples]
    if data.crop_area is None:
        boxes = whole_boxes(heights, widths)
    else:
        boxes = random_boxes(
            seed, positions, heights, widths, area=data.crop_area, aspect=data.crop_aspect
        )
    if data.flip == "alternating":
        # Every other occurrence, which is every other epoch without repeats, shows the mirror
        # image (Jordan 2024, arXiv:2404.00498): with random flips half of the images look the
        # same in two epochs in a row.
        num_trained = len(index) if index.trained is None else len(index.trained)
        occurrences = occurrences_at(positions, num_samples=num_trained, repeats=data.repeats)
        flips = first_flips(seed, len(index))[samples] ^ (occurrences % 2).astype(np.bool_)
    elif data.flip:
        flips = random_flips(seed, positions)
    else:
        flips = np.zeros(len(samples), dtype=np.bool_)
    request = Request(samples=samples, boxes=boxes, flips=flips, start=positions.start)
    if data.translate:
        request = replace(request, shifts=random_shifts(seed, positions, largest=data.translate))
    if data.augment is not None:
        request = replace(request, operations=draw(data.augment, seed, positions, view))
    if data.erase is not None:
        request = replace(request, erasures=draw_erasures(seed, positions, data.erase))
    if mixes:
        assert data.mix is not None
        pairs = draw_pairs(data.mix, positions, seed=seed, classes=len(index.classes))
        request = replace(request, mix=pairs)
    return request


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
    # A block of four words for each attempt, used or not: a position finds its own blocks.
    words = random_words(
        seed, Stream.CROP, block=positions.start * ATTEMPTS, num_blocks=len(positions) * ATTEMPTS
    )
    u_area, u_aspect, u_top, u_left = np.moveaxis(uniform(words).reshape(-1, ATTEMPTS, 4), 2, 0)
    pixels = (heights * widths)[:, None] * (area[0] + (area[1] - area[0]) * u_area)
    narrowest, widest = np.log(aspect)
    shape = np.exp(narrowest + (widest - narrowest) * u_aspect)
    box_widths = np.rint(np.sqrt(pixels * shape)).astype(np.int64)
    box_heights = np.rint(np.sqrt(pixels / shape)).astype(np.int64)

    spare_heights = heights[:, None] - box_heights
    spare_widths = widths[:, None] - box_widths
    fits = (box_heights > 0) & (box_widths > 0) & (spare_heights >= 0) & (spare_widths >= 0)
    tops = (u_top * (spare_heights + 1)).astype(np.int64)
    lefts = (u_left * (spare_widths + 1)).astype(np.int64)
    attempts = np.stack([tops, lefts, box_heights, box_widths], axis=-1)
    first_fit = attempts[np.arange(len(attempts)), fits.argmax(axis=1)]
    high = np.minimum(heights, np.rint(widths / aspect[0])).astype(np.int64)
    wide = np.minimum(widths, np.rint(heights * aspect[1])).astype(np.int64)
    central = _centered(heights, widths, np.maximum(high, 1), np.maximum(wide, 1))
    return np.where(fits.any(axis=1)[:, None], first_fit, central)


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
    return (uniform(words[:, :2]) * (2 * largest + 1)).astype(np.int64) - largest


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
    tops = (heights - box_heights) // 2
    lefts = (widths - box_widths) // 2
    return np.stack([tops, lefts, box_heights, box_widths], axis=-1)


@contextmanager
def open_augmentation(threads: int) -> Iterator[Callable[[DecodedBatches], Batches]]:
    """Yield what augments the batches of a decoder; its threads end with the block.

    The threads share the images of a batch on the host, ahead of its use. Without them a batch is
    augmented when it is asked for, as a device does that later.
    """
    if threads == 0:
        yield augmented
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="augment") as pool:

        def augmented_ahead(decoded: DecodedBatches) -> Batches:
            with closing(augmented(decoded, pool)) as batches, closing(ahead(batches)) as prepared:
                yield from prepared

        yield augmented_ahead


def augmented(decoded: DecodedBatches, pool: Executor | None = None) -> Batches:
    """Yield the batches of a decoder, augmented; close the decoder with them."""
    with closing(decoded):
        for request, batch in decoded:
            yield augment(batch, request, pool)


def augment(batch: Batch, request: Request, pool: Executor | None = None) -> Batch:
    """Apply to a decoded batch, on its device, the numbers of its request that are left to apply.

    Nothing is drawn here and no other place changes decoded images, so the result is the same
    behind every decoder and on any number of workers. A clean request has no such numbers. On the
    host the threads of `pool` share the images.
    """
    if request.shifts is not None:
        (shifts,) = Transfer(batch.images.device).send(torch.from_numpy(request.shifts))
        batch = batch._replace(images=translate(batch.images, shifts))
    if request.operations is not None:
        batch = batch._replace(images=operate(batch.images, request.operations, pool))
    if request.erasures is not None:
        batch = batch._replace(images=erase(batch.images, request.erasures))
    if request.mix is not None:
        batch = mix(batch, request.mix)
    return batch


def translate(images: Tensor, shifts: Tensor) -> Tensor:
    """Return N x C x H x W images moved down and right by `shifts`, N x 2, filled by reflection.

    >>> image = torch.arange(4.0).view(1, 1, 1, 4)
    >>> translate(image, torch.tensor([[0, 1]])).flatten().tolist()
    [1.0, 0.0, 1.0, 2.0]
    """
    # Indexing by tensors returns channels first, and the model expects the order of its weights.
    channels_last = images.is_contiguous(memory_format=torch.channels_last)
    order = torch.channels_last if channels_last else torch.contiguous_format
    rows = reflected(shifts[:, 0], num_pixels=images.shape[2])[:, None, :, None]
    columns = reflected(shifts[:, 1], num_pixels=images.shape[3])[:, None, None, :]
    numbers = torch.arange(len(images), device=images.device).view(-1, 1, 1, 1)
    channels = torch.arange(images.shape[1], device=images.device).view(1, -1, 1, 1)
    return images[numbers, channels, rows, columns].contiguous(memory_format=order)


def reflected(shifts: Tensor, *, num_pixels: int) -> Tensor:
    """Return the N x num_pixels pixels to read, reflected at the first and the last one."""
    last = num_pixels - 1
    pixels = torch.arange(num_pixels, device=shifts.device) - shifts[:, None]
    return last - (last - pixels.abs()).abs()

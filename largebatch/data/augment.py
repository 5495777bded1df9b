"""Which part of each image is shown: pure functions of the seed and the position in the run.

The decoders apply these numbers and draw none, so every decoder, on any number of workers, shows
the same part of the same image. A box is (top, left, height, width) in source pixels; it is
resized to the square the model sees.
"""

import numpy as np
import numpy.typing as npt

from largebatch.data.batches import samples_at
from largebatch.data.index.index import Index
from largebatch.data.order import Stream, random_words
from largebatch.data.types import BoolArray, IntArray, Request

FloatArray = npt.NDArray[np.float64]

ATTEMPTS = 10
"""How often a random box is drawn before the central one is taken, as in torchvision."""


def training_samples(index: Index, positions: range, *, seed: int) -> IntArray:
    """Return the samples at these positions of the run: each once an epoch, none held out."""
    return samples_at(positions, seed=seed, num_samples=len(index), trained=index.trained)


def train_request(
    index: Index,
    positions: range,
    *,
    seed: int,
    area: tuple[float, float] | None,
    aspect: tuple[float, float],
    flip: bool,
) -> Request:
    """Ask for the samples at these positions of the run as training shows them.

    `area` None shows whole images.
    """
    samples = training_samples(index, positions, seed=seed)
    heights, widths = index.heights[samples], index.widths[samples]
    if area is None:
        boxes = whole_boxes(heights, widths)
    else:
        boxes = random_boxes(seed, positions, heights, widths, area=area, aspect=aspect)
    flips = random_flips(seed, positions) if flip else np.zeros(len(samples), dtype=np.bool_)
    return Request(samples=samples, boxes=boxes, flips=flips)


def clean_request(
    index: Index, samples: IntArray, *, image_size: int, resize: int | None
) -> Request:
    """Ask for these samples as validation shows them: the centre, or all if `resize` is None."""
    heights, widths = index.heights[samples], index.widths[samples]
    if resize is None:
        boxes = whole_boxes(heights, widths)
    else:
        boxes = center_boxes(heights, widths, image_size=image_size, resize=resize)
    return Request(samples=samples, boxes=boxes, flips=np.zeros(len(samples), dtype=np.bool_))


def random_boxes(
    seed: int,
    positions: range,
    heights: IntArray,
    widths: IntArray,
    *,
    area: tuple[float, float],
    aspect: tuple[float, float],
) -> IntArray:
    """Return N x 4 random boxes as torchvision's RandomResizedCrop draws them.

    Each attempt draws a part of the area, evenly within `area`, a shape (width over height), evenly
    on the logarithm within `aspect`, and a place. The first that fits is taken; if none of the ten
    does, the largest central box of a permitted shape.
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
    return np.where(fits.any(axis=1)[:, None], chosen, _widest_boxes(heights, widths, aspect))


def random_flips(seed: int, positions: range) -> BoolArray:
    """Return N fair coin tosses."""
    words = random_words(seed, Stream.FLIP, block=positions.start, num_blocks=len(positions))
    return (words[:, 0] >> np.uint64(63)).astype(np.bool_)


def center_boxes(heights: IntArray, widths: IntArray, *, image_size: int, resize: int) -> IntArray:
    """Return the central squares that, once resized, show what the usual two steps show.

    Those are: resize the short side to `resize`, cut the central image_size x image_size. In source
    pixels the square's side is short side * image_size / resize. It is rounded to whole source
    pixels here and to whole resized pixels there, so their edges lie less than one of each apart;
    and an image is resampled to the size wanted, not resampled and then cut.

    >>> center_boxes(np.array([512]), np.array([640]), image_size=224, resize=256).tolist()
    [[32, 96, 448, 448]]
    """
    sides = np.rint(np.minimum(heights, widths) * image_size / resize).astype(np.int64)
    return _centered(heights, widths, np.maximum(sides, 1), np.maximum(sides, 1))


def whole_boxes(heights: IntArray, widths: IntArray) -> IntArray:
    """Return boxes that hold the whole of every image; resizing may change its shape."""
    return _centered(heights, widths, heights, widths)


def _widest_boxes(heights: IntArray, widths: IntArray, aspect: tuple[float, float]) -> IntArray:
    """Return the largest central boxes of a permitted shape."""
    narrowest, widest = aspect
    box_heights = np.minimum(heights, np.rint(widths / narrowest)).astype(np.int64)
    box_widths = np.minimum(widths, np.rint(heights * widest)).astype(np.int64)
    return _centered(heights, widths, np.maximum(box_heights, 1), np.maximum(box_widths, 1))


def _centered(
    heights: IntArray, widths: IntArray, box_heights: IntArray, box_widths: IntArray
) -> IntArray:
    tops, lefts = (heights - box_heights) // 2, (widths - box_widths) // 2
    return np.stack([tops, lefts, box_heights, box_widths], axis=-1)


def _uniform(words: npt.NDArray[np.uint64]) -> FloatArray:
    """Turn random words into float64 numbers in [0, 1), from their upper 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

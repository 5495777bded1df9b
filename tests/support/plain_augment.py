"""Training images image by image: Pillow, torchvision's operations, numbers straight from Philox.

Nothing of largebatch is used here, so that one mistake cannot be on both sides of a comparison.
Images are equal to the last bit of float32: what is computed from them can be compared in float64.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import stats

from largebatch.optional import require_torchvision

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
ASPECT = (3 / 4, 4 / 3)
ERASED_AREA = (0.02, 1 / 3)
ERASED_ASPECT = (0.3, 10 / 3)

ORDER, CROP, FLIP, TRANSLATION, OPERATIONS, ERASE, ERASE_NOISE = 0, 1, 2, 10, 13, 14, 15


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of `data` that change an image, and the seed."""

    seed: int
    size: int
    area: tuple[float, float]
    translate: int
    augment: Literal["rand_augment", "trivial_augment"]
    erased: float
    fill: Literal["constant", "noise"]
    count: int
    repeats: int


def words(seed: int, stream: int, block: int, *, part: int = 0, number: int = 4) -> list[int]:
    """Return words from this block of Philox on."""
    philox = np.random.Philox(key=[seed, stream], counter=[block, part, 0, 0])
    return [int(philox.random_raw()) for _ in range(number)]


def numbers(seed: int, stream: int, block: int) -> list[float]:
    """Return the four numbers in [0, 1) of a block."""
    return [(word >> 11) / 2**53 for word in words(seed, stream, block)]


@cache
def order_of_pass(seed: int, number: int, num_samples: int) -> list[int]:
    """Return the samples of a pass, sorted by random words."""
    drawn = words(seed, ORDER, 0, part=number, number=num_samples)
    return sorted(range(num_samples), key=drawn.__getitem__)


def repeated(samples: Sequence[int], repeats: int) -> Iterator[int]:
    """Yield blocks of 64 samples `repeats` times each, in orders without a common neighbour."""
    num_blocks = len(samples) // 64
    for number in range(num_blocks):
        end = len(samples) if number == num_blocks - 1 else 64 * (number + 1)
        block = samples[64 * number : end]
        size = len(block)
        factors = (factor for factor in range(1, size) if math.gcd(factor, size) == 1)
        for _ in range(repeats):
            factor = next(factors)
            for place in range(size):
                yield block[place * factor % size]


def sample_at(position: int, *, seed: int, num_samples: int, repeats: int) -> int:
    """Return the sample at a position of the run."""
    number, place = divmod(position, num_samples * repeats)
    order = order_of_pass(seed, number, num_samples)
    if repeats == 1:
        return order[place]
    return list(repeated(order, repeats))[place]


def normalised(image: Bytes) -> Floats:
    """Return 3 x H x W in float32."""
    pixels = image.astype(np.float32)
    center = np.array(MEAN, dtype=np.float32) * np.float32(255)
    spread = np.array(STD, dtype=np.float32) * np.float32(255)
    planes: Floats = ((pixels - center) / spread).transpose(2, 0, 1)
    return planes


def resized(image: Image.Image, box: tuple[int, int, int, int], size: int) -> Image.Image:
    """Return a box (top, left, height, width), resized by Pillow."""
    top, left, height, width = box
    part = image.crop((left, top, left + width, top + height))
    return part.resize((size, size), Image.Resampling.BILINEAR)


def clean_image(image: Image.Image, size: int) -> Floats:
    """Return the whole image."""
    return normalised(np.asarray(resized(image, (0, 0, image.height, image.width), size)))


def training_image(image: Image.Image, position: int, settings: Settings) -> Floats:
    """Return the image at a position of the run before it is mixed, 3 x H x W."""
    seed = settings.seed
    box = random_box(image, position, settings)
    square = resized(image, box, settings.size)
    if words(seed, FLIP, position)[0] >> 63:
        square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    down, right = (
        int(number * (2 * settings.translate + 1)) - settings.translate
        for number in numbers(seed, TRANSLATION, position)[:2]
    )
    margin = settings.translate
    sides = ((margin, margin), (margin, margin), (0, 0))
    wide = np.pad(np.asarray(square), sides, mode="reflect")
    moved = wide[margin - down :, margin - right :][: settings.size, : settings.size]
    changed = operated(Image.fromarray(moved), position, settings)
    return erased(normalised(np.asarray(changed)), position, settings)


def random_box(image: Image.Image, position: int, settings: Settings) -> tuple[int, int, int, int]:
    """Return top, left, height and width of the first of ten boxes that fits."""
    least, most = settings.area
    narrowest, widest = (math.log(aspect) for aspect in ASPECT)
    for attempt in range(10):
        u_area, u_aspect, down, right = numbers(settings.seed, CROP, 10 * position + attempt)
        pixels = image.height * image.width * (least + (most - least) * u_area)
        aspect = math.exp(narrowest + (widest - narrowest) * u_aspect)
        height = round(math.sqrt(pixels / aspect))
        width = round(math.sqrt(pixels * aspect))
        spare_rows = image.height - height
        spare_columns = image.width - width
        if height > 0 and width > 0 and spare_rows >= 0 and spare_columns >= 0:
            return int(down * (spare_rows + 1)), int(right * (spare_columns + 1)), height, width
    raise AssertionError("the images of this test have a box that fits")


def operated(image: Image.Image, position: int, settings: Settings) -> Image.Image:
    """Apply torchvision's operations to an image, two of RandAugment or one of any magnitude."""
    require_torchvision()
    from torchvision.transforms import InterpolationMode, autoaugment

    space: dict[str, tuple[Any, bool]]
    if settings.augment == "rand_augment":
        space = autoaugment.RandAugment()._augmentation_space(31, (settings.size, settings.size))
        layers = 2
    else:
        space = autoaugment.TrivialAugmentWide()._augmentation_space(31)
        layers = 1
    for layer in range(layers):
        block = 2 * (layers * position + layer)
        u_kind, _, u_sign, _ = numbers(settings.seed, OPERATIONS, block)
        u_magnitude, *_ = numbers(settings.seed, OPERATIONS, block + 1)
        name = list(space)[int(u_kind * len(space))]
        magnitudes, is_signed = space[name]
        strength = 0.0
        if magnitudes.ndim:
            place = 9 if settings.augment == "rand_augment" else int(31 * u_magnitude)
            strength = magnitudes[place].item()
        if is_signed and u_sign < 0.5:
            strength = -strength
        image = autoaugment._apply_op(
            image, name, strength, interpolation=InterpolationMode.NEAREST, fill=None
        )
    return image


def erased(image: Floats, position: int, settings: Settings) -> Floats:
    """Fill boxes of an image as timm draws them."""
    seed = settings.seed
    first_block = position * (1 + 10 * settings.count)
    u_erased, u_count, *_ = numbers(seed, ERASE, first_block)
    if u_erased >= settings.erased:
        return image
    number = 1 + int(u_count * settings.count)
    least, most = ERASED_AREA
    flattest, tallest = (math.log(aspect) for aspect in ERASED_ASPECT)
    for box in range(number):
        for attempt in range(10):
            block = first_block + 1 + 10 * box + attempt
            u_area, u_aspect, down, right = numbers(seed, ERASE, block)
            area = (least + (most - least) * u_area) / number
            aspect = math.exp(flattest + (tallest - flattest) * u_aspect)
            height = math.sqrt(area * aspect)
            width = math.sqrt(area / aspect)
            if height < 1 and width < 1:
                break
        else:
            continue
        rows = side_of(height, down, settings.size)
        columns = side_of(width, right, settings.size)
        for y in rows:
            for x in columns:
                fill = [0.0] * 3
                if settings.fill == "noise":
                    fill = noise(seed, position, y * settings.size + x)
                image[:, y, x] = fill
    return image


def side_of(length: float, place: float, size: int) -> range:
    """Return the pixels of a side of a box, whose length is a part of the image's side."""
    pixels = min(round(length * size), size - 1)
    first = int(place * (size - pixels + 1))
    return range(first, first + pixels)


def noise(seed: int, position: int, pixel: int) -> list[float]:
    """Return the noise of a pixel, from 32-bit integers of Python and SciPy's quantiles."""
    key, *_ = words(seed, ERASE_NOISE, position)

    def scrambled(word: int) -> int:
        word = (word ^ word >> 16) * 0x21F0AAAD % 2**32
        word = (word ^ word >> 15) * 0xD35A2D97 % 2**32
        return word ^ word >> 15

    first = key % 2**32
    second = key >> 32
    word = scrambled(scrambled(pixel ^ first) ^ second)
    ranks = np.array([word % 2**16, word >> 16, scrambled(word ^ first) % 2**16])
    return list(stats.norm.ppf((ranks + 0.5) / 2**16))

"""The draws of the operations: pure functions of the seed and the position in the run.

Operations, probabilities and strengths are those of three libraries: torchvision 0.28 (RandAugment,
TrivialAugmentWide, ColorJitter), timm 1.0.31 (`rand-m9-mstd0.5-inc1`) and big_vision 0127fb6
(`randaug(2, 10)`). The random numbers are not theirs: distributions agree, single draws do not.
"""

import enum
from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

import numpy as np

from largebatch.data.order import WORDS_PER_BLOCK, Stream, random_words, uniform
from largebatch.data.types import BoolArray, FloatArray, IntArray, Operations, View
from largebatch.recipe import augment as recipe


class Operation(enum.IntEnum):
    """A change of the pixels of an image; the comment is the unit of its strength."""

    IDENTITY = 0
    AUTO_CONTRAST = 1
    EQUALIZE = 2
    INVERT = 3
    ROTATE = 4  # degrees, counter-clockwise
    POSTERIZE = 5  # number of bits that are kept
    SOLARIZE = 6  # values from this one on are inverted
    SOLARIZE_ADD = 7  # added to values below 128
    COLOR = 8  # factor: 0 is grey, 1 the image
    CONTRAST = 9  # factor: 0 is the mean grey, 1 the image
    BRIGHTNESS = 10  # factor: 0 is black, 1 the image
    SHARPNESS = 11  # factor: 0 is smooth, 1 the image
    SHEAR_X = 12  # columns to the left per row downwards
    SHEAR_Y = 13  # rows upwards per column to the right
    TRANSLATE_X = 14  # pixels to the right
    TRANSLATE_Y = 15  # pixels downwards
    CUT_OUT = 16  # half of the side of the square, in pixels
    HUE = 17  # part of the circle of colours
    CONTRAST_BY_SIZE = 18  # factor: 0 is the grey of value height * width / 256, 1 the image


class Filter(enum.IntEnum):
    """How geometry computes a pixel from those around it."""

    NEAREST = 0
    BILINEAR = 1
    BICUBIC = 2


_FILTERS = {
    "nearest": (Filter.NEAREST,),
    "bilinear": (Filter.BILINEAR,),
    "bicubic": (Filter.BICUBIC,),
    "random": (Filter.BILINEAR, Filter.BICUBIC),
}

Strength = Callable[[FloatArray, FloatArray], FloatArray]
"""Returns the strengths of an operation from magnitudes and signs, which are 1 or -1."""

BINS = 31  # number of magnitudes of torchvision

_BLACK = (0, 0, 0)
_GREY = (128, 128, 128)

# Words of an operation: two blocks of Philox, the same for every set, used or not.
_KIND, _APPLIED, _SIGN, _FILTER, _MAGNITUDE, _ANGLE, _DOWN, _RIGHT = range(2 * WORDS_PER_BLOCK)


def draw(section: recipe.Augment, seed: int, positions: range, view: View) -> Operations:
    """Return the operations of the images at these positions of the run.

    `view` is how the model sees the images: their size, and their mean and deviation.
    """
    match section:
        case recipe.RandAugment():
            return _rand_augment(section, seed, positions, view)
        case recipe.TrivialAugment():
            return _trivial_augment(section, seed, positions, view)
        case recipe.ColorJitter():
            return _color_jitter(section, seed, positions, view)
        case _:
            assert_never(section)


def _rand_augment(
    section: recipe.RandAugment, seed: int, positions: range, view: View
) -> Operations:
    numbers = _numbers(seed, positions, layers=section.operations)
    defaults = recipe.SETS[section.set]
    magnitudes = np.full(numbers.shape[:2], section.magnitude)
    if section.std:
        # Box and Muller 1958: two uniform numbers give a normal one.
        radius = np.sqrt(-2.0 * np.log(1.0 - numbers[..., _MAGNITUDE]))
        normal = radius * np.cos(2.0 * np.pi * numbers[..., _ANGLE])
        magnitudes = np.clip(magnitudes + section.std * normal, 0.0, defaults.most)
    drawn = _operations(
        numbers,
        magnitudes,
        _strengths(section, view.image_size),
        view,
        applied=numbers[..., _APPLIED] < (section.probability or defaults.probability),
        interpolation=section.interpolation or defaults.interpolation,
    )
    match section.set:
        case "torchvision":
            return drawn
        case "timm":
            red, green, blue = (min(255, round(255 * value)) for value in view.mean)
            return replace(drawn, fill=(red, green, blue))
        case "big_vision":
            centers = np.floor(numbers[..., [_DOWN, _RIGHT]] * view.image_size)
            # TensorFlow shears about the middle of the first pixel, Pillow about its corner.
            return replace(drawn, fill=_GREY, centers=centers, shear_axis=0.5)


def _trivial_augment(
    section: recipe.TrivialAugment, seed: int, positions: range, view: View
) -> Operations:
    numbers = _numbers(seed, positions, layers=1)
    return _operations(
        numbers,
        np.floor(numbers[..., _MAGNITUDE] * BINS),
        _of_torchvision(shear=0.99, pixels=32.0, degrees=135.0, factor=0.99, bits=6),
        view,
        applied=np.ones(numbers.shape[:2], dtype=np.bool_),
        interpolation=section.interpolation,
    )


def _color_jitter(
    section: recipe.ColorJitter, seed: int, positions: range, view: View
) -> Operations:
    numbers = _numbers(seed, positions, layers=1)[:, 0]
    widths = np.array([section.brightness, section.contrast, section.saturation])
    lows = np.maximum(0.0, 1.0 - widths)
    factors = lows + numbers[:, :3] * (1.0 + widths - lows)
    hues = (2.0 * numbers[:, 3:4] - 1.0) * section.hue
    strengths = np.concatenate([factors, hues], axis=1)
    kinds = np.array(
        [Operation.BRIGHTNESS, Operation.CONTRAST, Operation.COLOR, Operation.HUE], dtype=np.int64
    )
    kinds[np.array([*widths, section.hue]) == 0.0] = Operation.IDENTITY
    order = np.argsort(numbers[:, 4:], axis=1)
    return Operations(
        kinds=kinds[order],
        strengths=np.take_along_axis(strengths, order, axis=1),
        filters=np.zeros_like(order),
        centers=np.zeros((*order.shape, 2)),
        fill=_BLACK,
        shear_axis=0.0,
        view=view,
    )


def _numbers(seed: int, positions: range, *, layers: int) -> FloatArray:
    """Return N x layers x 8 numbers in [0, 1); those of a position depend on it alone."""
    blocks = 2 * layers
    words = random_words(
        seed,
        Stream.OPERATIONS,
        block=positions.start * blocks,
        num_blocks=len(positions) * blocks,
    )
    return uniform(words).reshape(len(positions), layers, 2 * WORDS_PER_BLOCK)


def _choice(numbers: FloatArray, values: tuple[int, ...]) -> IntArray:
    return np.array(values, dtype=np.int64)[(numbers * len(values)).astype(np.int64)]


def _operations(
    numbers: FloatArray,
    magnitudes: FloatArray,
    strength_of: dict[Operation, Strength],
    view: View,
    *,
    applied: BoolArray,
    interpolation: recipe.GeometryFilter,
) -> Operations:
    """Draw the kinds, with equal shares, and compute their strengths."""
    kinds = _choice(numbers[..., _KIND], tuple(strength_of))
    kinds[~applied] = Operation.IDENTITY
    signs = np.where(numbers[..., _SIGN] < 0.5, -1.0, 1.0)
    strengths = np.zeros(kinds.shape)
    for kind, strength in strength_of.items():
        has_kind = kinds == kind
        strengths[has_kind] = strength(magnitudes[has_kind], signs[has_kind])
    return Operations(
        kinds=kinds,
        strengths=strengths,
        filters=_choice(numbers[..., _FILTER], _FILTERS[interpolation]),
        centers=np.zeros((*kinds.shape, 2)),
        fill=_BLACK,
        shear_axis=0.0,
        view=view,
    )


def _strengths(section: recipe.RandAugment, image_size: int) -> dict[Operation, Strength]:
    match section.set:
        case "torchvision":
            # 150 pixels of the 331 that AutoAugment's images had (arXiv:1805.09501).
            pixels = image_size * 150 / 331
            return _of_torchvision(shear=0.3, pixels=pixels, degrees=30.0, factor=0.9, bits=4)
        case "timm":
            return _of_timm(image_size, increasing=section.increasing)
        case "big_vision":
            return _of_big_vision()


def _of_torchvision(
    *, shear: float, pixels: float, degrees: float, factor: float, bits: int
) -> dict[Operation, Strength]:
    """Return torchvision's strengths, which are those given at a magnitude of 30."""
    last = BINS - 1

    def whole_pixels(magnitudes: FloatArray, signs: FloatArray) -> FloatArray:
        # torchvision's float32 truncates 32 * 15 / 30 to 15 on some processors; here it is 16.
        return signs * np.floor(magnitudes * pixels / last + 1e-9)

    changed = _signed(factor, at=last, center=1.0)
    return {
        Operation.IDENTITY: _none,
        Operation.SHEAR_X: _signed(shear, at=last),
        Operation.SHEAR_Y: _signed(shear, at=last),
        Operation.TRANSLATE_X: whole_pixels,
        Operation.TRANSLATE_Y: whole_pixels,
        Operation.ROTATE: _signed(degrees, at=last),
        Operation.BRIGHTNESS: changed,
        Operation.COLOR: changed,
        Operation.CONTRAST: changed,
        Operation.SHARPNESS: changed,
        Operation.POSTERIZE: lambda magnitudes, _: 8.0 - np.rint(magnitudes * bits / last),
        # In this order of operations, because 68.00000000000001 would keep the value 68.
        Operation.SOLARIZE: lambda magnitudes, _: 255.0 * (last - magnitudes) / last,
        Operation.AUTO_CONTRAST: _none,
        Operation.EQUALIZE: _none,
    }


def _of_timm(image_size: int, *, increasing: bool) -> dict[Operation, Strength]:
    factor: Strength = _rising_factor
    bits = _whole(4)
    threshold = _whole(256)
    if increasing:
        factor = _distant_factor
        bits = _whole(4, down=True)
        threshold = _whole(256, down=True)
    return {
        Operation.AUTO_CONTRAST: _none,
        Operation.EQUALIZE: _none,
        Operation.INVERT: _none,
        Operation.ROTATE: _signed(30.0, at=10),
        Operation.POSTERIZE: bits,
        Operation.SOLARIZE: threshold,
        Operation.SOLARIZE_ADD: _whole(110),
        Operation.COLOR: factor,
        Operation.CONTRAST: factor,
        Operation.BRIGHTNESS: factor,
        Operation.SHARPNESS: factor,
        Operation.SHEAR_X: _signed(0.3, at=10),
        Operation.SHEAR_Y: _signed(0.3, at=10),
        Operation.TRANSLATE_X: _signed(0.45 * image_size, at=10),
        Operation.TRANSLATE_Y: _signed(0.45 * image_size, at=10),
    }


def _of_big_vision() -> dict[Operation, Strength]:
    def threshold(magnitudes: FloatArray, signs: FloatArray) -> FloatArray:
        # TensorFlow stores the threshold in 8 bits: 256, that of magnitude 10, becomes 0, and the
        # published runs have inverted the whole image.
        return _whole(256)(magnitudes, signs) % 256

    def bits(magnitudes: FloatArray, signs: FloatArray) -> FloatArray:
        # TensorFlow shifts the values by 7 places where it is told 8.
        return np.maximum(1, _whole(4)(magnitudes, signs))

    return {
        Operation.AUTO_CONTRAST: _none,
        Operation.EQUALIZE: _none,
        Operation.INVERT: _none,
        Operation.ROTATE: _signed(30.0, at=10),
        Operation.POSTERIZE: bits,
        Operation.SOLARIZE: threshold,
        Operation.COLOR: _rising_factor,
        Operation.CONTRAST_BY_SIZE: _rising_factor,
        Operation.BRIGHTNESS: _rising_factor,
        Operation.SHARPNESS: _rising_factor,
        Operation.SHEAR_X: _signed(0.3, at=10),
        Operation.SHEAR_Y: _signed(0.3, at=10),
        Operation.TRANSLATE_X: _signed(100.0, at=10),
        Operation.TRANSLATE_Y: _signed(100.0, at=10),
        Operation.CUT_OUT: _whole(40),
        Operation.SOLARIZE_ADD: _whole(110),
    }


def _none(magnitudes: FloatArray, _signs: FloatArray) -> FloatArray:
    return np.zeros_like(magnitudes)


def _rising_factor(magnitudes: FloatArray, _signs: FloatArray) -> FloatArray:
    """Return factors from 0.1 to 1.9, which is at magnitude 10; 5 does not change the image."""
    return magnitudes / 10 * 1.8 + 0.1


def _distant_factor(magnitudes: FloatArray, signs: FloatArray) -> FloatArray:
    """Return factors whose distance from 1 rises with the magnitude."""
    return np.maximum(0.1, 1.0 + signs * (magnitudes / 10 * 0.9))


def _signed(largest: float, *, at: int, center: float = 0.0) -> Strength:
    """Return strengths on both sides of `center`, at a distance of `largest` for magnitude `at`."""
    return lambda magnitudes, signs: center + signs * (magnitudes / at * largest)


def _whole(largest: int, *, down: bool = False) -> Strength:
    """Return whole strengths from 0 to `largest`, which is at magnitude 10, or `down` from it."""

    def strength(magnitudes: FloatArray, _signs: FloatArray) -> FloatArray:
        whole = np.trunc(magnitudes / 10 * largest)
        return largest - whole if down else whole

    return strength

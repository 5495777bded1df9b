"""The numbers that operations are computed with: tables of 256 values, affine matrices, boxes.

Both implementations use them. A pixel of column x and row y is the square from (x, y) to
(x + 1, y + 1), as in Pillow, so its centre is at x + 1/2 and y + 1/2.
"""

import numpy as np

from largebatch.data.operations.draws import Operation
from largebatch.data.types import Bytes, FloatArray, IntArray

ADDED_BELOW = 128  # SOLARIZE_ADD raises values below this one, in timm and in big_vision

BY_TABLE = (
    Operation.INVERT,
    Operation.POSTERIZE,
    Operation.SOLARIZE,
    Operation.SOLARIZE_ADD,
    Operation.BRIGHTNESS,
    Operation.CONTRAST_BY_SIZE,
)
"""Operations that replace each value by another one, whatever the image."""

GEOMETRY = (
    Operation.ROTATE,
    Operation.SHEAR_X,
    Operation.SHEAR_Y,
    Operation.TRANSLATE_X,
    Operation.TRANSLATE_Y,
)
"""Operations that move pixels."""


def table(kind: int, strength: float, *, num_pixels: int) -> Bytes:
    """Return the new value of each value from 0 to 255; `num_pixels` are those of an image.

    >>> table(Operation.SOLARIZE, 254.0, num_pixels=1)[-4:].tolist()
    [252, 253, 1, 0]
    """
    values = np.arange(256, dtype=np.int64)
    changed: IntArray
    match kind:
        case Operation.INVERT:
            changed = 255 - values
        case Operation.POSTERIZE:
            changed = values & (256 - 2 ** (8 - int(strength)))
        case Operation.SOLARIZE:
            changed = np.where(values < strength, values, 255 - values)
        case Operation.SOLARIZE_ADD:
            added = np.minimum(255, values + int(strength))
            changed = np.where(values < ADDED_BELOW, added, values)
        case Operation.BRIGHTNESS:
            changed = blend(0, values, strength)
        case Operation.CONTRAST_BY_SIZE:
            # big_vision divides the sum of the histogram, which is the number of pixels, by its
            # 256 bins: the grey is 196 for every image of 224 x 224.
            changed = blend(min(255, num_pixels // 256), values, strength)
        case _:
            raise AssertionError(kind)
    return changed.astype(np.uint8)


def blend(begin: int, values: IntArray, factor: float) -> IntArray:
    """Return whole values at `factor` on the way from `begin` to `values`, in 0 .. 255."""
    # Pillow computes in float32 and truncates.
    way = np.float32(factor) * (values - begin).astype(np.float32)
    blended: IntArray = np.clip(np.float32(begin) + way, 0, 255).astype(np.int64)
    return blended


def matrices(
    kinds: IntArray, strengths: FloatArray, *, height: int, width: int, shear_axis: float
) -> FloatArray:
    """Return n x 6 numbers a, b, c, d, e, f: the pixel at (x, y) shows (ax + by + c, dx + ey + f).

    >>> matrix = matrices(np.array([14]), np.array([3.0]), height=8, width=8, shear_axis=0.0)
    >>> matrix.tolist()
    [[1.0, 0.0, -3.0, 0.0, 1.0, 0.0]]
    """
    result = np.tile([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], (len(kinds), 1))
    is_shear_x = kinds == Operation.SHEAR_X
    result[is_shear_x, 1] = strengths[is_shear_x]
    result[is_shear_x, 2] = -shear_axis * strengths[is_shear_x]
    is_shear_y = kinds == Operation.SHEAR_Y
    result[is_shear_y, 3] = strengths[is_shear_y]
    result[is_shear_y, 5] = -shear_axis * strengths[is_shear_y]
    is_right = kinds == Operation.TRANSLATE_X
    result[is_right, 2] = -strengths[is_right]
    is_down = kinds == Operation.TRANSLATE_Y
    result[is_down, 5] = -strengths[is_down]

    is_turned = kinds == Operation.ROTATE
    angles = np.radians(strengths[is_turned])
    # Rounded like Pillow's, so that a quarter of a turn moves whole pixels.
    cos = np.round(np.cos(angles), 15)
    sin = np.round(np.sin(angles), 15)
    middle_x = width / 2
    middle_y = height / 2
    offset_x = middle_x - cos * middle_x + sin * middle_y
    offset_y = middle_y - sin * middle_x - cos * middle_y
    result[is_turned] = np.stack([cos, -sin, offset_x, sin, cos, offset_y], axis=1)
    return result


def boxes(centers: FloatArray, strengths: FloatArray, *, height: int, width: int) -> IntArray:
    """Return n x 4 boxes to cut out: top, left, bottom and right, inside the image."""
    low = np.maximum(0, centers - strengths[:, None])
    high = np.minimum([height, width], centers + strengths[:, None])
    return np.concatenate([low, high], axis=1).astype(np.int64)

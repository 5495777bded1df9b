"""EXIF orientation: how a stored image is rotated or mirrored for display.

The index holds the orientation, 1 to 8. Its heights and widths, and so all boxes, are those of the
displayed image: the stored one transposed for 5 to 8, then flipped vertically for UPSIDE and
horizontally for MIRRORED (EXIF 2.32, tag 274). A decoder that decodes whole images orients them
before it crops. A decoder that decodes only a box crops the stored box and orients the resized
square.
"""

import numpy as np
from PIL import Image
from torch import Tensor

from largebatch.data.index.headers import TRANSPOSED
from largebatch.data.index.index import Index
from largebatch.data.types import BoolArray, IntArray, Request

UPSIDE, MIRRORED = (3, 4, 7, 8), (2, 3, 6, 7)

METHODS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Pillow's operation from the stored to the displayed image, by orientation."""


def as_stored(index: Index, request: Request) -> tuple[IntArray, BoolArray]:
    """Return boxes in stored pixels, and flips: False where `turn_resized` also flips."""
    if index.orientations is None:
        return request.boxes, request.flips
    orientations = index.orientations[request.samples]
    if (orientations == 1).all():
        return request.boxes, request.flips
    top, left, height, width = request.boxes.T
    far_top = index.heights[request.samples] - top - height
    far_left = index.widths[request.samples] - left - width
    top = np.where(np.isin(orientations, UPSIDE), far_top, top)
    left = np.where(np.isin(orientations, MIRRORED), far_left, left)
    boxes = np.stack([top, left, height, width], axis=-1)
    transposed = np.isin(orientations, TRANSPOSED)[:, None]
    return (
        np.where(transposed, boxes[:, [1, 0, 3, 2]], boxes),
        request.flips & (orientations == 1),
    )


def turn_resized(images: Tensor, index: Index, request: Request) -> None:
    """Orient, in place, the resized squares of stored boxes, N x C x H x W; flip the oriented."""
    if index.orientations is None:
        return
    orientations = index.orientations[request.samples]
    for row in np.flatnonzero(orientations != 1).tolist():
        orientation, image = int(orientations[row]), images[row]
        if orientation in TRANSPOSED:
            image = image.transpose(1, 2)
        axes = [1] if orientation in UPSIDE else []
        axes += [2] if (orientation in MIRRORED) != bool(request.flips[row]) else []
        images[row] = image.flip(axes)  # a copy

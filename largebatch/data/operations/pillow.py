"""The operations on one image of the host, by Pillow's own kernels, which release the GIL.

torchvision and timm call the same kernels, so the pixels are theirs.
"""

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from largebatch.data.operations import numbers
from largebatch.data.operations.draws import Filter, Operation
from largebatch.data.types import Bytes, Operations

_RESAMPLING = {
    Filter.NEAREST: Image.Resampling.NEAREST,
    Filter.BILINEAR: Image.Resampling.BILINEAR,
    Filter.BICUBIC: Image.Resampling.BICUBIC,
}


def apply(pixels: Bytes, operations: Operations, row: int) -> Bytes:
    """Return an image, H x W x 3 bytes, after the operations of this row of a batch."""
    image = Image.fromarray(pixels)
    for layer in range(operations.kinds.shape[1]):
        image = _operate(image, operations, row, layer)
    return np.asarray(image)


def _operate(image: Image.Image, operations: Operations, row: int, layer: int) -> Image.Image:  # noqa: PLR0911 -- one for each operation
    kind = Operation(operations.kinds[row, layer])
    strength = float(operations.strengths[row, layer])
    width, height = image.size
    match kind:
        case Operation.IDENTITY:
            return image
        case Operation.AUTO_CONTRAST:
            return ImageOps.autocontrast(image)
        case Operation.EQUALIZE:
            return ImageOps.equalize(image)
        case Operation.COLOR:
            return ImageEnhance.Color(image).enhance(strength)
        case Operation.CONTRAST:
            return ImageEnhance.Contrast(image).enhance(strength)
        case Operation.SHARPNESS:
            return ImageEnhance.Sharpness(image).enhance(strength)
        case Operation.HUE:
            hue, saturation, value = image.convert("HSV").split()
            turned = Image.fromarray(np.asarray(hue) + np.uint8(int(strength * 255) % 256))
            return Image.merge("HSV", (turned, saturation, value)).convert("RGB")
        case Operation.CUT_OUT:
            place = slice(row, row + 1)
            ((top, left, bottom, right),) = numbers.boxes(
                operations.centers[place, layer],
                operations.strengths[place, layer],
                height=height,
                width=width,
            ).tolist()
            changed = image.copy()
            changed.paste(operations.fill, (left, top, right, bottom))
            return changed
        case _ if kind in numbers.BY_TABLE:
            table = numbers.table(kind, strength, num_pixels=height * width)
            return image.point(table.tolist() * 3)
        case _:
            place = slice(row, row + 1)
            (matrix,) = numbers.matrices(
                operations.kinds[place, layer],
                operations.strengths[place, layer],
                height=height,
                width=width,
                shear_axis=operations.shear_axis,
            ).tolist()
            return image.transform(
                image.size,
                Image.Transform.AFFINE,
                matrix,
                resample=_RESAMPLING[Filter(operations.filters[row, layer])],
                fillcolor=operations.fill,
            )

"""The operations on one image of the host, by Pillow's own kernels, which release the GIL.

torchvision and timm call the same kernels, so the pixels are theirs.
"""

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from largebatch.data.operations import numbers
from largebatch.data.operations.draws import Filter, Operation
from largebatch.data.types import Bytes, Operations

_RESAMPLING: dict[int, Image.Resampling] = {
    Filter.NEAREST: Image.Resampling.NEAREST,
    Filter.BILINEAR: Image.Resampling.BILINEAR,
    Filter.BICUBIC: Image.Resampling.BICUBIC,
}


class Changes:
    """Applies the operations of a batch, whose images have this height and width, one by one."""

    def __init__(self, operations: Operations, *, height: int, width: int) -> None:
        # Matrices and boxes are computed for all images together, which takes less time.
        number, layers = operations.kinds.shape
        strengths = operations.strengths.ravel()
        matrices = numbers.matrices(
            operations.kinds.ravel(),
            strengths,
            height=height,
            width=width,
            shear_axis=operations.shear_axis,
        )
        centers = operations.centers.reshape(-1, 2)
        boxes = numbers.boxes(centers, strengths, height=height, width=width)
        self._kinds = operations.kinds.tolist()
        self._strengths = operations.strengths.tolist()
        self._filters = operations.filters.tolist()
        self._matrices = matrices.reshape(number, layers, 6).tolist()
        self._boxes = boxes.reshape(number, layers, 4).tolist()
        self._fill = operations.fill

    def apply(self, pixels: Bytes, row: int) -> Bytes:
        """Return an image, H x W x 3 bytes, after the operations of this row of the batch."""
        kinds = self._kinds[row]
        layers = [layer for layer in range(len(kinds)) if kinds[layer] != Operation.IDENTITY]
        if not layers:  # Pillow would copy the image twice
            return pixels
        image = Image.fromarray(pixels)
        for layer in layers:
            image = self._operate(image, row, layer)
        return np.asarray(image)

    def _operate(self, image: Image.Image, row: int, layer: int) -> Image.Image:  # noqa: PLR0911 -- one for each operation
        kind = self._kinds[row][layer]
        strength = self._strengths[row][layer]
        match kind:
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
                top, left, bottom, right = self._boxes[row][layer]
                changed = image.copy()
                changed.paste(self._fill, (left, top, right, bottom))
                return changed
            case _ if kind in numbers.BY_TABLE:
                num_pixels = image.height * image.width
                table = numbers.table(kind, strength, num_pixels=num_pixels)
                return image.point(table.tolist() * 3)
            case _:
                return image.transform(
                    image.size,
                    Image.Transform.AFFINE,
                    self._matrices[row][layer],
                    resample=_RESAMPLING[self._filters[row][layer]],
                    fillcolor=self._fill,
                )

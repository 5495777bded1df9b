"""CIFAR-10 as LARGEBATCH_DATA has it: WebP-lossless mosaics of 5,000 images, 100 rows of 50."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

ROWS, COLUMNS, SIDE = 100, 50, 32


def cut(path: Path) -> npt.NDArray[np.uint8]:
    """Return the images of a mosaic, 5,000 x 32 x 32 x 3."""
    with Image.open(path) as image:
        mosaic = np.asarray(image.convert("RGB"))
    return mosaic.reshape(ROWS, SIDE, COLUMNS, SIDE, 3).swapaxes(1, 2).reshape(-1, SIDE, SIDE, 3)

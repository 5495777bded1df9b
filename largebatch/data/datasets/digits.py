"""Handwritten digits as an image folder: real data without a download.

1,797 grey images of 8 x 8 pixels, the test set of "Optical Recognition of Handwritten Digits"
(Alpaydin and Kaynak 1998, UCI Machine Learning Repository, doi 10.24432/C50P49, CC BY 4.0).
"""

from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from largebatch.errors import DataError
from largebatch.storage import new_folder, user_cache

FULL_SCALE = 16  # value of white


def write_digits() -> Path:
    """Write train/<digit>/*.png and val/<digit>/*.png unless they exist; return the folder.

    The images are sorted by digit, and every fifth one, from the first, is used for validation.
    """
    root = user_cache() / "digits"
    try:
        if not root.is_dir():
            with new_folder(root) as folder:
                _write_images(folder)
    except DataError as error:
        if not root.is_dir():  # otherwise another process was first, with the same images
            raise DataError(f"{error}; XDG_CACHE_HOME sets the folder of the cache") from None
    return root


def load_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return all images, N x 8 x 8 from 0 to 16, and their labels, in UCI's order."""
    with (files(__package__) / "digits.npz").open("rb") as file, np.load(file) as digits:
        return digits["images"], digits["labels"].astype(np.int64)


def _write_images(folder: Path) -> None:
    images, labels = load_digits()
    for number, sample in enumerate(np.argsort(labels, kind="stable")):
        split = "train" if number % 5 else "val"
        pixels = np.rint(images[sample] * (255 / FULL_SCALE)).astype(np.uint8)
        path = folder / split / str(labels[sample]) / f"{sample:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)

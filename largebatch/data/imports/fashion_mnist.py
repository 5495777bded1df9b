"""Fashion-MNIST (arXiv:1708.07747): four gzip files of arrays in the idx format.

An idx file is two zero bytes, the kind of number (8: bytes), the number of axes, each axis' length
as a big-endian uint32, and the numbers.
"""

import gzip
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from largebatch.data.imports.arrays import Pixels, Split, data_set
from largebatch.data.imports.faults import DAMAGED, fault
from largebatch.data.packing import DataSet
from largebatch.errors import DataError

URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

SIDE = 28

SPLITS = {"train": "train", "val": "t10k"}
"""Our names and the archives'."""


@contextmanager
def open_archives(source: Path) -> Iterator[DataSet]:
    """Read the four files in the folder `source`."""
    names = [name for split in SPLITS.values() for name in _names(split)]
    missing = [name for name in names if not (source / name).is_file()]
    if missing:
        raise DataError(
            f"{source}: {len(missing)} of the 4 files of Fashion-MNIST are not in this folder; "
            f"download into it: {', '.join(URL + name for name in missing)}"
        )
    splits = {}
    for ours, theirs in SPLITS.items():
        pixels, labels = (
            _read_idx(source / name, axes=axes)
            for name, axes in zip(_names(theirs), (3, 1), strict=True)
        )
        if pixels.shape[1:] != (SIDE, SIDE):
            raise DataError(
                f"{source / _names(theirs)[0]}: holds {' x '.join(map(str, pixels.shape))} pixels, "
                f"expected pictures of {SIDE} x {SIDE}; fetch it again"
            )
        splits[ours] = Split(pixels, labels)
    yield data_set(source, CLASSES, splits)


def _names(split: str) -> tuple[str, str]:
    return f"{split}-images-idx3-ubyte.gz", f"{split}-labels-idx1-ubyte.gz"


def _read_idx(path: Path, *, axes: int) -> Pixels:
    try:
        content = gzip.decompress(path.read_bytes())
    except DAMAGED as error:
        raise fault(path, error, expected="gzip file") from error
    start = 4 + 4 * axes
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) < start:
        raise DataError(
            f"{path}: begins with {content[:4]!r}, expected {bytes([0, 0, 8, axes])!r}: bytes in "
            f"the idx format with {axes} axes; fetch it again"
        )
    shape = struct.unpack(f">{axes}I", content[4:start])
    if len(content) != start + math.prod(shape):
        raise DataError(
            f"{path}: has {len(content) - start} numbers, expected {' x '.join(map(str, shape))}; "
            f"fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)

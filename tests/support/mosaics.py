"""CIFAR-10 as LARGEBATCH_DATA has it: WebP-lossless mosaics of 5,000 images, 100 rows of 50."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from largebatch.data.datasets.arrays import Split, data_set
from largebatch.data.datasets.packing import write_shards

ROWS, COLUMNS, SIDE = 100, 50, 32


def import_cifar10(source: Path, out: Path, *, shard_bytes: int) -> None:
    """Write the mosaics of a folder as shards, in the order of their names, row by row."""
    splits = {}
    for split, theirs in (("train", "train"), ("val", "test")):
        pixels = np.concatenate([cut(path) for path in sorted(source.glob(f"{theirs}-*.webp"))])
        splits[split] = Split(pixels, np.load(source / f"{theirs}_labels.npy"))
    names = (source / "classes.txt").read_text().split()
    write_shards(data_set(names, splits), out, shard_bytes=shard_bytes, progress=lambda *_: None)


def cut(path: Path) -> npt.NDArray[np.uint8]:
    """Return the images of a mosaic, 5,000 x 32 x 32 x 3."""
    with Image.open(path) as image:
        mosaic = np.asarray(image.convert("RGB"))
    return mosaic.reshape(ROWS, SIDE, COLUMNS, SIDE, 3).swapaxes(1, 2).reshape(-1, SIDE, SIDE, 3)

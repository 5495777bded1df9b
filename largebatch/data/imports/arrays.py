"""Data sets that are published as arrays of pixels."""

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from largebatch.data.packing import DataSet, Sample, in_parts
from largebatch.errors import DataError

Pixels = npt.NDArray[np.uint8]


class Split(NamedTuple):
    """Pictures, N x H x W or N x H x W x 3, and their N labels."""

    pixels: Pixels
    labels: npt.NDArray[np.integer]


def data_set(source: Path, classes: Sequence[str], splits: Mapping[str, Split]) -> DataSet:
    """Return the pictures as PNGs, after a check of the labels."""
    for split, (pixels, labels) in splits.items():
        if len(pixels) != len(labels) or not len(labels):
            raise DataError(
                f"{source}: {split} has {len(pixels)} pictures and {len(labels)} labels, expected "
                f"as many of both"
            )
        if labels.min() < 0 or labels.max() >= len(classes):
            raise DataError(
                f"{source}: the labels of {split} go from {labels.min()} to {labels.max()}, "
                f"expected 0 to {len(classes) - 1}"
            )

    def samples(split: str) -> Iterator[Sample]:
        pixels, labels = splits[split]
        return in_parts(lambda row: Sample(png(pixels[row]), "png", int(labels[row])), len(labels))

    return DataSet(classes, {split: len(labels) for split, (_, labels) in splits.items()}, samples)


def png(pixels: Pixels) -> bytes:
    """Return a picture, H x W or H x W x 3, as the content of a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png")
    return buffer.getvalue()

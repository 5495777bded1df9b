"""Pillow and torchvision as the decoder: runs everywhere, and is what DALI is compared with.

Pillow lets go of the interpreter lock while it decodes and resizes, so threads are enough.
"""

import io
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from largebatch.data.decoders.orientation import turn_whole
from largebatch.data.decoders.prefetch import Part, prefetch
from largebatch.data.decoders.reader import Reading, name_of, open_reader, read_ahead
from largebatch.data.index.index import Index, Location
from largebatch.data.types import Batches, Bytes, Floats, IntArray, Request, View
from largebatch.errors import DataError
from largebatch.optional import require_torchvision


class Encoded(NamedTuple):
    """An encoded image, and its row of the index."""

    location: Location
    content: Bytes
    height: int
    width: int
    orientation: int = 1


def decode(
    index: Index,
    requests: Iterable[Request],
    view: View,
    *,
    device: torch.device,
    threads: int,
    batch_size: int,  # noqa: ARG001 -- every decoder is called alike
) -> Batches:
    """Return one batch for each request, in order; the threads end when it ends or is closed.

    A box is cut out, resized, then mirrored if asked for.
    """
    require_torchvision()
    return _decode(index, requests, view, device=device, threads=threads)


def _decode(
    index: Index, requests: Iterable[Request], view: View, *, device: torch.device, threads: int
) -> Batches:
    def divide(reading: Reading) -> tuple[IntArray, list[Part]]:
        request = reading.request
        each = zip(encoded_images(index, reading), request.boxes, request.flips, strict=True)
        parts = [
            Part(slice(row, row + 1), partial(_decode_one, view, *one))
            for row, one in enumerate(each)
        ]
        return index.labels[request.samples], parts

    with open_reader() as reader:
        readings = read_ahead(index, requests, reader)
        yield from prefetch(readings, divide, view=view, device=device, threads=threads)


def encoded_images(index: Index, reading: Reading) -> list[Encoded]:
    """Return the images that were read."""
    samples = reading.request.samples
    heights, widths = index.heights[samples].tolist(), index.widths[samples].tolist()
    turned = index.orientations
    orientations = [1] * len(samples) if turned is None else turned[samples].tolist()
    each = zip(reading.locations, reading.contents, heights, widths, orientations, strict=True)
    return [Encoded(*one) for one in each]


def to_pillow(encoded: Encoded) -> Image.Image:
    """Decode a whole image to RGB, as it is seen; raise DataError with its path if it cannot be."""
    try:
        with Image.open(io.BytesIO(encoded.content.data)) as image:
            pixels = turn_whole(image.convert("RGB"), encoded.orientation)
    except Exception as error:  # Pillow raises all kinds over a damaged file
        name = name_of(encoded.location)
        raise DataError(f"{name}: Pillow cannot decode this image: {error}") from error
    if pixels.size != (encoded.width, encoded.height):
        raise DataError(
            f"{name_of(encoded.location)}: the image has {pixels.height} x {pixels.width} "
            f"pixels, {encoded.height} x {encoded.width} in the index; run `largebatch data index` "
            "again"
        )
    return pixels


def _decode_one(
    view: View, encoded: Encoded, box: IntArray, flip: np.bool_, pixels: Bytes | Floats
) -> None:
    show(to_pillow(encoded), view, box, flip, pixels)


def show(
    image: Image.Image, view: View, box: IntArray, flip: np.bool_, pixels: Bytes | Floats
) -> None:
    """Write the part of an image that was asked for into `pixels`, 1 x H x W x 3."""
    from torchvision.transforms import InterpolationMode, functional

    part = functional.resized_crop(
        image,
        *box.tolist(),
        list(pixels.shape[1:3]),
        InterpolationMode(view.interpolation),
    )
    pixels[0] = functional.hflip(part) if flip else part

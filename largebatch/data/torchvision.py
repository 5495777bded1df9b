"""Pillow and torchvision as the decoder: runs everywhere, and is what DALI is compared with.

Pillow lets go of the interpreter lock while it decodes and resizes, so threads are enough.
"""

import io
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from largebatch.contracts import Batches, IntArray, Request, View
from largebatch.data.filling import Filling, empty_pixels, fill_ahead, finisher
from largebatch.data.index import Index, Location
from largebatch.data.reading import Bytes, Reading, name_of, open_reader, read_ahead
from largebatch.errors import DataError
from largebatch.vision import require_torchvision


class Picture(NamedTuple):
    """An encoded picture, and what the index says of it."""

    location: Location
    content: Bytes
    height: int
    width: int


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
    if not view.antialias:
        raise DataError(
            "data.antialias: false cannot be done by decoder torchvision: Pillow widens the filter "
            "wherever it makes a picture smaller; use decoder dali"
        )
    return _decode(index, requests, view, device=device, threads=threads)


def _decode(
    index: Index, requests: Iterable[Request], view: View, *, device: torch.device, threads: int
) -> Batches:
    with open_reader() as reader:

        def start(pool: ThreadPoolExecutor, reading: Reading) -> Filling:
            request = reading.request
            pixels = empty_pixels(len(request.samples), view, device)
            pictures = pictures_of(index, reading)
            each = zip(pictures, request.boxes, request.flips, pixels.numpy(), strict=True)
            jobs = [pool.submit(_decode_one, view, *arguments) for arguments in each]
            return Filling(jobs, pixels, index.labels[request.samples])

        readings = read_ahead(index, requests, reader)
        yield from fill_ahead(readings, start, finisher(view, device), threads=threads)


def pictures_of(index: Index, reading: Reading) -> list[Picture]:
    """Return the pictures that were read."""
    samples = reading.request.samples
    heights, widths = index.heights[samples].tolist(), index.widths[samples].tolist()
    each = zip(reading.locations, reading.contents, heights, widths, strict=True)
    return [Picture(*picture) for picture in each]


def to_pillow(picture: Picture) -> Image.Image:
    """Decode a whole picture to RGB; raise DataError with its path where that cannot be done."""
    try:
        with Image.open(io.BytesIO(picture.content.data)) as image:
            pixels = image.convert("RGB")
    except Exception as error:  # Pillow raises all kinds over a damaged file
        name = name_of(picture.location)
        raise DataError(f"{name}: Pillow cannot decode this picture: {error}") from error
    if pixels.size != (picture.width, picture.height):
        raise DataError(
            f"{name_of(picture.location)}: the picture has {pixels.height} x {pixels.width} "
            f"pixels, {picture.height} x {picture.width} in the index; run `largebatch data index` "
            "again"
        )
    return pixels


def _decode_one(
    view: View, picture: Picture, box: IntArray, flip: np.bool_, pixels: npt.NDArray[np.uint8]
) -> None:
    """Write the part of a picture that was asked for into `pixels`, H x W x 3."""
    from torchvision.transforms import InterpolationMode, functional

    part = functional.resized_crop(
        to_pillow(picture),
        *box.tolist(),
        list(pixels.shape[:2]),
        InterpolationMode(view.interpolation),
    )
    pixels[:] = functional.hflip(part) if flip else part

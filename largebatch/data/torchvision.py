"""Pillow and torchvision as the decoder: runs everywhere, and is what DALI is compared with.

Pillow lets go of the interpreter lock while it decodes and resizes, so threads are enough.
"""

import io
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from largebatch.contracts import Batches, IntArray, Request, View
from largebatch.data.filling import Filling, empty_pixels, fill_ahead, finisher
from largebatch.data.index import Index, Location
from largebatch.data.reading import Reader, finish, name_of, open_reader
from largebatch.errors import DataError
from largebatch.vision import require_torchvision


class Picture(NamedTuple):
    """An encoded picture that is being read, and what the index says of it."""

    location: Location
    content: Future[bytes]
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

        def start(pool: ThreadPoolExecutor, request: Request) -> Filling:
            pixels = empty_pixels(len(request.samples), view, device)
            pictures = [start_reading(index, sample, reader) for sample in request.samples.tolist()]
            each = zip(pictures, request.boxes, request.flips, pixels.numpy(), strict=True)
            jobs = [pool.submit(_decode_one, view, *arguments) for arguments in each]
            return Filling(jobs, pixels, index.labels[request.samples])

        yield from fill_ahead(requests, start, finisher(view, device), threads=threads)


def start_reading(index: Index, sample: int, reader: Reader) -> Picture:
    """Have a picture's bytes read."""
    location = index.locate(sample)
    height, width = int(index.heights[sample]), int(index.widths[sample])
    return Picture(location, reader.start(location), height, width)


def to_pillow(picture: Picture) -> Image.Image:
    """Decode a whole picture to RGB; raise DataError with its path where that cannot be done."""
    content = finish(picture.location, picture.content)
    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = image.convert("RGB")
    except Exception as error:  # Pillow raises all kinds over a damaged file
        name = name_of(picture.location)
        raise DataError(f"{name}: Pillow cannot decode this picture: {error}") from error
    if pixels.size != (picture.width, picture.height):
        raise DataError(
            f"{name_of(picture.location)}: the picture is {pixels.width} x {pixels.height} pixels, "
            f"{picture.width} x {picture.height} in the index; run `largebatch data index` again"
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

"""Pillow and torchvision as the decoder: runs everywhere, and is the reference for DALI.

Pillow releases the interpreter lock while it decodes and resizes, so threads are enough.
"""

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial

from PIL import Image

from largebatch.data.decoders.crops import crop_and_resize
from largebatch.data.decoders.prefetch import FillTask, in_parts, open_prefetcher
from largebatch.data.decoders.reader import Reading, name_of, open_reader, read_ahead
from largebatch.data.index.headers import is_heic
from largebatch.data.index.index import Index
from largebatch.data.types import (
    Bytes,
    Decode,
    DecodedBatches,
    Floats,
    IntArray,
    Request,
    Resources,
    View,
)
from largebatch.errors import DataError
from largebatch.optional import require_heif, require_torchvision

METHODS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Pillow's operation from the stored to the displayed image, by orientation."""

AT_A_TIME = 16  # number of images in one thread's task; a task costs about ten microseconds


def require_decoder() -> Callable[[Index, View, Resources], AbstractContextManager[Decode]]:
    """Return what opens the decoder; raise MissingPackageError without its library."""
    require_torchvision()
    return open_decoder


@contextmanager
def open_decoder(index: Index, view: View, resources: Resources) -> Iterator[Decode]:
    """Yield a decoder, whose threads end with the block; MissingPackageError without torchvision.

    A box is cropped, resized, then mirrored if requested.
    """
    require_torchvision()

    def divide(reading: Reading) -> tuple[IntArray, list[FillTask]]:
        samples = reading.request.samples
        rows = in_parts(len(samples), threads=resources.threads, most=AT_A_TIME)
        parts = [FillTask(part, partial(_decode_some, reading, part, view)) for part in rows]
        return index.labels[samples], parts

    def decode(requests: Iterable[Request]) -> DecodedBatches:
        with closing(fill_ahead(read_ahead(requests, reader), divide)) as filled:
            for reading, batch in filled:
                reader.release(reading)  # all its images are decoded
                yield reading.request, batch

    with (
        open_reader(index, resources.reads) as reader,
        open_prefetcher(view, resources) as fill_ahead,
    ):
        yield decode


def to_pillow(index: Index, sample: int, content: Bytes) -> Image.Image:
    """Decode a whole image to upright RGB; raise DataError with its path if that fails."""
    orientation = 1 if index.orientations is None else int(index.orientations[sample])
    try:
        pixels = decode_upright(content.data, orientation)
    except Exception as error:  # Pillow raises many types for a damaged file
        name = name_of(index.locate(sample))
        raise DataError(f"{name}: Pillow cannot decode this image: {error}") from error
    height, width = int(index.heights[sample]), int(index.widths[sample])
    if pixels.size != (width, height):
        name = name_of(index.locate(sample))
        raise DataError(
            f"{name}: the image has {pixels.height} x {pixels.width} pixels, {height} x {width} in "
            "the index; run `largebatch data index` again"
        )
    return pixels


def decode_upright(content: bytes | memoryview, orientation: int) -> Image.Image:
    """Decode an image to RGB, with its EXIF orientation applied."""
    if is_heic(content):
        require_heif()
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        # convert would copy an image that is RGB, a twentieth of the time of a photograph.
        pixels = image if image.mode == "RGB" else image.convert("RGB")
    return pixels if orientation == 1 else pixels.transpose(METHODS[orientation])


def _decode_some(reading: Reading, rows: slice, view: View, pixels: Bytes | Floats) -> None:
    request = reading.request
    samples = request.samples[rows].tolist()
    boxes = request.boxes[rows]
    flips = request.flips[rows]
    images = zip(
        samples, reading.contents[rows], boxes.tolist(), flips.tolist(), pixels, strict=True
    )
    for sample, content, box, flip, out in images:
        out[:] = crop_and_resize(
            to_pillow(reading.index, sample, content),
            box,
            flip=flip,
            size=view.image_size,
            interpolation=view.interpolation,
        )

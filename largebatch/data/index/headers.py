"""The size of an encoded image by its header, and the reasons why an image cannot be used.

An image is checked by its header, which Pillow reads, and by its end marker: size, format and
completeness. The pixels of JPEG and PNG, the formats of large data sets, are not decoded; the
decoder detects data that is damaged in the middle. An image that the decoders would show
differently is refused.
"""

import contextlib
import io
import os
import re
import struct
from collections.abc import Callable
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

Read = Callable[[int, int], bytes]
"""Returns `length` bytes from `position` of the encoded image, fewer at its end."""

MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")
"""Pillow's names of the pixel types that both decoders convert to the same RGB."""

OTHER_FORMATS = ("BMP", "PPM", "TIFF", "WEBP")
"""Pillow's names of the formats, besides JPEG and PNG, that both decoders read."""

MAX_SIDE = 32_768  # maximum side in pixels: hardware decoders have limits of this order
MAX_BYTES = 2**29
"""Maximum length of an encoded image: twice the bytes of Pillow's maximum number of pixels."""

HEAD, TAIL = 4096, 64  # bytes read from either end; MAX_HEADER bytes if the header is longer
MAX_HEADER = 2**23  # bytes of a JPEG's or PNG's header: Pillow takes seconds for the worst content

JPEG, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
PNG, PNG_END = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"
PNG_DEPTH = 24  # position of the byte of a PNG that holds the bits per channel

ORIENTATION, MOST_ORIENTATION = 274, 8  # EXIF's tag of orientation, and its largest value

TRANSPOSED = (5, 6, 7, 8)  # orientations that exchange height and width
OTHER_FRAMES = re.compile(rb"\xff([\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf])..\x08(....)", re.DOTALL)
"""Frame headers of lossless, hierarchical and arithmetic JPEGs: marker, height and width."""


class BadImageError(Exception):
    """An image cannot be used; the message is the reason."""


class Size(NamedTuple):
    """Size of an image as displayed, in pixels, and how it is stored."""

    height: int
    width: int
    orientation: int = 1  # EXIF orientation of the stored image; 1 is upright

    @property
    def stored(self) -> tuple[int, int]:
        """Height and width of the pixels in the file."""
        is_transposed = self.orientation in TRANSPOSED
        return (self.width, self.height) if is_transposed else (self.height, self.width)


def measure(read: Read, num_bytes: int) -> Size:
    """Return the size of an encoded image of this length, or raise BadImageError."""
    if num_bytes == 0:
        raise BadImageError("the file is empty")
    if num_bytes > MAX_BYTES:
        raise BadImageError(f"it has {num_bytes:,} bytes, expected at most {MAX_BYTES:,}")
    start = read(0, len(PNG))
    if start.startswith(JPEG):
        size, header = _header(read, JpegImageFile)
        for frame in OTHER_FRAMES.finditer(header):  # Pillow does not report which header it read
            if frame[2] == struct.pack(">HH", *size.stored):
                process = frame[1][0] - 0xC0
                raise BadImageError(f"a JPEG of process SOF{process}, not baseline or progressive")
        _require_end(read, num_bytes, JPEG_END, after=len(header))
        return size
    if start == PNG:
        size, header = _header(read, PngImageFile)
        if header[PNG_DEPTH] > 8:
            raise BadImageError(f"it has {header[PNG_DEPTH]} bits a channel, expected at most 8")
        _require_end(read, num_bytes, PNG_END, after=len(header))
        return size
    return _other(read(0, num_bytes))


def measure_part(file: int, offset: int, num_bytes: int) -> Size:
    """Return the size of the image in these bytes of an open file, or raise BadImageError."""
    return measure(
        lambda place, length: os.pread(file, min(length, num_bytes - place), offset + place),
        num_bytes,
    )


def measure_bytes(content: bytes) -> Size:
    """Return the size of an encoded image, or raise BadImageError."""
    return measure(lambda place, length: content[place : place + length], len(content))


def _header(read: Read, plugin: Callable[[io.BytesIO], ImageFile]) -> tuple[Size, bytes]:
    for length in (HEAD, MAX_HEADER):
        content = read(0, length)
        file = io.BytesIO(content)
        problem = ""
        try:
            image = plugin(file)
        except Exception as error:  # Pillow raises many types for a damaged file
            problem = str(error) or type(error).__name__
        else:
            if image.tile:  # the pixel data starts here
                return _displayed(image), content[: file.tell()]
        if file.read(1):
            raise BadImageError(f"its header cannot be read: {problem}")
    longer = f", or the header is longer than {MAX_HEADER:,} bytes"
    raise BadImageError(f"it is truncated in the header{longer * (len(content) == MAX_HEADER)}")


def _other(content: bytes) -> Size:
    """Open with Pillow; decode formats without an end marker, which are rare in large data sets."""
    try:
        with Image.open(io.BytesIO(content), formats=OTHER_FORMATS) as image:
            require_mode(image.mode)
            problem = _unshared(image, content)
            if problem:
                raise BadImageError(
                    f"it is a {image.format} of {problem}, which the decoders show differently; "
                    "store it as a PNG of 8 bits per channel"
                )
            size = _displayed(image)
            if image.format != "WEBP":  # opening a WebP checks that it is complete
                image.load()
            return size
    except BadImageError:
        raise
    except UnidentifiedImageError:
        raise BadImageError("not a readable image") from None
    except Exception as error:  # Pillow raises many types for a damaged file
        raise BadImageError(str(error) or type(error).__name__) from None


def _unshared(image: ImageFile, content: bytes) -> str | None:
    """Return what DALI shows unlike Pillow, or not at all, in an image of OTHER_FORMATS."""
    if image.format == "TIFF":
        tags = image.getexif()
        found = (tags.get(tag, ()) for tag in (258, 339, 338))
        depths, numbers, extra = (set(tag if isinstance(tag, tuple) else [tag]) for tag in found)
        usual = {"1": {1}, "P": {1, 2, 4, 8}}.get(image.mode, {8})
        is_colour = image.mode in {"RGB", "RGBA"}
        faults = {
            f"{max(depths, default='unstated')} bits per channel": not depths or depths - usual,
            "signed numbers or fractions": numbers - {1},
            "alpha beside grey, or multiplied into the colours": 1 in extra
            or (extra and not is_colour),
        }
    else:
        stored = image.tile[0].args if image.tile else ()
        most = stored[-1] if image.format == "PPM" and isinstance(stored, tuple) else 255
        is_text = image.format == "PPM" and content[1:2] in b"123"
        faults = {
            f"values up to {most}, expected 255": most != 255,
            "text without a line break at its end": is_text and not content[-1:].isspace(),
            "16 bits per pixel": image.format == "BMP" and str(stored).startswith("('BGR;1"),
        }
    return next((name for name, found in faults.items() if found), None)


def require_mode(mode: str) -> None:
    """Raise BadImageError for pixels that Pillow converts to RGB by cutting them off at 255.

    Also for those, such as LAB, that only some decoders convert.
    """
    if mode not in MODES:
        raise BadImageError(f"its pixels are {mode}, expected 8 bits per channel")


def _require_end(read: Read, num_bytes: int, mark: bytes, *, after: int) -> None:
    # The marker cannot occur within the data. If it is not in the last bytes, the whole image is
    # searched: some cameras and editors append data.
    start = max(after, num_bytes - TAIL)
    if mark not in read(start, TAIL) and mark not in read(after, num_bytes):
        raise BadImageError("it is truncated: its end marker is missing")


def _displayed(image: Image.Image) -> Size:
    """Return the displayed size; EXIF after the pixels of a PNG is ignored, as by both decoders."""
    height, width, limit = image.height, image.width, Image.MAX_IMAGE_PIXELS
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise BadImageError(f"it has {height} x {width} pixels, expected 1 to {MAX_SIDE} per side")
    if limit is not None and height * width > limit:
        raise BadImageError(
            f"it has {height} x {width} pixels; above {limit:,} Pillow suspects an attack"
        )
    if image.format == "TIFF":  # Pillow applies the orientation, DALI does not
        if _orientation(image.getexif()) != 1:
            raise BadImageError(
                "it is a TIFF that is stored rotated or mirrored (EXIF orientation), which the "
                "decoders show differently; store it upright, or as a JPEG or PNG"
            )
        return Size(height, width)
    exif = Image.Exif()
    with contextlib.suppress(Exception):  # Pillow raises many types for damaged EXIF
        exif.load(image.info.get("exif", b""))
    stored = Size(height, width, _orientation(exif))
    return Size(*stored.stored, stored.orientation)


def _orientation(exif: Image.Exif) -> int:
    value = 1  # also where it is missing or invalid
    with contextlib.suppress(Exception):  # as above
        value = int(exif.get(ORIENTATION, 1))
    return value if 1 <= value <= MOST_ORIENTATION else 1

"""The size of an encoded image by its header, and the reasons why an image cannot be used.

An image is checked by its header, which Pillow reads, and by its end marker, or by the lengths
that WebP and HEIC begin with; pixels are not decoded. Other formats, and pixels that Pillow does
not convert to RGB, are refused.
"""

import contextlib
import io
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from largebatch.errors import MissingPackageError
from largebatch.optional import require_heif

Read = Callable[[int, int], bytes]
"""Returns `length` bytes from `position` of the encoded image, fewer at its end."""

MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")
"""Pillow's names of the pixel types that it converts to the same RGB as other decoders."""

MAX_SIDE = 32_768  # maximum side in pixels: hardware decoders have limits of this order
MAX_BYTES = 2**29  # twice the bytes of Pillow's maximum number of pixels

HEAD = 4096  # bytes read from the beginning; MAX_HEADER if the header is longer
TAIL = 64  # bytes read from the end
MAX_HEADER = 2**23  # bytes of a header: Pillow takes seconds for the worst content

START = 12  # bytes from which the format is known
JPEG, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
PNG, PNG_END = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"
PNG_DEPTH = 24  # position of the byte of a PNG that holds the bits per channel

RIFF = b"RIFF"  # the first four bytes of a WebP
WEBP = b"WEBP"  # those after its length
FTYP = b"ftyp"  # after the four bytes of a length: the first box of a HEIC
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")

ORIENTATION = 274  # EXIF's tag of orientation
MOST_ORIENTATION = 8  # its largest value
TRANSPOSED = (5, 6, 7, 8)  # orientations that exchange height and width


class BadImageError(Exception):
    """An image cannot be used; the message is the reason."""


class Size(NamedTuple):
    """Size of an image as displayed, in pixels, and how it is stored."""

    height: int
    width: int
    orientation: int = 1  # EXIF orientation of the stored image; 1 is upright
    by_pillow: bool = False
    """True if only Pillow decodes the pixels right: HEIC, which DALI does not read, and inks
    (CMYK). Adobe's programs store these inverted, and Pillow takes them all so; other decoders
    invert only those with Adobe's mark."""


def measure(read: Read, num_bytes: int) -> Size:
    """Return the size of an encoded image of this length, or raise BadImageError."""
    if num_bytes == 0:
        raise BadImageError("the file is empty")
    if num_bytes > MAX_BYTES:
        raise BadImageError(f"it has {num_bytes:,} bytes, expected at most {MAX_BYTES:,}")
    start = read(0, START)
    if start.startswith(JPEG):
        size, header = _header(read, JpegImageFile)
        _require_end(read, num_bytes, JPEG_END, after=len(header))
    elif start.startswith(PNG):
        size, header = _header(read, PngImageFile)
        # Decoders reduce 16 bits to 8 in different ways; results must not depend on the decoder.
        if header[PNG_DEPTH] > 8:
            raise BadImageError(f"it has {header[PNG_DEPTH]} bits a channel, expected at most 8")
        _require_end(read, num_bytes, PNG_END, after=len(header))
    elif is_webp(start):
        size = _webp_size(read(0, num_bytes))
    elif is_heic(start):
        size = _heic_size(read(0, num_bytes))
    else:
        raise BadImageError("not a JPEG, PNG, WebP or HEIC image")
    return size


def is_webp(content: bytes | memoryview) -> bool:
    """Return True if an encoded image is a WebP."""
    return content[:4] == RIFF and content[8:START] == WEBP


def is_heic(content: bytes | memoryview) -> bool:
    """Return True if an encoded image is a HEIC."""
    return content[4:8] == FTYP and content[8:START] in HEIC_BRANDS


def measure_part(file: BinaryIO, offset: int, num_bytes: int) -> Size:
    """Return the size of the image in these bytes of an open file, or raise BadImageError."""

    def read(position: int, length: int) -> bytes:
        file.seek(offset + position)
        return file.read(min(length, num_bytes - position))

    return measure(read, num_bytes)


def measure_bytes(content: bytes) -> Size:
    """Return the size of an encoded image, or raise BadImageError."""
    return measure(lambda position, length: content[position : position + length], len(content))


def _header(read: Read, plugin: Callable[[io.BytesIO], ImageFile]) -> tuple[Size, bytes]:
    # Most headers are short; a long one, of thumbnails and colour profiles, takes a second read.
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
        # Bytes are left that the header did not need: more of them would not help.
        if file.read(1):
            raise BadImageError(f"its header cannot be read: {problem}")
    raise BadImageError("it is truncated in the header")


def _webp_size(content: bytes) -> Size:
    """Measure a WebP. Its EXIF is after the pixels, and Pillow checks that it is whole."""
    try:
        image = WebPImageFile(io.BytesIO(content))
    except Exception as error:  # as above
        raise BadImageError(f"its header cannot be read: {error}") from None
    if image.n_frames > 1:
        raise BadImageError(f"it is an animation of {image.n_frames} images, expected one image")
    return _displayed(image)


def _heic_size(content: bytes) -> Size:
    """Measure a HEIC, which Pillow decodes upright with pillow-heif."""
    try:
        require_heif()
    except MissingPackageError as error:
        raise BadImageError(str(error)) from None
    start = 0
    while start < len(content):  # boxes, each with its length
        length = int.from_bytes(content[start : start + 4])
        if length == 1:  # the length is in the next eight bytes
            length = int.from_bytes(content[start + 8 : start + 16])
        if length == 0:  # the last box
            break
        start += max(length, 8)
    # Only the lengths of the boxes show this here: pixels are not decoded.
    if start > len(content):
        raise BadImageError(f"it is truncated: it has {len(content):,} of {start:,} bytes")
    try:
        image = Image.open(io.BytesIO(content))
    except Exception as error:  # as above
        raise BadImageError(f"its header cannot be read: {error}") from None
    return _displayed(image)._replace(by_pillow=True)


def require_mode(mode: str) -> None:
    """Raise BadImageError for pixels that Pillow cuts off at 255, or only some decoders convert."""
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
    height = image.height
    width = image.width
    limit = Image.MAX_IMAGE_PIXELS
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise BadImageError(f"it has {height} x {width} pixels, expected 1 to {MAX_SIDE} per side")
    if limit is not None and height * width > limit:
        raise BadImageError(
            f"it has {height} x {width} pixels; above {limit:,} Pillow suspects an attack"
        )
    exif = Image.Exif()
    orientation = 1
    with contextlib.suppress(Exception):  # Pillow raises many types for damaged EXIF
        exif.load(image.info.get("exif", b""))
        orientation = int(exif.get(ORIENTATION, 1))
    if not 1 <= orientation <= MOST_ORIENTATION:
        orientation = 1
    if orientation in TRANSPOSED:
        height, width = width, height
    return Size(height, width, orientation, by_pillow=image.mode == "CMYK")

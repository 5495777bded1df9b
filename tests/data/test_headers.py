import io
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from largebatch.data.decoders.torchvision import to_pillow
from largebatch.data.index.headers import (
    MAX_SIDE,
    BadImageError,
    measure_bytes,
)
from largebatch.data.index.index import Index
from largebatch.errors import DataError


def encoded(
    kind: str, *, mode: str = "RGB", size: tuple[int, int] = (48, 31), **options: object
) -> bytes:
    """A noise image, 48 wide and 31 high, written by Pillow."""
    width, height = size
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 4), dtype=np.uint8)
    image = Image.fromarray(noise).convert("RGB").convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


JPEG = encoded("jpeg")
PNG = encoded("png")
ANIMATION = encoded("webp", save_all=True, append_images=[Image.new("RGB", (48, 31))])
THUMBNAIL = b"\xff\xe1" + struct.pack(">H", 8 + len(JPEG)) + b"Exif\0\0" + JPEG

GOOD = {
    "baseline": JPEG,
    "progressive": encoded("jpeg", progressive=True),
    "CMYK": encoded("jpeg", mode="CMYK"),
    "a header longer than what is read at first": encoded("jpeg", comment=b"x" * 60_000),
    "a thumbnail with an end of its own": JPEG[:2] + THUMBNAIL + JPEG[2:],
    "something behind the image": JPEG + b"\0" * 10_000,
    "PNG": PNG,
    "grey PNG": encoded("png", mode="L"),
    "a palette": encoded("png", mode="P"),
    "transparency": encoded("png", mode="RGBA"),
    "WebP": encoded("webp"),
    "lossless WebP": encoded("webp", lossless=True),
    "transparent WebP": encoded("webp", mode="RGBA"),
}


@pytest.mark.parametrize("content", [pytest.param(c, id=name) for name, c in GOOD.items()])
def test_the_size_equals_pillows(content: bytes) -> None:
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        assert image.size == (48, 31)
        is_inks = image.mode == "CMYK"
    assert measure_bytes(content) == (31, 48, 1, is_inks)


@pytest.mark.parametrize(
    "content", [pytest.param(c, id=name) for name, c in GOOD.items() if "behind" not in name]
)
def test_an_image_without_its_end_is_truncated(content: bytes) -> None:
    for length in (len(content) // 2, len(content) - 70, len(content) - 8, 40):
        with pytest.raises(BadImageError):
            measure_bytes(content[:length])


def frame(**changes: int) -> bytes:
    """A JPEG with other values in its frame header."""
    at = JPEG.index(b"\xff\xc0")
    words = {"bits": 8, "height": 31, "width": 48} | changes
    return JPEG[: at + 4] + struct.pack(">BHH", *words.values()) + JPEG[at + 9 :]


def png_header(width: int, height: int, bits: int, colour: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return PNG[:12] + body + struct.pack(">I", zlib.crc32(body)) + PNG[33:]


BAD = {
    "empty": (b"", "the file is empty"),
    "a web page": (b"<html>not found</html>", "not a JPEG, PNG, WebP"),
    "a GIF": (encoded("gif", mode="P"), "not a JPEG, PNG, WebP"),
    "sound": (b"RIFF" + struct.pack("<I", 36) + b"WAVEfmt " + bytes(28), "not a JPEG, PNG, WebP"),
    "a film": (b"\0\0\0\x10ftypisom" + bytes(99), "not a JPEG, PNG, WebP"),
    "an animation": (ANIMATION, "2 images"),
    "12 bits": (frame(bits=12), "cannot handle 12-bit layers"),
    "a JPEG bomb": (frame(height=65_000, width=65_000), f"expected 1 to {MAX_SIDE} per side"),
    "a PNG bomb": (png_header(30_000, 30_000, 8, 2), "30000 x 30000 pixels; above 89,478"),
    "16 bits": (png_header(48, 31, 16, 2), "it has 16 bits a channel, expected at most 8"),
    "a damaged header": (PNG[:17] + b"\xee" + PNG[18:], "bad header checksum"),
}


@pytest.mark.parametrize(
    ("content", "reason"), [pytest.param(*each, id=name) for name, each in BAD.items()]
)
def test_a_bad_image_is_refused_with_the_reason(content: bytes, reason: str) -> None:
    with pytest.raises(BadImageError) as caught:
        measure_bytes(content)
    assert reason in str(caught.value)


def test_real_jpegs_have_pillows_size(real_data: Path) -> None:
    number = 0
    with zipfile.ZipFile(real_data / "imagenet_samples/samples.zip") as file:
        for name in file.namelist():
            if name.endswith(".JPEG"):
                content = file.read(name)
                with Image.open(io.BytesIO(content)) as image:
                    assert measure_bytes(content)[:3] == (image.height, image.width, 1), name
                with pytest.raises(BadImageError):
                    measure_bytes(content[: len(content) * 3 // 4])
                number += 1
    assert number == 100


FORMS = ("jpeg", "png", "webp")

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow's, of what it finds in damaged files

CHANGES = st.lists(
    st.tuples(st.integers(0, 2**16), st.sampled_from([0, 1, 127, 128, 255, 0x37, 0x80])), max_size=4
)
"""Places and what is written there."""

ENDS = st.none() | st.integers(0, 2**12)


IMAGES = {form: encoded(form, size=(6, 6)) for form in FORMS}


def changed(content: bytes, changes: list[tuple[int, int]], end: int | None) -> bytes:
    """Write the changes and cut the end off."""
    found = bytearray(content[:end])
    for place, byte in changes:
        if found:
            found[place % len(found)] = byte
    return bytes(found)


@pytest.mark.parametrize("form", FORMS)
@given(CHANGES, ENDS)
@example([], 0)
@example([(16, 127), (17, 255), (20, 127)], None)  # the sides of a PNG
def test_any_bytes_are_measured_and_decoded_consistently_or_refused(
    form: str, changes: list[tuple[int, int]], end: int | None
) -> None:
    content = changed(IMAGES[form], changes, end)
    try:
        size = measure_bytes(content)
    except BadImageError as error:
        assert str(error)  # noqa: PT017 -- either outcome is right
        return
    assert 1 <= size.height <= MAX_SIDE
    assert 1 <= size.width <= MAX_SIDE
    if size.height * size.width > 2**20:
        return  # as large as it may be, and slow to decode
    index = Index(
        root=Path("root"),
        classes=("any",),
        paths=["any"],
        labels=np.zeros(1, np.int64),
        heights=np.array([size.height]),
        widths=np.array([size.width]),
        orientations=np.array([size.orientation], np.uint8),
        num_bytes=np.array([len(content)]),
    )
    try:
        pixels = to_pillow(index, 0, np.frombuffer(content, np.uint8))
    except DataError as error:
        assert "decode" in str(error)  # noqa: PT017 -- either is right
    else:
        assert (pixels.height, pixels.width) == size[:2]
        assert pixels.mode == "RGB"

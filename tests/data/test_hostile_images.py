"""Arbitrary bytes as shards and images give an index, an image, or one message."""

import io
from pathlib import Path

import numpy as np
import pytest
import tars
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from largebatch.data.decoders.torchvision import Encoded, to_pillow
from largebatch.data.index.headers import MAX_SIDE, BadImageError, measure_bytes
from largebatch.data.index.index import Index, make
from largebatch.errors import DataError

FORMS = ("jpeg", "png", "bmp", "ppm", "tiff", "webp")

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow's, of what it finds in damaged files

FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

CHANGES = st.lists(
    st.tuples(st.integers(0, 2**16), st.sampled_from([0, 1, 127, 128, 255, 0x37, 0x80])), max_size=4
)
"""Places and what is written there."""

ENDS = st.none() | st.integers(0, 2**12)


def encoded(form: str, *, side: int = 6) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (9, 8, 7)).save(buffer, format=form)
    return buffer.getvalue()


IMAGES = {form: encoded(form) for form in FORMS}


def changed(content: bytes, changes: list[tuple[int, int]], end: int | None) -> bytes:
    """Write the changes and cut the end off."""
    found = bytearray(content[:end])
    for place, byte in changes:
        if found:
            found[place % len(found)] = byte
    return bytes(found)


SHARD = b"".join(
    tars.member(f"{number}.jpg", IMAGES["jpeg"]) + tars.member(f"{number}.cls", b"0")
    for number in range(2)
)


@FUZZ
@given(CHANGES, ENDS, st.binary(max_size=3))
@example([], 0, b"")
@example([], 512, b"")
@example([(124, 0x80), (135, 255)], None, b"")  # a length in base 256
@example([(124, 255), (125, 255)], None, b"")  # a length below zero
@example([(156, ord("x"))], None, b"")  # an extended header of JPEG data
@example([(156, ord("S"))], None, b"")  # a sparse file
@example([(156, ord("L"))], None, b"")  # a long name
@example([(156, ord("g"))], None, b"")
@example([], None, b"\xff")
def test_any_bytes_are_a_shard_or_one_message(
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[int, int]],
    end: int | None,
    more: bytes,
) -> None:
    root = tmp_path_factory.mktemp("shards")
    (root / "classes.txt").write_text("cat\n")
    (root / "train").mkdir()
    spoiled = bytearray(changed(SHARD, changes, end))
    if len(spoiled) >= 512:  # with the right sum, or every change of a header would be the end
        spoiled[:512] = tars.with_sum(spoiled)[:512]
    path = root / "train/0.tar"
    path.write_bytes(bytes(spoiled) + more + tars.END)
    try:
        content = make(root, "train")
    except DataError as error:
        assert str(root) in str(error)  # noqa: PT017 -- either outcome is right
        return
    ends = content.arrays["offsets"] + content.arrays["num_bytes"]
    assert ends.max() <= path.stat().st_size


@pytest.mark.parametrize("form", FORMS)
@given(CHANGES, ENDS)
@example([], 0)
@example([(18, 255), (19, 255), (22, 255), (23, 255)], None)  # the sides of a BMP
@example([(16, 127), (17, 255), (20, 127)], None)  # those of a PNG
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
        pixels = to_pillow(Encoded(index, 0, np.frombuffer(content, np.uint8)))
    except DataError as error:
        assert "Pillow cannot decode this image" in str(error)  # noqa: PT017 -- either is right
    else:
        assert (pixels.height, pixels.width) == size[:2]
        assert pixels.mode == "RGB"

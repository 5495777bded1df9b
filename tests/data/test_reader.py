"""Reads that fail, hang or return bytes that are not an image."""

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from decoding import Decode, both_decoders, photograph, run
from PIL import Image

from largebatch import storage
from largebatch.data.decoders import pixel_cache
from largebatch.data.decoders import reader as reading
from largebatch.data.index.index import Index, Location, load_or_read
from largebatch.data.types import Request
from largebatch.distributed.serial import Serial
from largebatch.errors import DataError


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES", (0.01, 0.02, 0.03))


@pytest.fixture
def folder(tmp_path: Path, own_cache: None) -> Index:
    for number in range(24):
        place = tmp_path / "train" / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photograph(60, 80)).save(place / f"{number:02d}.jpg")
        os.utime(place / f"{number:02d}.jpg", ns=(0, 0))
    return load_or_read(tmp_path, "train")


def whole(index: Index, size: int = 6) -> list[Request]:
    """Request every image in turn."""
    boxes, flips = np.tile([0, 0, 60, 80], (size, 1)), np.zeros(size, dtype=np.bool_)
    starts = range(0, len(index), size)
    return [Request(np.arange(start, start + size), boxes, flips) for start in starts]


class Failing:
    """An os.preadv that fails for one image, a number of times or always."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, times: float) -> None:
        self.identity, self.times, self.failed = path.stat().st_ino, times, 0
        self.real: Callable[[int, list[bytearray], int], int] = os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, file: int, buffers: list[bytearray], offset: int) -> int:
        if os.fstat(file).st_ino == self.identity and self.failed < self.times:
            self.failed += 1
            raise OSError(5, "Input/output error")
        return self.real(file, buffers, offset)


@both_decoders
def test_a_read_that_fails_is_retried_three_times_then_ends_the_run_with_its_path(
    decode: Decode, folder: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [batch.images.clone() for batch in run(decode, folder, whole(folder))]
    path = Path(folder.locate(8).path)
    failing = Failing(monkeypatch, path, 3)
    found = [batch.images for batch in run(decode, folder, whole(folder))]
    assert failing.failed == 3
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    failing.times = float("inf")
    with pytest.raises(DataError, match=f"{path}.*Input/output error.* 4 "):
        list(run(decode, folder, whole(folder)))


@both_decoders
def test_a_removed_or_changed_image_is_named(decode: Decode, folder: Index) -> None:
    path = Path(folder.locate(8).path)
    content = path.read_bytes()
    for changed in (content[:-10], content + b"more"):
        overwrite(path, changed)
        sizes = f"{path}.* {len(changed):,} .* {len(content):,}"
        with pytest.raises(DataError, match=sizes):
            list(run(decode, folder, whole(folder)))
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}: .*modification time"):
        list(run(decode, folder, whole(folder)))
    path.unlink()
    with pytest.raises(DataError, match=f"{path}.*No such file"):
        list(run(decode, folder, whole(folder)))


def overwrite(path: Path, content: bytes) -> None:
    """Change a file's bytes and not its time."""
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))


@both_decoders
@pytest.mark.parametrize("sample", [0, 8, 23])
def test_bytes_that_are_not_an_image_are_named(decode: Decode, folder: Index, sample: int) -> None:
    path = Path(folder.locate(sample).path)
    overwrite(path, bytes(path.stat().st_size))
    with pytest.raises(DataError, match=f"{path}.*decode"):
        list(run(decode, folder, whole(folder)))


def test_an_image_in_a_shard_is_named_with_its_offset(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(bytes(2000))
    with pytest.raises(DataError, match=r"0.tar \(byte 1536\).* 464 of .*999"):
        reading.read(Location(str(tmp_path / "0.tar"), 1536, 999))
    assert reading.read(Location(str(tmp_path / "0.tar"), 1000, 999)) == bytes(999)


def test_an_image_that_cannot_be_cached_is_named_and_nothing_is_left(
    folder: Index, tmp_path: Path
) -> None:
    path = Path(folder.locate(8).path)
    overwrite(path, bytes(path.stat().st_size))
    with pytest.raises(DataError, match=f"{path}.*decode"):
        pixel_cache.open_cache(folder, backend=Serial(torch.device("cpu")), threads=2)
    assert list((tmp_path / "cache/largebatch/pixels").iterdir()) == []


@both_decoders
def test_a_shrunken_image_is_named(decode: Decode, folder: Index) -> None:
    path = Path(folder.locate(8).path)
    smaller = io.BytesIO()
    Image.fromarray(photograph(50, 70)).save(smaller, "JPEG")
    overwrite(path, smaller.getvalue().ljust(path.stat().st_size, b"\0"))
    with pytest.raises(DataError, match=f"{path}: .*(50 x 70.*60 x 80|60, 0..80.*50 x 70)"):
        list(run(decode, folder, whole(folder)))

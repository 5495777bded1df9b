"""What becomes of reads that fail, hang or give bytes that are no picture."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from decoding import Decode, both_decoders, photograph, run
from PIL import Image

from largebatch.backends.serial import Serial
from largebatch.contracts import Request
from largebatch.data import cached, reading
from largebatch.data.index import Index, Location, load_or_read
from largebatch.errors import DataError

TIMES = 4
"""How often a read is tried."""


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAUSES", (0.01, 0.02, 0.03))
    monkeypatch.setattr(reading, "SLOW_SECONDS", 0.2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(24):
        place = tmp_path / "train" / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photograph(60, 80)).save(place / f"{number:02d}.jpg")
    return load_or_read(tmp_path, "train")


def whole(index: Index, size: int = 6) -> list[Request]:
    """Ask for every picture in turn."""
    boxes, flips = np.tile([0, 0, 60, 80], (size, 1)), np.zeros(size, dtype=np.bool_)
    starts = range(0, len(index), size)
    return [Request(np.arange(start, start + size), boxes, flips) for start in starts]


class Failing:
    """An os.pread that fails for one picture, some number of times, or for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, times: float) -> None:
        self.identity, self.times, self.failed = path.stat().st_ino, times, 0
        self.real: Callable[[int, int, int], bytes] = os.pread
        monkeypatch.setattr(os, "pread", self)

    def __call__(self, file: int, length: int, offset: int) -> bytes:
        if os.fstat(file).st_ino == self.identity and self.failed < self.times:
            self.failed += 1
            raise OSError(5, "Input/output error")
        return self.real(file, length, offset)


@both_decoders
def test_a_read_that_fails_three_times_is_tried_again(
    decode: Decode, folder: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [batch.images.clone() for batch in run(decode, folder, whole(folder))]
    failing = Failing(monkeypatch, folder.locate(8).path, TIMES - 1)
    found = [batch.images for batch in run(decode, folder, whole(folder))]
    assert failing.failed == TIMES - 1
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@both_decoders
def test_a_read_that_keeps_failing_ends_the_run_with_its_path(
    decode: Decode, folder: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder.locate(8).path
    failing = Failing(monkeypatch, path, float("inf"))
    with pytest.raises(DataError, match=f"{path}: cannot be read .*Input/output error.*4 times"):
        list(run(decode, folder, whole(folder)))
    assert failing.failed == TIMES


@both_decoders
def test_a_picture_that_went_away_or_lost_its_end_is_named(decode: Decode, folder: Index) -> None:
    path = folder.locate(8).path
    num_bytes = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=f"{path}: .*{num_bytes - 10} of {num_bytes} bytes"):
        list(run(decode, folder, whole(folder)))
    path.unlink()
    with pytest.raises(DataError, match=f"{path}: cannot be read .*No such file"):
        list(run(decode, folder, whole(folder)))


@both_decoders
def test_a_read_that_hangs_ends_the_run_with_its_path(decode: Decode, folder: Index) -> None:
    """A pipe that nobody writes to: opening it waits for ever."""
    path = folder.locate(8).path
    path.unlink()
    os.mkfifo(path)
    begun = time.monotonic()
    try:
        with pytest.raises(DataError, match=f"{path}: the disk gives no answer: 4 reads"):
            list(run(decode, folder, whole(folder)))
        assert time.monotonic() - begun < 30
    finally:
        let_go(path)


def test_a_read_that_hung_once_is_made_by_another_thread(folder: Index) -> None:
    path = folder.locate(8).path
    content = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    with reading.open_reader(1) as reader:
        location = Location(path, 0, len(content))
        future = reader.start(location)
        time.sleep(0.1)
        moved = path.rename(path.with_suffix(".pipe"))
        path.write_bytes(content)
        assert reading.finish(location, future) == content
        let_go(moved)


def let_go(pipe: Path) -> None:
    """Let the threads that wait for a pipe's other end go on."""
    os.close(os.open(pipe, os.O_RDWR))


@both_decoders
@pytest.mark.parametrize("sample", [0, 8, 23])
def test_bytes_that_are_no_picture_are_named(decode: Decode, folder: Index, sample: int) -> None:
    path = folder.locate(sample).path
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DataError, match=f"{path}: .*cannot decode this picture"):
        list(run(decode, folder, whole(folder)))


@both_decoders
def test_a_picture_that_became_smaller_is_named(decode: Decode, folder: Index) -> None:
    path = folder.locate(8).path
    num_bytes = path.stat().st_size
    Image.fromarray(photograph(50, 70)).save(path)
    path.write_bytes(path.read_bytes().ljust(num_bytes, b"\0"))
    with pytest.raises(DataError, match=f"{path}: "):
        list(run(decode, folder, whole(folder)))


def test_a_picture_in_a_shard_is_named_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(bytes(2000))
    with pytest.raises(DataError, match=r"0.tar \(byte 1536\): cannot be read \(464 of 999 bytes"):
        reading.read(Location(tmp_path / "0.tar", 1536, 999))
    assert reading.read(Location(tmp_path / "0.tar", 1000, 999)) == bytes(999)


def test_a_picture_that_cannot_be_kept_is_named_and_nothing_is_left(
    folder: Index, tmp_path: Path
) -> None:
    path = folder.locate(8).path
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DataError, match=f"{path}: Pillow cannot decode"):
        cached.keep(folder, backend=Serial(torch.device("cpu")), threads=2)
    assert list((tmp_path / "cache/largebatch/pixels").iterdir()) == []

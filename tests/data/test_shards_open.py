"""Shards stay open while images are read from them."""

import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from decoding import png_folder

from largebatch.data.augment import clean_request
from largebatch.data.datasets.packing import pack_folder
from largebatch.data.decoders import reader as reading
from largebatch.data.index.index import Index, load_or_read
from largebatch.data.types import Request


def whole(index: Index) -> list[Request]:
    """Request every image in turn, four at a time."""
    parts = np.array_split(np.arange(len(index)), 4)
    return [clean_request(index, part, image_size=1, resize=None) for part in parts]


@pytest.fixture
def shards(tmp_path: Path) -> Index:
    png_folder(tmp_path / "folder", one_size=True)
    shutil.copytree(tmp_path / "folder/train", tmp_path / "folder/val")
    folders, packed = tmp_path / "folder", tmp_path / "packed"
    pack_folder(folders, packed, shard_bytes=40_000, progress=lambda *_: None)
    return load_or_read(packed, "train")


def read_shards(index: Index, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Read all images three times; return how many files had been opened after each time."""
    real, numbers = os.open, []
    expected = [reading.read(index.locate(sample)) for sample in range(len(index))]

    def note(path: str, *flags: int) -> int:
        opened.append(str(path))
        return real(path, *flags)

    monkeypatch.setattr(os, "open", note)
    with reading.open_reader(index, 1) as reader:
        for _ in range(3):
            for given in reading.read_ahead(whole(index), reader):
                found = [content.tobytes() for content in given.contents]
                assert found == [expected[sample] for sample in given.request.samples.tolist()]
            numbers.append(len(opened))
    return numbers


def test_a_shard_is_opened_once(shards: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    before = len(list(Path("/proc/self/fd").iterdir()))
    number = len(set(shards.paths))
    assert number > 2
    assert read_shards(shards, opened, monkeypatch) == [number] * 3
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_open_shards_stay_below_the_process_limit(
    shards: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * reading.KEPT_OPEN, 1_000))
    number = len(set(shards.paths))
    assert number > 2
    assert read_shards(shards, [], monkeypatch) == [number, 2 * number, 3 * number]


def test_an_unreadable_open_shard_is_reopened(
    shards: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file that was open when its server restarted stays stale."""
    opened: list[str] = []
    real, failures = os.preadv, iter([OSError(116, "Stale file handle")])

    def stale(file: int, buffers: list[memoryview], offset: int) -> int:
        if opened:
            for failure in failures:
                raise failure
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", stale)
    number = len(set(shards.paths))
    assert read_shards(shards, opened, monkeypatch) == [number + 1] * 3, "once to read again"

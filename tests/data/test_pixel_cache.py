"""The file of decoded pixels: written atomically, rebuilt if damaged, shared and removed."""

import errno
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from decoding import CPU, augmented, decode_all, open_cache, png_folder, view
from PIL import Image

from largebatch import storage
from largebatch.data.decoders import pixel_cache
from largebatch.data.index.index import Index
from largebatch.data.types import Resources
from largebatch.errors import DataError
from largebatch.storage import ReadProgress


@pytest.fixture
def folder(tmp_path: Path, own_cache: None) -> Index:
    return png_folder(tmp_path, one_size=False)


def test_images_are_decoded_once_for_all_runs(
    folder: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_cache(folder)
    monkeypatch.setattr(pixel_cache, "to_pillow", None)  # would fail if it were called
    assert np.array_equal(open_cache(folder).pixels, first.pixels)
    for sample in range(13):
        with Image.open(folder.locate(sample).path) as image:
            assert np.array_equal(first.image(sample), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("shared", [True, False], ids=["common folder", "a folder each"])
def test_one_worker_of_each_folder_writes(
    folder: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Two machines of two workers, whose folders for caches are one or two."""
    barrier = threading.Barrier(4, timeout=600)
    written = []
    real, local = pixel_cache._write, threading.local()

    def count(path: Path, index: Index, threads: int, progress: ReadProgress) -> None:
        written.append(local.rank)
        real(path, index, threads, progress)

    def place(_: Index) -> Path:
        return tmp_path / ("common" if shared else f"machine {local.rank // 2}") / "pixels"

    def work(rank: int) -> int:
        local.rank = rank
        worker: Any = SimpleNamespace(
            rank=rank,
            local_rank=rank % 2,
            barrier=barrier.wait,
            device=CPU,
            all_gather=lambda it: it,
        )
        return len(pixel_cache.open_cache(folder, backend=worker, threads=1).pixels)

    monkeypatch.setattr(pixel_cache, "_write", count)
    monkeypatch.setattr(pixel_cache, "_place", place)
    with ThreadPoolExecutor(4) as pool:
        assert min(pool.map(work, range(4))) > 0
    assert sorted(written) == ([0] if shared else [0, 2])


def cache_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache/largebatch/pixels").iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[:-1], id="the end lost"),
        pytest.param(lambda content: bytes(len(content)), id="zeros, as after a loss of power"),
        pytest.param(
            lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:], id="a bit"
        ),
    ],
)
def test_a_damaged_file_is_written_again(
    damage: Callable[[bytes], bytes],
    folder: Index,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage, "CHUNK", 1000)
    expected = open_cache(folder).pixels.copy()
    (file,) = cache_files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert np.array_equal(open_cache(folder).pixels, expected)
    assert cache_files(tmp_path) == [file]
    assert file.read_bytes() == whole


def test_without_a_writable_place_there_is_an_error_and_no_leftover(
    folder: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "cache/largebatch/pixels"))):
        open_cache(folder)
    assert cache_files(tmp_path) == []


def test_cached_pixels_are_mapped_and_never_copied(folder: Index) -> None:
    """They are in memory once for any number of workers."""
    kept = open_cache(folder)
    opened = pixel_cache.open_decoder(kept, view(), Resources(CPU, threads=2, batch_size=4))
    list(decode_all(opened, augmented(folder, 4, 3)))
    mappings = Path("/proc/self/smaps").read_text(encoding="utf-8").split("VmFlags")
    ours = [mapping for mapping in mappings if folder.digest in mapping]
    assert [re.findall(r"Anonymous: +(\d+) kB", mapping) for mapping in ours] == [["0"]]
    assert np.shares_memory(kept.image(3), kept.pixels)

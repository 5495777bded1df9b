"""Opening and closing the pictures again and again leaves nothing behind."""

import gc
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from decoding import Decode, augmented, both_decoders, open_threads_and_files, photograph, run, view
from PIL import Image

from largebatch.backends.serial import Serial
from largebatch.contracts import Batches
from largebatch.data import cached
from largebatch.data.index import Index, load_or_read

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(6):
        place = tmp_path / "train" / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photograph(60 + number, 80)).save(place / f"{number}.jpg")
    return load_or_read(tmp_path, "train")


def open_and_close(batches: Callable[[], Batches], *, times: int) -> None:
    """Close early, after the end, or without beginning; assert that all is as it was."""
    list(batches())  # what stays for good is there after this
    gc.collect()
    before = open_threads_and_files()
    gc.disable()  # it must not depend on the collector
    try:
        for number in range(times):
            opened = batches()
            for _ in range(number % 5):
                next(opened, None)
            opened.close()
            deadline = time.monotonic() + 5  # a joined thread takes a moment to leave /proc
            while open_threads_and_files() != before:
                assert time.monotonic() < deadline, (open_threads_and_files(), before)
    finally:
        gc.enable()


@both_decoders
def test_decoders_give_threads_and_files_back_each_time(decode: Decode, folder: Index) -> None:
    requests = augmented(folder, 4, 3)
    open_and_close(lambda: run(decode, folder, requests), times=50)


def test_kept_pictures_give_threads_files_and_mappings_back_each_time(folder: Index) -> None:
    requests = augmented(folder, 4, 3)

    def batches() -> Batches:
        kept = cached.keep(folder, backend=Serial(CPU), threads=2)
        return cached.decode(kept, requests, view(), device=CPU, threads=2)

    open_and_close(batches, times=50)
    assert ".rgb" not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_nothing_partial_is_left_where_pictures_are_kept(folder: Index, tmp_path: Path) -> None:
    cached.keep(folder, backend=Serial(CPU), threads=2)
    (file,) = (tmp_path / "cache/largebatch/pixels").iterdir()
    assert file.name == f"{folder.digest}.rgb"
    assert file.stat().st_size == sum(3 * (60 + number) * 80 for number in range(6))


def test_kept_pixels_are_mapped_and_never_copied(folder: Index) -> None:
    """So that any number of workers has them in memory once."""
    kept = cached.keep(folder, backend=Serial(CPU), threads=2)
    list(cached.decode(kept, augmented(folder, 4, 3), view(), device=CPU, threads=2))
    mappings = Path("/proc/self/smaps").read_text(encoding="utf-8").split("VmFlags")
    ours = [mapping for mapping in mappings if f"{folder.digest}.rgb" in mapping]
    assert [re.findall(r"Anonymous: +(\d+) kB", mapping) for mapping in ours] == [["0"]]
    assert np.shares_memory(kept.part(3, [5, 5, 20, 20]), kept.pixels)

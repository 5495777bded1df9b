"""Opening and closing the images again and again leaves nothing behind."""

import contextlib
import ctypes
import gc
import os
import re
import time
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from decoding import augmented, decode_all, needs_dali, open_cache, photograph, view
from PIL import Image

from largebatch.data.decoders import pixel_cache
from largebatch.data.index.index import Index, load_or_read
from largebatch.data.pipeline import open_images
from largebatch.data.types import Resources
from largebatch.distributed.backend import Backend
from largebatch.distributed.serial import Serial
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe

CPU = torch.device("cpu")
DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"

WARM_UP = 5
"""Number of times a pipeline is opened before counting."""

EACH_TIME = 1_000_000
"""Bytes a process may grow by each time, less than a batch of the digits. DALI itself grows by
some 30 MB at some time, and then stays (measured over 300 times)."""

WAYS = {
    "dali": "execution.decoder=dali",
    "torchvision": "execution.decoder=torchvision",
    "cache": "execution.cache=memory",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(6):
        place = tmp_path / "train" / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photograph(60 + number, 80)).save(place / f"{number}.jpg")
    return load_or_read(tmp_path, "train")


def entries(folder: str) -> int:
    return len(list(Path(folder).iterdir()))


def held() -> dict[str, int]:
    """Return the open files of this process and the size of shared memory."""
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    return {
        "threads": entries("/proc/self/task"),
        "files": entries("/proc/self/fd"),
        "mappings of shared memory": mapped.count("/dev/shm/"),
        "mappings of kept pixels": mapped.count(".pixels"),
        "files in shared memory": entries("/dev/shm"),
        "children": len(children()),
    }


def children() -> list[int]:
    """Return the processes that this one started, those it has not waited for included."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(process.name))
    return found


def assert_given_back(before: dict[str, int]) -> None:
    """Assert that nothing more is held than before; changes take a moment to appear in /proc."""
    deadline = time.monotonic() + 120
    while any(number > before[what] for what, number in held().items()):
        assert time.monotonic() < deadline, (held(), before)
        time.sleep(0.001)


def resident_bytes() -> int:
    """Return how much memory this process uses, without the files that it maps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free, in the areas of threads that have ended
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (kilobytes,) = re.findall(r"RssAnon:\s+(\d+) kB", status)
    return 1024 * int(kilobytes)


def open_and_close(way: str, number: int, backend: Backend | None = None) -> int:
    """Open the digits' pipeline, begin a stage and leave it: at its end, early, or never begun."""
    recipe = load_recipe(DIGITS, [WAYS[way]])
    backend = backend or Serial(CPU)
    plan = make_plan(recipe, workers=backend.world_size)
    pipeline = open_images(recipe, plan, backend, folder=None)
    stages = (
        lambda: pipeline.training(range(3), clean=False),
        lambda: pipeline.training(range(3), clean=True),
        lambda: pipeline.statistics(96),
        pipeline.validation,
    )
    with closing(stages[number % len(stages)]()) as batches:
        return len(list(islice(batches, number % 5)))


@pytest.mark.long
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("dali", marks=needs_dali),
        pytest.param("torchvision", marks=pytest.mark.long),
        "cache",
    ],
)
def test_a_pipeline_releases_everything_fifty_times(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(WARM_UP):  # what stays for good is there after this
        open_and_close(way, number)
    memory, before = resident_bytes(), held()
    gc.disable()  # it must not depend on the collector
    try:
        for number in range(50):
            open_and_close(way, number)
            assert_given_back(before)
        assert resident_bytes() - memory < 50 * EACH_TIME
    finally:
        gc.enable()


def test_cached_pixels_are_mapped_and_never_copied(folder: Index) -> None:
    """They are in memory once for any number of workers."""
    kept = open_cache(folder)
    opened = pixel_cache.open_decoder(kept, view(), Resources(CPU, threads=2, batch_size=4))
    list(decode_all(opened, augmented(folder, 4, 3)))
    mappings = Path("/proc/self/smaps").read_text(encoding="utf-8").split("VmFlags")
    ours = [mapping for mapping in mappings if folder.digest in mapping]
    assert [re.findall(r"Anonymous: +(\d+) kB", mapping) for mapping in ours] == [["0"]]
    assert np.shares_memory(kept.part(3, [5, 5, 20, 20]), kept.pixels)

"""Opening and closing the images again and again leaves nothing behind."""

import gc
import re
import time
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from decoding import CPU, augmented, decode_all, needs_dali, open_cache, png_folder, view

from largebatch.data.decoders import pixel_cache
from largebatch.data.pipeline import open_images
from largebatch.data.types import Resources
from largebatch.distributed.serial import Serial
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe


def held() -> dict[str, int]:
    """Return what this process has open."""
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    counts = {name: len(list(Path("/proc/self", name).iterdir())) for name in ("task", "fd")}
    return {**counts, "shared memory": mapped.count("/dev/shm/"), "pixels": mapped.count(".pixels")}


def open_and_close(way: str, number: int) -> None:
    """Open the digits' pipeline, start a stage and leave it: at its end, early, or not started."""
    recipe = load_recipe("digits_96", [way])
    pipeline = open_images(recipe, make_plan(recipe, workers=1), Serial(CPU), folder=None)
    stages = (
        lambda: pipeline.training(range(3), clean=False),
        lambda: pipeline.training(range(3), clean=True),
        lambda: pipeline.statistics(96),
        pipeline.validation,
    )
    with closing(stages[number % len(stages)]()) as batches:
        list(islice(batches, number % 5))


@pytest.mark.long
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("execution.decoder=dali", marks=needs_dali),
        "execution.decoder=torchvision",
        "execution.cache=memory",
    ],
)
def test_a_pipeline_releases_everything_twenty_times(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(5):  # what stays for good is there after this
        open_and_close(way, number)
    before = held()
    gc.disable()  # it must not depend on the collector
    try:
        for number in range(20):
            open_and_close(way, number)
            deadline = time.monotonic() + 120
            while any(count > before[what] for what, count in held().items()):
                assert time.monotonic() < deadline, (held(), before)
                time.sleep(0.001)  # changes take a moment to appear in /proc
    finally:
        gc.enable()


def test_cached_pixels_are_mapped_and_never_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in memory once for any number of workers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = png_folder(tmp_path, one_size=False)
    kept = open_cache(folder)
    opened = pixel_cache.open_decoder(kept, view(), Resources(CPU, threads=2, batch_size=4))
    list(decode_all(opened, augmented(folder, 4, 3)))
    mappings = Path("/proc/self/smaps").read_text(encoding="utf-8").split("VmFlags")
    ours = [mapping for mapping in mappings if folder.digest in mapping]
    assert [re.findall(r"Anonymous: +(\d+) kB", mapping) for mapping in ours] == [["0"]]
    assert np.shares_memory(kept.part(3, [5, 5, 20, 20]), kept.pixels)

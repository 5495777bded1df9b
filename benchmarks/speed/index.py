"""Measure how fast an index is built, and how fast a run over one of ImageNet's size starts.

    LARGEBATCH_DATA=DIR python -m benchmarks.speed.index [--rounds N]

Made: headers of small JPEGs (imagenette224, 3,500 of about 10 kB, from a warm page cache), as files
and as shards, in rounds, compared with Pillow opening the same files one after the other. "Per
core" is per second of processor time, which other jobs on the machine do not lengthen much.

Started: a run over as many files in 1,000 class folders, hard links to the 100 full-size images
(imagenet_samples), by new processes and from a warm page cache: how long they import, until the
index is open and compared with its folder, and from there until the first batch of a run; and the
most memory that they held (VmHWM). The names are as many as ImageNet's, the inodes only 100.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.speed.measuring import paired_ratio, spread, write
from largebatch.data.datasets import import_data
from largebatch.data.index.index import (
    difference,
    index_of,
    make,
    open_content,
    read_folder,
)
from largebatch.data.pipeline import open_images
from largebatch.distributed.serial import Serial
from largebatch.optional import require_torchvision
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.storage import silent

SAMPLES = 1_281_167
CLASSES = 1000
BATCH = 64
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "imagenet" / "resnet50_32768_mlperf.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--start", nargs=3, help=argparse.SUPPRESS)  # what `starting` runs
    args = parser.parse_args()
    if args.start:
        print(json.dumps(_start(Path(args.start[0]), args.start[1], start=float(args.start[2]))))
        return
    result: dict[str, Any] = {"rounds": args.rounds}
    with tempfile.TemporaryDirectory() as folder:
        for measure in (making, starting):
            result |= measure(Path(folder), args.rounds)
    print(write("index", result))


def making(folder: Path, rounds: int) -> dict[str, Any]:
    """Time the reading of headers."""
    source = Path(os.environ["LARGEBATCH_DATA"]) / "imagenette224"
    for split in ("train", "val"):
        with zipfile.ZipFile(source / f"{split}.zip") as archive:
            archive.extractall(folder / "files")
    shards = folder / "shards"
    import_data("webdataset", folder / "files", shards, shard_bytes=10**7, progress=silent)
    rivals: dict[str, Callable[[], int]] = {
        "files": lambda: _build(folder / "files"),
        "shards": lambda: _build(shards),
        "pillow": lambda: _pillow(folder / "files"),
    }
    wall: dict[str, list[float]] = {name: [] for name in rivals}
    processor: dict[str, list[float]] = {name: [] for name in rivals}
    for name, call in [(name, call) for _ in range(1 + rounds) for name, call in rivals.items()]:
        start = time.perf_counter()
        used = time.process_time()
        number = call()
        wall[name].append((time.perf_counter() - start) / number)
        processor[name].append((time.process_time() - used) / number)
    result: dict[str, Any] = {}
    for name in rivals:  # the first round warms up
        result[f"{name}_a_second"] = spread([1 / each for each in wall[name][1:]])
        result[f"{name}_a_second_per_core"] = spread([1 / each for each in processor[name][1:]])
    result["pillow_time_over_ours"] = paired_ratio(processor["pillow"][1:], processor["files"][1:])
    return result


def _build(root: Path) -> int:
    return sum(len(read_folder(root, split)) for split in ("train", "val"))


def _pillow(root: Path) -> int:
    paths = list(root.glob("*/*/*.JPEG"))
    for path in paths:
        with Image.open(path) as image:
            assert image.size
    return len(paths)


def starting(folder: Path, rounds: int) -> dict[str, Any]:
    """Time the start of a run over files in class folders, in new processes."""
    root = folder / "linked"
    with zipfile.ZipFile(Path(os.environ["LARGEBATCH_DATA"]) / "imagenet_samples/samples.zip") as z:
        z.extractall(folder / "images")
    images = sorted((folder / "images").rglob("*.*"))
    for split, number in (("train", SAMPLES), ("val", CLASSES)):
        link(images, root / split, number)
    make(root, "val")
    start = time.perf_counter()
    content = make(root, "train")
    result: dict[str, Any] = {"started_make_seconds": time.perf_counter() - start}
    start = time.perf_counter()
    assert difference(content, root, every_file=True) is None
    result["started_check_of_every_file_seconds"] = time.perf_counter() - start
    for what in ("index", "dali", "torchvision"):
        each = [_new_process(root, what) for _ in range(1 + rounds)][1:]  # the first warms up
        for figure in each[0]:
            result[f"started_{what}_{figure}"] = spread([one[figure] for one in each])
    return result


def link(images: list[Path], folder: Path, number: int) -> None:
    """Create class folders with many names, hard links to the same images."""
    for label in range(CLASSES):
        name = f"n{10_000_000 + 1234 * label}"
        (folder / name).mkdir(parents=True)
        for sample in range(label, number, CLASSES):
            target = images[sample // CLASSES % len(images)]
            os.link(target, f"{folder}/{name}/{name}_{sample}.JPEG")


def _new_process(root: Path, what: str) -> dict[str, float]:
    """Call `_start` in a new process; all processes of a machine share the clock."""
    words = ["--start", str(root), what, str(time.perf_counter())]
    command = [sys.executable, "-m", "benchmarks.speed.index", *words]
    return dict(json.loads(subprocess.check_output(command, cwd=ROOT)))


def _start(root: Path, what: str, *, start: float) -> dict[str, float]:
    """Open the index, or the pipeline of a run with this decoder up to its first batch."""
    if what == "dali":
        importlib.import_module("nvidia.dali")
    elif what == "torchvision":
        require_torchvision()
    imported = time.perf_counter()
    if what == "index":
        assert len(index_of(open_content(root, "train"), root)) == SAMPLES
    else:
        _first_batch(root, what)
    return {
        "import_seconds": imported - start,
        "seconds": time.perf_counter() - imported,
        "most_mb": _most_megabytes(),
    }


def recipe_of(batch: int, *changes: str) -> Recipe:
    """Return a recipe in batches of this size of as many images as are made here."""
    numbers = (f"data.train_samples={SAMPLES}", f"data.val_samples={CLASSES}", "polish=null")
    batches = (f"batch.global_batch={batch}", f"batch.bn_span={batch}")
    return load_recipe(RECIPE, [f"data.classes={CLASSES}", *numbers, *batches, *changes])


def _first_batch(root: Path, decoder: str) -> None:
    recipe = recipe_of(BATCH, f"execution.decoder={decoder}")
    plan = make_plan(recipe, workers=1)
    backend = Serial(torch.device("cpu"))
    pipeline = open_images(recipe, plan, backend, folder=root)
    batches = pipeline.training(range(plan.steps), clean=False)
    assert len(next(batches).labels) == BATCH
    batches.close()


def _most_megabytes() -> float:
    """Return the peak of the memory of this process (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    main()

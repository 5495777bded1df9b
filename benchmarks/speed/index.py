"""Measure how fast an index is built, and how fast one of ImageNet's size opens.

    LARGEBATCH_DATA=DIR python -m benchmarks.speed.index [--rounds N]

Made: headers of small JPEGs (imagenette224, 3,500 of about 10 kB, from a warm page cache), as files
and as shards, in rounds, beside Pillow opening the same files one after the other. "Per core" is
per second of processor time, which other jobs on the machine do not lengthen much. Opened: an index
of 1,281,167 names like ImageNet's, by new processes; memory is what the kernel says they hold
(VmRSS; and of the file, PSS, in which a page that several processes map counts once in all).

Started: a run over as many files in 1,000 class folders, hard links to the 100 full-size images
(imagenet_samples), by new processes and from a warm page cache: how long they import, until the
index is open and compared with its folder, and from there until the first batch of a run; and the
most memory that they held (VmHWM). The names are as many as ImageNet's, the inodes only 100.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.speed.measuring import paired_ratio, spread, write
from largebatch.data.datasets.packing import pack_folder
from largebatch.data.index.build import build
from largebatch.data.index.file import FORMAT, Content, pack
from largebatch.data.index.folder import difference, scan
from largebatch.data.index.index import index_of, load_file, make, open_content
from largebatch.distributed.serial import Serial
from largebatch.optional import require_torchvision
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe
from largebatch.runs.build import open_pipeline

SAMPLES, CLASSES, PROCESSES = 1_281_167, 1000, 4
SEED = 0
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
        for measure in (making, opening, starting):
            result |= measure(Path(folder), args.rounds)
    print(write("index", result))


def making(folder: Path, rounds: int) -> dict[str, Any]:
    """Time the reading of headers."""
    source = Path(os.environ["LARGEBATCH_DATA"]) / "imagenette224"
    for split in ("train", "val"):
        with zipfile.ZipFile(source / f"{split}.zip") as archive:
            archive.extractall(folder / "files")
    shards = folder / "shards"
    pack_folder(folder / "files", shards, shard_bytes=10**7, progress=lambda _done, _total: None)
    rivals: dict[str, Callable[[], int]] = {
        "files": lambda: _build(folder / "files"),
        "shards": lambda: _build(shards),
        "pillow": lambda: _pillow(folder / "files"),
    }
    wall: dict[str, list[float]] = {name: [] for name in rivals}
    processor: dict[str, list[float]] = {name: [] for name in rivals}
    for name, call in [(name, call) for _ in range(1 + rounds) for name, call in rivals.items()]:
        start, used = time.perf_counter(), time.process_time()
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
    contents = [build(scan(root, split)) for split in ("train", "val")]
    return sum(len(content.arrays["labels"]) for content in contents)


def _pillow(root: Path) -> int:
    paths = list(root.glob("*/*/*.JPEG"))
    for path in paths:
        with Image.open(path) as image:
            assert image.size
    return len(paths)


def opening(folder: Path, rounds: int) -> dict[str, Any]:
    """Time how new processes open a large index, and measure the memory of several that read it."""
    file = folder / "large.index"
    file.write_bytes(pack(*imagenet()[:2]))
    context = multiprocessing.get_context("spawn")
    results = []
    for number in [1] * rounds + [PROCESSES]:
        together = context.Barrier(number)
        with context.Pool(number, _together, [together]) as pool:
            results.append(pool.map(_open, [file] * number, chunksize=1))
    alone, several = [each[0] for each in results[:-1]], results[-1]
    return {
        "samples": SAMPLES,
        "file_mb": file.stat().st_size / 1e6,
        "open_seconds": spread([each["seconds"] for each in alone]),
        "open_rss_mb": spread([each["opened_mb"] for each in alone]),
        "batch_of_256_seconds": spread([each["batch_seconds"] for each in alone]),
        "all_read_rss_mb": spread([each["read_mb"] for each in alone]),
        f"all_read_pss_mb_of_{PROCESSES}_processes": sum(each["pss_mb"] for each in several),
    }


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
        "most_mb": _resident("VmHWM"),
    }


def _first_batch(root: Path, decoder: str) -> None:
    changes = {
        "data.classes": CLASSES,
        "data.train_samples": SAMPLES,
        "data.val_samples": CLASSES,
        "batch.global_batch": BATCH,
        "batch.bn_span": BATCH,
        "execution.decoder": decoder,
        "polish": "null",
    }
    recipe = load_recipe(RECIPE, [f"{key}={value}" for key, value in changes.items()])
    plan = make_plan(recipe, workers=1)
    backend = Serial(torch.device("cpu"))
    pipeline = open_pipeline(recipe, plan, backend, folder=root)
    batches = pipeline.training(range(plan.steps), clean=False)
    assert len(next(batches).labels) == BATCH
    batches.close()


def imagenet() -> Content:
    """Generate the index of a training set like ImageNet's."""
    random = np.random.default_rng(SEED)
    labels = np.sort(random.integers(0, CLASSES, SAMPLES))
    classes = [f"n{10_000_000 + 1234 * label}" for label in range(CLASSES)]
    numbers = random.integers(0, 40_000, SAMPLES).tolist()
    names = [f"{classes[n]}_{k}.JPEG".encode() for n, k in zip(labels, numbers, strict=True)]
    header = {
        "format": FORMAT,
        "split": "train",
        "classes": classes,
        "ignored": [],
        "folders": [[name, 10**18] for name in classes],
        "shards": [],
        "bad": [],
        "digest": "made up",
    }
    return Content(
        header,
        {
            "labels": labels,
            "heights": random.integers(200, 600, SAMPLES),
            "widths": random.integers(200, 600, SAMPLES),
            "orientations": np.ones(SAMPLES, np.uint8),
            "num_bytes": random.integers(10_000, 200_000, SAMPLES),
            "mtimes": np.full(SAMPLES, 10**18),
            "names": np.frombuffer(b"".join(names), np.uint8),
            "name_ends": np.cumsum([len(name) for name in names], dtype=np.uint32),
        },
    )


def _together(barrier: Barrier) -> None:
    """Pass shared synchronization objects to a new process."""
    globals()["_barrier"] = barrier


def _open(file: Path) -> dict[str, float]:
    """Open the index in this process, use it, then read all of it while all processes hold it."""
    before = _resident()
    start = time.perf_counter()
    content = load_file(file)
    index = index_of(content, Path("imagenet"))
    seconds = time.perf_counter() - start
    opened = _resident()
    samples = np.random.default_rng(SEED).integers(0, len(index), 256)
    start = time.perf_counter()
    assert len([index.locate(sample) for sample in samples.tolist()]) == 256
    batch_seconds = time.perf_counter() - start
    for array in content.arrays.values():
        int(array.sum())
    read = _resident()
    globals()["_barrier"].wait()
    share = _share(file)
    globals()["_barrier"].wait()
    return {
        "seconds": seconds,
        "opened_mb": opened - before,
        "batch_seconds": batch_seconds,
        "read_mb": read - before,
        "pss_mb": share,
    }


def _resident(kind: str = "VmRSS") -> float:
    """Return the memory of this process in MB, now or at its peak (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise LookupError(f"/proc/self/status has no {kind}")


def _share(file: Path) -> float:
    """Return this process's share of a mapped file in MB: a page of four processes counts 1/4."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            inside = line.endswith(str(file))
        elif inside and first == "Pss:":
            total += int(rest[0])
    return total * 1024 / 1e6


if __name__ == "__main__":
    main()

"""Measure images per second on the GPU: a small cached data set, and JPEGs decoded by DALI.

    [LARGEBATCH_DATA=DIR] python -m benchmarks.speed.input_gpu [--rounds 9] [--steps 20]

With `--device cpu --rounds 2 --steps 2 --images 256 --batches 64 --jpeg-batch 8` it runs anywhere
and writes nothing.

As many images as CIFAR-10 has for training, of its size but of noise, which makes no difference
once they are decoded; random crops and flips, at some sizes of a batch: kept on the GPU (`cache:
device`), against kept in memory, made by threads and copied (`cache: memory`); and what the host
alone does for each batch: order, boxes, flips. Then, where LARGEBATCH_DATA is set and DALI is
installed, 100 full-size ImageNet JPEGs, RandomResizedCrop 224, flip, normalise: our requests to
DALI, decoded on the GPU, against DALI's own reader and random crops there. A step is a batch; the
GPU is waited for after the steps of a round.
"""

import argparse
import importlib
import importlib.util
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.speed.input_pipeline import AREA, batches, dali_reader, requests, view
from benchmarks.speed.measuring import Step, add_seconds, paired_ratio, spread, take_turns, write
from largebatch import accelerator
from largebatch.data.datasets.arrays import data_set
from largebatch.data.datasets.packing import write_shards
from largebatch.data.decoders import dali, pixel_cache
from largebatch.data.index.index import load_or_read
from largebatch.data.types import Request, Resources
from largebatch.distributed.environment import available_cores
from largebatch.distributed.serial import Serial

SMALL_AREA = (0.6, 1.0)
TARGET = 200_000
"""Yield images from `cache: device`."""


def step(batches: Iterator[object]) -> Step:
    return lambda: next(batches)


def write_noise(folder: Path, number: int) -> None:
    """Write images of CIFAR-10's size into shards."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(256, size=(number, 32, 32, 3), dtype=np.uint8)
    noise = data_set(("a", "b"), {"train": (pixels, np.arange(number) % 2)})
    write_shards(noise, folder, shard_bytes=2**26, progress=lambda *_: None)


def small(folder: Path, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the small images, shards in `folder`."""
    index = load_or_read(folder, "train")
    backend = Serial(args.device)
    kept = pixel_cache.open_cache(index, backend=backend, threads=args.threads)
    shown = view(32)

    def small_requests() -> Iterator[Request]:
        return requests(index, batch, SMALL_AREA)

    kept_there = pixel_cache.decode_on_device(
        pixel_cache.upload(kept, args.device), shown, small_requests()
    )
    resources = Resources(args.device, threads=args.threads, batch_size=batch)
    in_memory = batches(pixel_cache.open_decoder(kept, shown, resources), small_requests())
    rivals = {"cache: device": step(kept_there), "cache: memory": step(in_memory)}
    times = take_turns(rivals, backend=backend, **limits(args))
    arithmetic = {"order, boxes, flips": step(small_requests())}
    times |= take_turns(arithmetic, backend=Serial(), **limits(args))
    kept_there.close()
    in_memory.close()
    device = times["cache: device"]
    return {
        "images a second": rates(times, batch),
        "ratios": {
            "device / memory": paired_ratio(device, times["cache: memory"]),
            "device / target": paired_ratio(device, [batch / TARGET] * len(device)),
        },
    }


def limits(args: argparse.Namespace) -> dict[str, Any]:
    """Return the times of rivals in turns: twice for each batch of small images, once for JPEGs."""
    seconds = args.seconds / (2 * len(args.batches) + 1)
    return {"rounds": args.rounds, "steps": args.steps, "seconds": seconds}


def rates(times: dict[str, list[float]], batch: int) -> dict[str, Any]:
    return {name: spread([batch / seconds for seconds in each]) for name, each in times.items()}


def jpegs(samples: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure full-size JPEGs, each in its own class folder."""
    with zipfile.ZipFile(samples) as archive:
        for name in archive.namelist():
            place = folder / "train" / Path(name).stem
            place.mkdir(parents=True)
            (place / Path(name).name).write_bytes(archive.read(name))
    index = load_or_read(folder, "train")
    resources = Resources(args.device, threads=args.threads, batch_size=args.jpeg_batch)
    opened = dali.open_decoder(index, view(224), resources)
    ours = batches(opened, requests(index, args.jpeg_batch, AREA))
    theirs = dali_reader(folder, batch=args.jpeg_batch, threads=args.threads, device=args.device)
    rivals = {"ours on DALI": step(ours), "DALI's reader": step(theirs)}
    times = take_turns(rivals, backend=Serial(args.device), **limits(args))
    ours.close()
    return {
        "images a second": rates(times, args.jpeg_batch),
        "ratios": {"ours / DALI's reader": paired_ratio(*times.values())},
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    data = os.environ.get("LARGEBATCH_DATA")
    parser.add_argument("--data", type=Path, default=data)
    parser.add_argument("--device", type=torch.device, default=accelerator.current())
    parser.add_argument("--rounds", type=int, default=9)
    add_seconds(parser)
    parser.add_argument("--steps", type=int, default=20, help="batches of each rival in a round")
    parser.add_argument("--batches", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--images", type=int, default=50_000, help="small ones")
    parser.add_argument("--jpeg-batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=available_cores())
    return parser.parse_args()


def main() -> None:
    """Measure, then print and, if a GPU was measured, write the result."""
    args = _arguments()
    torch.set_num_threads(1)  # the threads that work are those of the pipeline
    shown = {**vars(args), "data": "LARGEBATCH_DATA", "device": str(args.device)}
    result: dict[str, Any] = {"settings": shown, "target": f"{TARGET:,} images a second"}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        shards = Path(scratch, "small")
        write_noise(shards, args.images)
        for batch in args.batches:
            result[f"small images, batches of {batch}"] = small(shards, batch, args)
        if not (importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")):
            result["not installed"] = ["NVIDIA DALI"]
        elif args.data is not None:
            samples = args.data / "imagenet_samples/samples.zip"
            result["full-size JPEGs"] = jpegs(samples, Path(scratch, "jpeg"), args)
    print(json.dumps(result, indent=2))
    if accelerator.is_remote(args.device):
        print(write("input_gpu", result))


if __name__ == "__main__":
    main()

"""Images a second of the input pipeline, against DALI's own reader and torchvision's DataLoader.

    LARGEBATCH_DATA=DIR python benchmarks/input_pipeline.py [--rounds 9] [--batches 12]

Full-size ImageNet JPEGs, RandomResizedCrop 224, flip, normalise; two threads or worker processes.
In every round each rival goes once, in turn: some batches that are not counted, so that what it
had prepared while others ran is used up, then the counted ones. Ratios are of the same round. Then:
what order and boxes cost, the first batch of a run over 1.28 million pictures, and CIFAR-10 kept
decoded against decoded each time.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import paired_ratio, spread, write
from PIL import Image

from largebatch.backends.serial import Serial
from largebatch.contracts import Batches, Request, View
from largebatch.data import cached, dali, torchvision, train_request
from largebatch.data.index import Index, load_or_read, make
from largebatch.data.mapped import pack, write_whole
from largebatch.data.order import _permutation, sample_ids
from largebatch.data.pipeline import open_pipeline
from largebatch.data.reading import read
from largebatch.data.shards import ShardWriter
from largebatch.loading import load_recipe
from largebatch.plan import make_plan
from largebatch.vision import require_torchvision

IMAGENET = 1_281_167
RECIPE = Path(__file__).parent.parent / "recipes" / "resnet50_32768_mlperf.yaml"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)
CPU = torch.device("cpu")

Rival = Iterator[object]
"""Gives batch after batch, for ever."""


def view(size: int) -> View:
    return View(image_size=size, mean=MEAN, std=STD, interpolation="bilinear", antialias=True)


def requests(index: Index, batch: int, area: tuple[float, float] = AREA) -> Iterator[Request]:
    for number in count():
        positions = range(number * batch, (number + 1) * batch)
        yield train_request(index, positions, seed=0, area=area, aspect=ASPECT, flip=True)


def ours(decode: Callable[..., Batches], index: Index, args: argparse.Namespace) -> Rival:
    return decode(
        index,
        requests(index, args.batch),
        view(224),
        device=CPU,
        threads=args.threads,
        batch_size=args.batch,
    )


def dali_reader(folder: Path, args: argparse.Namespace) -> Rival:
    """DALI's own reader, with cropping inside the decoder."""
    nvidia_dali: Any = importlib.import_module("nvidia.dali")
    fn, types = nvidia_dali.fn, nvidia_dali.types
    pipeline = nvidia_dali.Pipeline(
        batch_size=args.batch, num_threads=args.threads, device_id=None, prefetch_queue_depth=2
    )
    with pipeline:
        encoded, labels = fn.readers.file(file_root=str(folder / "train"), random_shuffle=True)
        images = fn.decoders.image_random_crop(
            encoded, device="cpu", random_area=list(AREA), random_aspect_ratio=list(ASPECT)
        )
        images = fn.resize(images, size=[224, 224], interp_type=types.INTERP_LINEAR, antialias=True)
        images = fn.crop_mirror_normalize(
            images,
            mirror=fn.random.coin_flip(),
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
            dtype=types.FLOAT,
            output_layout="CHW",
        )
        pipeline.set_outputs(images, labels)
    while True:
        images, labels = pipeline.run()
        yield images.as_tensor(), labels.as_tensor()


def data_loader(folder: Path, args: argparse.Namespace) -> Rival:
    """Run torchvision's transforms on Pillow in the worker processes of a DataLoader."""
    require_torchvision()
    from torchvision import datasets, transforms

    steps = transforms.Compose(
        [
            transforms.RandomResizedCrop(224, scale=AREA, ratio=ASPECT),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    loader = torch.utils.data.DataLoader(
        datasets.ImageFolder(str(folder / "train"), steps),
        batch_size=args.batch,
        sampler=torch.utils.data.RandomSampler(range(100), replacement=True, num_samples=10**9),
        num_workers=args.threads,
    )
    yield from loader


def compete(rivals: dict[str, Rival], args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the images a second of each rival in every round but the first."""
    rates: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(args.rounds + 1):
        for name, batches in rivals.items():
            for _ in range(args.uncounted):
                next(batches)
            begun = time.perf_counter()
            for _ in range(args.batches):
                next(batches)
            rates[name].append(args.batches * args.batch / (time.perf_counter() - begun))
    return {name: values[1:] for name, values in rates.items()}


def compared(ours: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return the spread of every rate, and the ratios of ours to the others."""
    others = {name: values for name, values in rates.items() if name != ours}
    return {
        "images a second": {name: spread(values) for name, values in rates.items()},
        f"ratios of {ours}": {n: paired_ratio(rates[ours], values) for n, values in others.items()},
    }


def full_size(samples: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure ours against the rivals on full-size JPEGs, in class folders."""
    with zipfile.ZipFile(samples) as archive:
        for name in archive.namelist():
            for split in ("train", "val"):
                place = folder / split / Path(name).stem
                place.mkdir(parents=True)
                (place / Path(name).name).write_bytes(archive.read(name))
    index = load_or_read(folder, "train")
    rates = compete(
        {
            "ours on DALI": ours(dali.decode, index, args),
            "DALI's reader": dali_reader(folder, args),
            "DataLoader": data_loader(folder, args),
            "ours on torchvision": ours(torchvision.decode, index, args),
        },
        args,
    )
    targets = "ours on DALI / DALI's reader at least 1.0, / DataLoader at least 1.3"
    return {"targets": targets, **compared("ours on DALI", rates)}


def arithmetic(index: Index, seconds_a_batch: float, args: argparse.Namespace) -> dict[str, Any]:
    """Measure order and boxes over ImageNet, the permutation of an epoch included."""
    begun = time.perf_counter()
    sample_ids(range(1), seed=1, num_samples=len(index))
    permutation = time.perf_counter() - begun
    asked = requests(index, args.batch)
    next(asked)
    times = []
    for _ in range(200):
        begun = time.perf_counter()
        next(asked)
        times.append(time.perf_counter() - begun)
    total = float(np.median(times)) + permutation * args.batch / len(index)
    return {
        "target": "at most 3 % of a batch's time",
        "milliseconds a batch": 1000 * total,
        "milliseconds for an epoch's permutation": 1000 * permutation,
        "part of a batch's time": total / seconds_a_batch,
    }


def million(index: Index, folder: Path) -> Path:
    """Write the pictures as shards whose index lists them 12,812 times over; return the folder."""
    for split in ("train", "val"):
        with ShardWriter(folder / split, shard_bytes=2**28) as shard:
            for sample, label in enumerate(index.labels.tolist()):
                shard.add(read(index.locate(sample)), extension="jpeg", label=label)
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in index.classes))
    make(folder, "val")
    kept = make(folder, "train")
    rows = np.arange(IMAGENET) % len(kept.arrays["labels"])
    arrays = {name: array[rows] for name, array in kept.arrays.items()}
    assert kept.file is not None
    write_whole(kept.file, pack({**kept.header, "digest": "million"}, arrays))
    return folder


def first_batch(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure from opening the pipeline of a run until it has its first batch."""
    changes = {
        "data.classes": 100,
        "data.train_samples": IMAGENET,
        "data.val_samples": 100,
        "batch.global_batch": args.batch,
        "batch.bn_span": args.batch,
        "polish": "null",
    }
    recipe = load_recipe(RECIPE, [f"{key}={value}" for key, value in changes.items()])
    plan = make_plan(recipe, workers=1)
    seconds = []
    for _ in range(args.rounds):
        _permutation.cache_clear()
        begun = time.perf_counter()
        pipeline = open_pipeline(recipe, plan, Serial(CPU), folder=folder, decoder="dali")
        batches = pipeline.training(range(plan.steps), clean=False)
        next(batches)
        seconds.append(time.perf_counter() - begun)
        batches.close()
    return {"target": "less than 2 s", "seconds": spread(seconds), "samples": IMAGENET}


def cifar(archive: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure 10,000 CIFAR-10 pictures kept decoded against PNG files decoded each time."""
    labels = np.load(archive / "test_labels.npy")
    number = 0
    for mosaic in sorted(archive.glob("test-*.webp")):
        with Image.open(mosaic) as image:
            tiles = np.asarray(image.convert("RGB")).reshape(100, 32, 50, 32, 3)
        for pixels in tiles.transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3):
            place = folder / "train" / str(labels[number])
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(place / f"{number}.png")
            number += 1
    index = load_or_read(folder, "train")
    batch, small = 256, view(32)
    begun = time.perf_counter()
    kept = cached.keep(index, backend=Serial(CPU), threads=args.threads)
    filling = time.perf_counter() - begun

    def decoding(decode: Callable[..., Batches]) -> Rival:
        asked = requests(index, batch, (0.25, 1.0))
        return decode(index, asked, small, device=CPU, threads=args.threads, batch_size=batch)

    asked = requests(index, batch, (0.25, 1.0))
    rates = compete(
        {
            "cache": cached.decode(kept, asked, small, device=CPU, threads=args.threads),
            "decoded by DALI": decoding(dali.decode),
            "decoded by torchvision": decoding(torchvision.decode),
        },
        argparse.Namespace(**{**vars(args), "batch": batch, "batches": 4 * args.batches}),
    )
    targets = "cache / decoded each time at least 3"
    return {"targets": targets, "seconds to decode and keep": filling, **compared("cache", rates)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    data = os.environ.get("LARGEBATCH_DATA")
    parser.add_argument("--data", type=Path, default=data, required=data is None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=12, help="counted, in each round")
    parser.add_argument("--uncounted", type=int, default=4, help="batches before them")
    parser.add_argument("--threads", type=int, default=2, help="threads or worker processes")
    return parser.parse_args()


def main() -> None:
    """Measure, then print and write the result."""
    args = _arguments()
    torch.set_num_threads(1)  # the threads compared are those that decode
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        folder = Path(scratch)
        result: dict[str, Any] = {"settings": {**vars(args), "data": "LARGEBATCH_DATA"}}
        samples = args.data / "imagenet_samples/samples.zip"
        result["full-size JPEGs"] = full_size(samples, folder / "jpeg", args)
        shards = million(load_or_read(folder / "jpeg", "train"), folder / "shards")
        rate = result["full-size JPEGs"]["images a second"]["ours on DALI"]["median"]
        index = load_or_read(shards, "train")
        result["order and boxes"] = arithmetic(index, args.batch / rate, args)
        result["first batch of 1.28 million"] = first_batch(shards, args)
        result["CIFAR-10"] = cifar(args.data / "cifar10", folder / "cifar10", args)
    print(json.dumps(result, indent=2))
    print(write("input_pipeline", " ".join(["python", *sys.argv]), result))


if __name__ == "__main__":
    main()

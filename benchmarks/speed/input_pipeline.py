"""Measure images per second of the input pipeline, against DALI's reader and a DataLoader.

    LARGEBATCH_DATA=DIR python -m benchmarks.speed.input_pipeline [--rounds 9] [--batches 12]

Full-size ImageNet JPEGs, RandomResizedCrop 224, flip, normalise; two threads or worker processes.
In every round each rival goes once, in turn: some batches that are not counted, so that what it
had prepared while others ran is used up, then the counted ones. Ratios are of times in the same
round, ours first. Then: device batches of 28 against 256, for each decoder; and CIFAR-10 kept
decoded against decoded each time. index.py measures the first batch of a run, input_host.py the
time of input in the thread that trains.
"""

import argparse
import importlib
import json
import math
import os
import random
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.speed.measuring import paired_ratio, spread, write
from largebatch.data.augment import train_request
from largebatch.data.decoders import dali, pixel_cache, torchvision
from largebatch.data.index.index import Index, load_or_read
from largebatch.data.types import Batches, Decode, Request, Resources, View
from largebatch.distributed.serial import Serial
from largebatch.optional import require_torchvision
from largebatch.recipe.data import Data

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)
CPU = torch.device("cpu")
SMALL, LARGE = 28, 256
"""Device batches: that of 86,016 images on 3,072 GPUs, and the largest that is usual on a CPU."""

Rival = Iterator[object]
"""Yields batches indefinitely."""

OpenDecoder = Callable[[Index, View, Resources], AbstractContextManager[Decode]]


def view(size: int) -> View:
    return View(image_size=size, mean=MEAN, std=STD, interpolation="bilinear")


def requests(index: Index, batch: int, area: tuple[float, float] = AREA) -> Iterator[Request]:
    data = Data(
        source="folder",
        classes=len(index.classes),
        train_samples=len(index),
        val_samples=1,
        image_size=224,
        crop_area=area,
        crop_aspect=ASPECT,
        flip=True,
        eval_resize=None,
    )
    for number in count():
        positions = range(number * batch, (number + 1) * batch)
        yield train_request(index, positions, data, view(224), seed=0)


def batches(opened: AbstractContextManager[Decode], asked: Iterator[Request]) -> Batches:
    """Decode until the batches are closed."""
    with opened as decode:
        for _, batch in decode(asked):
            yield batch


def ours(open_decoder: OpenDecoder, index: Index, args: argparse.Namespace) -> Rival:
    resources = Resources(CPU, threads=args.threads, batch_size=args.batch)
    return batches(open_decoder(index, view(224), resources), requests(index, args.batch))


def dali_reader(folder: Path, *, batch: int, threads: int, device: torch.device = CPU) -> Rival:
    """DALI's own reader, with cropping inside the decoder, all on the device."""
    nvidia_dali: Any = importlib.import_module("nvidia.dali")
    fn = nvidia_dali.fn
    types = nvidia_dali.types
    on_gpu = device.type == "cuda"
    pipeline = nvidia_dali.Pipeline(
        batch_size=batch,
        num_threads=threads,
        device_id=torch.cuda.current_device() if on_gpu else None,
        prefetch_queue_depth=dali.AHEAD,
    )
    with pipeline:
        encoded, labels = fn.readers.file(file_root=str(folder / "train"), random_shuffle=True)
        images = fn.decoders.image_random_crop(
            encoded,
            device="mixed" if on_gpu else "cpu",
            random_area=list(AREA),
            random_aspect_ratio=list(ASPECT),
        )
        images = fn.resize(images, size=[224, 224], interp_type=types.INTERP_LINEAR)
        images = fn.crop_mirror_normalize(
            images,
            mirror=fn.random.coin_flip(),
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
            dtype=types.FLOAT,
            output_layout="CHW",
        )
        pipeline.set_outputs(images, labels)
    stream = torch.cuda.current_stream(device) if on_gpu else None
    while True:
        images, labels = pipeline.run(stream)
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
        sampler=torch.utils.data.RandomSampler(range(100), num_samples=10**9),  # many epochs
        num_workers=args.threads,
    )
    yield from loader


def compete(rivals: dict[str, Rival], args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the images per second of each rival in every round, in random order.

    Each begins when the one before has ended what it works on ahead, and what it has itself made
    ahead by then is not counted.
    """
    rates: dict[str, list[float]] = {name: [] for name in rivals}
    draw = random.Random(0)
    for _ in range(args.rounds + 1):  # the first is not counted
        for name, batches in draw.sample(list(rivals.items()), k=len(rivals)):
            time.sleep(args.pause)
            for _ in range(args.uncounted):
                next(batches)
            start = time.perf_counter()
            for _ in range(args.batches):
                next(batches)
            rates[name].append(args.batches * args.batch / (time.perf_counter() - start))
    return {name: values[1:] for name, values in rates.items()}


def compared(ours: str, rates: dict[str, list[float]], targets: dict[str, float]) -> dict[str, Any]:
    """Return the spread of every rate, the ratios of times of ours to the others, and verdicts."""
    others = {name: values for name, values in rates.items() if name != ours}
    ratios = {name: paired_ratio(values, rates[ours]) for name, values in others.items()}
    return {
        "images a second": {name: spread(values) for name, values in rates.items()},
        "ratios": {f"{ours} / {name}": ratio for name, ratio in ratios.items()},
        "at most": targets,
        "met": {name: ratios[name]["median"] <= target for name, target in targets.items()},
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
            "ours on DALI": ours(dali.open_decoder, index, args),
            "DALI's reader": dali_reader(folder, batch=args.batch, threads=args.threads),
            "DataLoader": data_loader(folder, args),
            "ours on torchvision": ours(torchvision.open_decoder, index, args),
        },
        args,
    )
    return compared("ours on DALI", rates, {"DALI's reader": 1.0, "DataLoader": 1 / 1.3})


def small_batches(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure small device batches against large ones, of the JPEGs that `full_size` wrote.

    In a turn both decode as many images as are whole batches of either.
    """
    index = load_or_read(folder, "train")
    images = math.lcm(SMALL, LARGE)
    turn = argparse.Namespace(
        rounds=args.rounds, pause=args.pause, batch=images, batches=1, uncounted=1
    )

    def rival(open_decoder: OpenDecoder, batch: int) -> Rival:
        sized = argparse.Namespace(batch=batch, threads=args.threads)
        decoded = ours(open_decoder, index, sized)
        while True:
            for _ in range(images // batch):
                next(decoded)
            yield None

    result = {}
    for name, opens in {"DALI": dali.open_decoder, "torchvision": torchvision.open_decoder}.items():
        small, large = f"batches of {SMALL}", f"batches of {LARGE}"
        rates = compete({small: rival(opens, SMALL), large: rival(opens, LARGE)}, turn)
        result[name] = compared(small, rates, {large: 1 / 0.95})
    return result


def cifar(archive: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure 10,000 decoded CIFAR-10 images in memory against PNG files decoded each time."""
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
    batch = 256
    small = view(32)
    start = time.perf_counter()
    kept = pixel_cache.open_cache(index, backend=Serial(CPU), threads=args.threads)
    filling = time.perf_counter() - start

    def decoding(opened: AbstractContextManager[Decode]) -> Rival:
        return batches(opened, requests(index, batch, (0.25, 1.0)))

    resources = Resources(CPU, threads=args.threads, batch_size=batch)
    rates = compete(
        {
            "cache": decoding(pixel_cache.open_decoder(kept, small, resources)),
            "decoded by DALI": decoding(dali.open_decoder(index, small, resources)),
            "decoded by torchvision": decoding(torchvision.open_decoder(index, small, resources)),
        },
        argparse.Namespace(**{**vars(args), "batch": batch, "batches": 4 * args.batches}),
    )
    targets = {name: 1 / 3 for name in rates if name != "cache"}
    return {"seconds to decode and keep": filling, **compared("cache", rates, targets)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    data = os.environ.get("LARGEBATCH_DATA")
    parser.add_argument("--data", type=Path, default=data, required=data is None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=12, help="counted, in each round")
    parser.add_argument("--uncounted", type=int, default=6, help="batches before them")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds before each turn")
    parser.add_argument("--threads", type=int, default=2, help="threads or worker processes")
    return parser.parse_args()


def main() -> None:
    """Measure, then print and write the result."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        folder = Path(scratch)
        result: dict[str, Any] = {"settings": {**vars(args), "data": "LARGEBATCH_DATA"}}
        samples = args.data / "imagenet_samples/samples.zip"
        result["full-size JPEGs"] = full_size(samples, folder / "jpeg", args)
        result["small batches"] = small_batches(folder / "jpeg", args)
        result["CIFAR-10"] = cifar(args.data / "cifar10", folder / "cifar10", args)
    print(json.dumps(result, indent=2))
    print(write("input_pipeline", result))


if __name__ == "__main__":
    main()

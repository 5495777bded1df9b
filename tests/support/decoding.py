"""What tests of decoders share: images, requests, and one way to call every decoder."""

import importlib.util
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from largebatch.data import types
from largebatch.data.augment import train_request
from largebatch.data.decoders import dali, pixel_cache, torchvision
from largebatch.data.decoders.pixel_cache import PixelCache
from largebatch.data.index.index import Index, load_or_read
from largebatch.data.pipeline import Pipeline, open_images
from largebatch.data.types import Batch, Batches, DecodedBatches, Request, Resources, View
from largebatch.distributed.serial import Serial
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.data import Data
from largebatch.recipe.recipe import Recipe

CPU = torch.device("cpu")

Decode = Callable[..., AbstractContextManager[types.Decode]]
"""Opens a decoder of one kind."""

has_dali = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")
needs_dali = pytest.mark.skipif(not has_dali, reason="NVIDIA DALI is not installed")
both_decoders = pytest.mark.parametrize(
    "decode",
    [
        pytest.param(dali.open_decoder, id="dali", marks=needs_dali),
        pytest.param(torchvision.open_decoder, id="torchvision"),
    ],
)


def view(**changes: object) -> View:
    """Values are 0 .. 255 unless `mean` and `std` are changed."""
    arguments: dict[str, Any] = {
        "image_size": 128,
        "mean": (0.0, 0.0, 0.0),
        "std": (1 / 255, 1 / 255, 1 / 255),
        "interpolation": "bilinear",
    }
    return View(**(arguments | changes))


def assert_is_part(pipeline: Pipeline, whole: Batch) -> None:
    """Compare a worker's batches of the first update with their positions in the whole update."""
    batches = pipeline.training(range(1), clean=False)
    for positions, batch in zip(pipeline.positions(range(1)), batches, strict=True):
        assert torch.equal(batch.images, whole.images[positions.start : positions.stop])
        assert torch.equal(batch.labels, whole.labels[positions.start : positions.stop])


def section(**changes: object) -> Data:
    """Random crops, half of them mirrored."""
    arguments: dict[str, Any] = {
        "source": "folder",
        "classes": 2,
        "train_samples": 13,
        "val_samples": 13,
        "image_size": 128,
        "crop_area": (0.08, 1.0),
        "flip": True,
        "eval_resize": None,
    }
    return Data(**(arguments | changes))


def photograph(height: int, width: int) -> np.ndarray:
    """Smooth colours, a hard edge and some noise."""
    y, x = np.mgrid[:height, :width]
    waves = [127 + 90 * np.sin(x / (9 + c) + c) * np.cos(y / (13 - c)) for c in range(3)]
    pixels = np.stack(waves, axis=-1) + np.random.default_rng(0).normal(0, 6, (height, width, 3))
    pixels[height // 3 : height // 2, width // 4 :] = 250
    return pixels.clip(0, 255).round().astype(np.uint8)


def png_folder(root: Path, *, one_size: bool, size: tuple[int, int] = (70, 90)) -> Index:
    """Write 13 images of two classes into root/train: colours, grey and palettes."""
    for number in range(13):
        height, width = size if one_size else (70 + 9 * number, 150)
        place = root / "train" / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(photograph(height, width))
        image.convert(["RGB", "L", "P"][number % 3]).save(place / f"{number:02d}.png")
    return load_or_read(root, "train")


def run(
    decode: Decode,
    index: Index,
    requests: Iterable[Request],
    *,
    device: torch.device = CPU,
    **changes: object,
) -> Batches:
    """Decode with two threads; `changes` are to the view."""
    resources = Resources(device, threads=2, batch_size=100)
    return decode_all(decode(index, view(**changes), resources), requests)


def run_cached(
    index: Index, requests: Iterable[Request], *, device: torch.device = CPU, **changes: object
) -> Batches:
    """Decode from cached pixels with two threads; `changes` are to the view."""
    resources = Resources(device, threads=2, batch_size=100)
    opened = pixel_cache.open_decoder(open_cache(index), view(**changes), resources)
    return decode_all(opened, requests)


def decode_all(
    opened: AbstractContextManager[types.Decode], requests: Iterable[Request]
) -> Batches:
    """Decode with a decoder that is closed with its batches."""
    with opened as decode, closing(decode(iter(requests))) as decoded:
        for _, batch in decoded:
            yield batch


def run_on_device(
    index: Index, requests: Iterable[Request], *, device: torch.device = CPU, **changes: object
) -> Batches:
    """Decode from pixels on a device; `changes` are to the view."""
    uploaded = pixel_cache.upload(open_cache(index), device)
    decode = partial(pixel_cache.decode_on_device, uploaded, view(**changes))
    return decode_all(nullcontext(decode), requests)


def with_decoder(
    pipeline: Pipeline, decode: Callable[[Index, Iterable[Request]], DecodedBatches]
) -> Pipeline:
    """Return a pipeline in which this takes the place of every decoder."""
    return replace(
        pipeline,
        open_decoder=lambda index, _: nullcontext(partial(decode, index)),
        idle={},
    )


def noting(pipeline: Pipeline, asked: list[Request]) -> Pipeline:
    """Return a pipeline that decodes nothing and adds its requests to a list."""

    def note(_: Index, wanted: Iterable[Request]) -> DecodedBatches:
        asked.extend(wanted)
        yield from ()

    return with_decoder(pipeline, note)


def worker(recipe: Recipe, *, workers: int, rank: int, device_batch: int | None) -> Pipeline:
    """Return the pipeline of one of several workers, of data that need no folder."""
    plan = make_plan(recipe.with_execution(device_batch=device_batch), workers=workers)
    return replace(open_images(recipe, plan, Serial(CPU), folder=None), rank=rank)


def open_cache(index: Index) -> PixelCache:
    return pixel_cache.open_cache(index, backend=Serial(CPU), threads=2)


def augmented(index: Index, size: int, number: int) -> list[Request]:
    positions = (range(n * size, (n + 1) * size) for n in range(number))
    return [train_request(index, part, section(), view(), seed=0) for part in positions]

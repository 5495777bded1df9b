"""A first recipe for a folder of images: a survey of the folder, and settings.

Every number is measured from the images or follows from one by a rule, which the recipe has next to
it. The recipe is a start and not a result: a file to edit.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from largebatch.data.augment import clean_request
from largebatch.data.decoders import torchvision
from largebatch.data.decoders.pixel_cache import num_bytes, one_size
from largebatch.data.index.index import Index
from largebatch.data.types import Resources, View
from largebatch.distributed.environment import available_cores
from largebatch.recipe.data import Triple
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_commented

SAMPLE = 512
"""Number of training images whose colours are measured, spread evenly over all."""

UPDATES_PER_EPOCH = 16
"""Updates in an epoch, at least, so that a small data set does not make only two or three."""

SMALLEST_BATCH, LARGEST_BATCH = 16, 256
LARGEST_SPAN = 32

SEEN, FEWEST_EPOCHS, MOST_EPOCHS = 400_000, 20, 80
"""Images that a run sees, within these bounds of epochs."""

SMALL, MEDIUM, LARGE = 64, 146, 320
"""Median short sides in pixels; images up to SMALL are trained on at their size."""

LARGEST_CACHE = 2 * 2**30
"""Bytes of decoded pixels up to which they are cached by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Survey of a folder of images."""

    train: Index
    val: Index
    image_size: int
    eval_resize: int | None
    mean: Triple
    std: Triple


def survey(train: Index, val: Index) -> Survey:
    """Choose the image size of the training, and measure the colours at this size."""
    image_size, resize = image_sizes(train)
    samples = np.unique(np.linspace(0, len(train) - 1, SAMPLE).astype(np.int64))
    parts = [samples[start : start + 64] for start in range(0, len(samples), 64)]
    requests = (clean_request(train, part, image_size=image_size, resize=resize) for part in parts)
    view = View(image_size=image_size, mean=(0.0,) * 3, std=(1.0,) * 3, interpolation="bilinear")
    sums, squares, number = torch.zeros(3), torch.zeros(3), 0
    resources = Resources(torch.device("cpu"), threads=available_cores(), batch_size=64)
    with torchvision.open_decoder(train, view, resources) as decode:
        for images, _ in decode(requests):
            pixels = images.double()
            sums = sums + pixels.sum((0, 2, 3))
            squares = squares + pixels.square().sum((0, 2, 3))
            number += pixels.numel() // 3
    mean = sums / number
    std = (squares / number - mean.square()).clamp(min=1e-6).sqrt()
    return Survey(
        train=train,
        val=val,
        image_size=image_size,
        eval_resize=resize,
        mean=_triple(mean),
        std=_triple(std),
    )


def _triple(values: torch.Tensor) -> Triple:
    red, green, blue = (round(value, 3) for value in values.tolist())
    return red, green, blue


def image_sizes(index: Index) -> tuple[int, int | None]:
    """Return image_size and eval_resize."""
    sides = np.minimum(index.heights, index.widths)
    middle = int(np.median(sides))
    if middle <= SMALL:
        square = bool((index.heights == index.widths).all())
        return max(8, middle), None if square else max(8, middle)
    size = 224 if middle >= LARGE else 128 if middle >= MEDIUM else 64
    return size, round(size * 256 / 224)


def draft(found: Survey, *, name: str) -> str:
    """Return the text of a complete recipe, with the rule next to each choice."""
    classes, number = len(found.train.classes), len(found.train)
    header = (
        f"{name}: {classes} classes, {number:,} training and {len(found.val):,} validation images.",
        "Written by `largebatch init`: where to begin, not a result. The rules next to the numbers",
        "are what it followed. Measured: not yet.",
    )
    recipe = validate_tree(Recipe, _tree(found, name), source=name)
    return dump_commented(recipe, _comments(number, recipe.batch.global_batch), header=header)


def _tree(found: Survey, name: str) -> dict[str, Any]:
    number = len(found.train)
    total = num_bytes(found.train) + num_bytes(found.val)
    kept = "device" if one_size(found.train) and one_size(found.val) else "memory"
    batch = global_batch_for(number)
    epochs = min(MOST_EPOCHS, max(FEWEST_EPOCHS, round(SEEN / number)))
    return {
        "name": name,
        "seed": 1,
        "duration": {"epochs": epochs},
        "data": {
            "source": "folder",
            "classes": len(found.train.classes),
            "train_samples": number,
            "val_samples": len(found.val),
            "image_size": found.image_size,
            "mean": list(found.mean),
            "std": list(found.std),
            "crop_area": [0.35, 1.0],
            "flip": True,
            "eval_resize": found.eval_resize,
        },
        "model": {"name": "cifar_resnet20" if found.image_size <= SMALL else "resnet18"},
        "batch": {"global_batch": batch, "bn_span": min(batch, LARGEST_SPAN)},
        "optimizer": {"kind": "sgd", "momentum": 0.9, "weight_decay": 1e-4},
        "schedule": {
            "peak_lr": 0.1 * batch / 256,
            "warmup": {"epochs": max(1, epochs // 16)},
            "decay": {"kind": "cosine"},
        },
        "loss": {"label_smoothing": 0.1},
        "polish": {
            "clean": {"epochs": max(1, epochs // 16)},
            "statistics": {"samples": min(number, 10_000)},
        },
        "evaluation": {"every_epochs": max(1, epochs // 20)},
        "execution": {"cache": kept if total <= LARGEST_CACHE else None},
    }


def _comments(number: int, batch: int) -> dict[str, str]:
    most = min(LARGEST_BATCH, number // UPDATES_PER_EPOCH)
    bounds = f"{SMALLEST_BATCH} to {most}, for at least {UPDATES_PER_EPOCH} updates an epoch"
    if batch > most:
        bounds = f"the smallest: too few images for {UPDATES_PER_EPOCH} updates an epoch"
    return {
        "duration": f"{SEEN:,} images, {FEWEST_EPOCHS} to {MOST_EPOCHS} epochs",
        "data.image_size": "from the short sides of half of the images",
        "data.mean": f"of {min(SAMPLE, number)} training images at this size",
        "data.crop_area": "random crops while training",
        "data.flip": "false where left and right mean something: letters, digits, signs",
        "data.eval_resize": "short side of clean images; the centre is cut out of it",
        "model": "from random weights",
        "batch.global_batch": bounds,
        "optimizer.weight_decay": "for SGD",
        "schedule.peak_lr": "for SGD: 0.1 for every 256 of a batch (arXiv:1706.02677)",
        "schedule.warmup": "for SGD",
        "polish": "Final Polishing: the last epochs on clean images, then statistics",
        "execution.cache": "decoded once; device: of one size; null: where it takes over 2 GiB",
    }


def global_batch_for(number: int) -> int:
    """Return the largest power of two that leaves UPDATES_PER_EPOCH, within the bounds above."""
    batch = min(SMALLEST_BATCH, 1 << (number.bit_length() - 1))
    while batch < LARGEST_BATCH and 2 * batch * UPDATES_PER_EPOCH <= number:
        batch *= 2
    return batch

"""A first recipe for a folder of images: survey the folder, choose settings, estimate the time.

Every number is measured from the images, or follows from one by a rule that is written here and
beside it in the recipe. The recipe is a starting point to edit, not a result.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from largebatch.data.augment import clean_request
from largebatch.data.decoders import torchvision
from largebatch.data.index.index import Index
from largebatch.data.types import Resources, View
from largebatch.distributed.environment import available_cores
from largebatch.measure.estimate import estimate
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.sections import Triple

SAMPLE = 512
"""Number of training images whose colours are measured, spread evenly over all."""

UPDATES_PER_EPOCH = 16
"""Least number of updates per epoch for small data sets."""

SMALLEST_BATCH, LARGEST_BATCH = 16, 256
LARGEST_SPAN = 32

SEEN, FEWEST_EPOCHS, MOST_EPOCHS = 400_000, 20, 80
"""Number of images that a run trains on, and the limits in epochs."""

SMALL, MEDIUM, LARGE = 64, 146, 320
"""Limits of the median short side in pixels: up to SMALL, images are trained on at full size."""

LARGEST_CACHE = 2 * 2**30
"""Largest decoded data set in bytes that is cached by default."""

STAGES = 3
"""Measured stages of the written recipe: training, clean epochs and statistics."""

COMMENT = 30
"""Column at which comments start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Result of a survey of a folder."""

    train: Index
    val: Index
    image_size: int
    eval_resize: int | None
    mean: Triple
    std: Triple
    decoded_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """Time of a run on this machine with one worker."""

    seconds: float
    trained_per_second: float
    device: str


def survey(train: Index, val: Index) -> Survey:
    """Choose the training image size, and measure the colours at this size."""
    image_size, resize = _sizes(train)
    samples = np.unique(np.linspace(0, len(train) - 1, SAMPLE).astype(np.int64))
    parts = [samples[start : start + 64] for start in range(0, len(samples), 64)]
    requests = (clean_request(train, part, image_size=image_size, resize=resize) for part in parts)
    view = View(image_size=image_size, mean=(0.0,) * 3, std=(1.0,) * 3, interpolation="bilinear")
    start = time.perf_counter()
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
        decoded_per_second=len(samples) / (time.perf_counter() - start),
    )


def _triple(values: torch.Tensor) -> Triple:
    red, green, blue = (round(value, 3) for value in values.tolist())
    return red, green, blue


def _sizes(index: Index) -> tuple[int, int | None]:
    """Return image_size and eval_resize."""
    sides = np.minimum(index.heights, index.widths)
    middle = int(np.median(sides))
    if middle <= SMALL:
        square = bool((index.heights == index.widths).all())
        return max(8, middle), None if square else max(8, middle)
    size = 224 if middle >= LARGE else 128 if middle >= MEDIUM else 64
    return size, round(size * 256 / 224)


def draft(found: Survey, *, name: str) -> str:
    """Return the text of a complete recipe, with the rule beside each choice."""
    number, classes = len(found.train), len(found.train.classes)
    batch = _batch(number)
    epochs = min(MOST_EPOCHS, max(FEWEST_EPOCHS, round(SEEN / number)))
    small = found.image_size <= SMALL
    warmup, clean = max(1, epochs // 16), max(1, epochs // 16)
    enough = "at least" if UPDATES_PER_EPOCH * batch <= number else "too few images for"
    bounds = f"{SMALLEST_BATCH} to {LARGEST_BATCH}, {enough} {UPDATES_PER_EPOCH} updates an epoch"
    resize = "null" if found.eval_resize is None else str(found.eval_resize)
    cache = "memory" if _decoded_bytes(found) <= LARGEST_CACHE else "null"
    text = f"""\
# {name}: {classes} classes, {number:,} training and {len(found.val):,} validation images.
# Written by `largebatch init`: where to begin, not a result. The rules beside the numbers are
# what it followed. Measured: not yet.

name: "{name}"
seed: 1
duration: {{epochs: {epochs}}}  # {SEEN:,} images, {FEWEST_EPOCHS} to {MOST_EPOCHS} epochs

data:
  source: folder
  classes: {classes}
  train_samples: {number}
  val_samples: {len(found.val)}
  image_size: {found.image_size}  # from the short sides of half of the images
  mean: {list(found.mean)}  # of {min(SAMPLE, number)} training images at this size
  std: {list(found.std)}
  crop_area: [0.35, 1.0]  # random crops while training
  flip: true  # false where left and right mean something: letters, digits, signs
  eval_resize: {resize}  # short side of clean images; the centre is cut out of it

model:
  name: {"cifar_resnet20" if small else "resnet18"}  # trained from random weights

batch:
  global_batch: {batch}  # {bounds}
  bn_span: {min(batch, LARGEST_SPAN)}

optimizer:
  kind: sgd
  momentum: 0.9
  weight_decay: 1e-4

schedule:
  peak_lr: {0.1 * batch / 256:g}  # 0.1 for every 256 of a batch (arXiv:1706.02677)
  warmup: {{epochs: {warmup}}}
  decay: {{kind: cosine}}

loss:
  label_smoothing: 0.1

polish:  # Final Polishing: the last epochs on clean images, then statistics
  clean: {{epochs: {clean}}}
  statistics: {{samples: {min(number, 10_000)}}}

evaluation:
  every_epochs: {max(1, epochs // 20)}

execution:
  cache: {cache}  # memory: decoded once; null: where that would take over 2 GiB
"""
    return "".join(map(_aligned, text.splitlines(keepends=True)))


def _aligned(line: str) -> str:
    """Align the comment after a value with the others."""
    value, mark, comment = line.partition("  # ")
    return f"{value:{COMMENT}}{mark[2:]}{comment}" if mark else line


def _batch(number: int) -> int:
    batch = min(SMALLEST_BATCH, 1 << (number.bit_length() - 1))
    while batch < LARGEST_BATCH and 2 * batch * UPDATES_PER_EPOCH <= number:
        batch *= 2
    return batch


def _decoded_bytes(found: Survey) -> int:
    return sum(int((3 * one.heights * one.widths).sum()) for one in (found.train, found.val))


def recipe_name(folder: Path) -> str:
    """Turn a folder's name into a valid recipe name.

    >>> recipe_name(Path("/data/my own images!"))
    'my-own-images'
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._")
    return name[:100] or "own-data"


def estimate_time(recipe: Recipe, found: Survey) -> TimeEstimate:
    """Estimate the time of a run from one measured step; on a GPU, reading overlaps it."""
    plan = make_plan(recipe, workers=1)
    step = estimate(recipe, plan)
    trained = plan.global_batch / step.step_seconds
    # A forward pass alone takes a third of a step.
    passes = STAGES + len(plan.evaluate_after)
    images = plan.position(plan.steps)
    forward = passes * plan.val_samples + plan.train_samples
    computing = (images + forward / 3) / trained
    decoded = len(found.train) + len(found.val) if recipe.execution.cache else images + forward
    reading = decoded / found.decoded_per_second
    seconds = max(computing, reading) if step.device != "cpu" else computing + reading
    return TimeEstimate(seconds=seconds, trained_per_second=trained, device=step.device)

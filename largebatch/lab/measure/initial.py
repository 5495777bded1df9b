"""A first recipe for a folder of images: a survey of the folder, and settings.

Every number is measured from the images or follows from one by a rule, which the recipe has next to
it. The recipe is a start and not a result: a file to edit.
"""

import math
import time
from collections.abc import Iterator
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
from largebatch.errors import LargebatchError, RecipeError, shorten
from largebatch.formatting import plural
from largebatch.lab.measure.estimate import estimate
from largebatch.models.of_recipe import require_accepted
from largebatch.polish.moments import Moments
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.data import Triple
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.model import Model
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_commented
from largebatch.report.causes import FEW_IMAGES
from largebatch.runs.pretrained import StartingModel

SAMPLE = 512  # number of training images whose colours are measured, spread evenly over all

UPDATES_PER_EPOCH = 16
"""Updates in an epoch, at least, so that a small data set does not make only two or three."""

SMALLEST_BATCH = 16
LARGEST_BATCH = 256
LARGEST_SPAN = 32

SEEN = 400_000
"""Images that a run sees, within the bounds of epochs."""

FEWEST_EPOCHS = 20
MOST_EPOCHS = 80

EVALUATIONS = 20
"""Evaluations of the validation images in a run."""

STATISTICS = 10_000
"""Largest number of images of the statistics pass."""

FEW = 20
"""Images of a class below which `init` warns; up to FEW_IMAGES it takes pretrained weights."""

FEW_VALIDATING = 100
"""Validation images below which `init` warns."""

WEIGHTS = "timm:resnet18.a1_in1k"
"""Pretrained weights of ImageNet for few photographs: of the network that `init` takes without."""

UNEVEN = 4
"""Images of one class for each of another, on average, from which `init` warns."""

LADDER = (192, 160, 128, 96, 64)
"""Image sizes that are tried for a number of minutes."""

USED = 0.85
"""Part of the minutes that a run may use."""

SMALL, MEDIUM, LARGE = 64, 146, 320
"""Median short sides in pixels; images up to SMALL are trained on at their size."""

LARGEST_CACHE = 2 * 2**30  # bytes of decoded pixels up to which they are cached by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Survey of a folder of images, at one image size."""

    train: Index
    val: Index
    image_size: int
    eval_resize: int | None
    mean: Triple
    std: Triple
    seconds: float
    """Seconds to decode one image with all threads."""

    start: StartingModel
    """The model, with weights or without."""


def survey(
    train: Index, val: Index, start: StartingModel | None = None, *, image_size: int | None = None
) -> Survey:
    """Measure the colours of the images at this size, by default one that suits them and the model.

    Colours that the weights of the model were trained with are not measured.
    """
    size, resize = image_sizes(train)
    network = "cifar_resnet20" if (image_size or size) <= SMALL else "resnet18"
    start = start or StartingModel(model=Model(name=network))
    prepared = start.data
    if image_size is not None:
        size = image_size
    elif not _accepts(start, size, train):
        size = start.image_size or size
    if "eval_resize" in prepared and prepared["eval_resize"] is None:
        resize = None
    elif resize is not None:
        resize = _resize(size, prepared.get("eval_resize", 256) / prepared.get("image_size", 224))
    # Images are stored class by class: evenly spread ones have every class by its size.
    samples = np.unique(np.linspace(0, len(train) - 1, SAMPLE).astype(np.int64))
    parts = [samples[start : start + 64] for start in range(0, len(samples), 64)]
    # Clean images, as in evaluations.
    requests = (clean_request(train, part, image_size=size, resize=resize) for part in parts)
    view = View(image_size=size, mean=(0.0,) * 3, std=(1.0,) * 3, interpolation="bilinear")
    # Summed in float64: float32 has too few digits for sums over millions of pixels.
    colors = Moments(0.0, *torch.zeros(2, 3, dtype=torch.float64))
    resources = Resources(torch.device("cpu"), threads=available_cores(), batch_size=64)
    begun = time.perf_counter()
    with torchvision.open_decoder(train, view, resources) as decode:
        for _, batch in decode(requests):
            colors.add(batch.images)
    return Survey(
        train=train,
        val=val,
        image_size=size,
        eval_resize=resize,
        mean=prepared.get("mean") or _triple(colors.mean),
        std=prepared.get("std") or _triple(colors.variance.clamp(min=1e-6).sqrt()),
        seconds=(time.perf_counter() - begun) / len(samples),
        start=start,
    )


def _accepts(start: StartingModel, size: int, train: Index) -> bool:
    """Return True if the model takes images of this size, as vision transformers may not."""
    try:
        require_accepted(start.model, classes=len(train.classes), image_sizes=[size])
    except RecipeError:
        return False
    return True


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
    # Sizes with many factors of two, of which every network here can halve its maps.
    size = 224 if middle >= LARGE else 128 if middle >= MEDIUM else 64
    return size, _resize(size, 256 / 224)


def _resize(size: int, ratio: float) -> int:
    """Return the even number of pixels around a centre: other libraries cut whole pixels."""
    return size + 2 * round(size * (ratio - 1) / 2)


def needs_weights(train: Index) -> bool:
    """Return True for photographs of which there are few in a typical class.

    ImageNet's weights fit photographs; smaller images, such as letters, are not.
    """
    middle = int(np.median(np.minimum(train.heights, train.widths)))
    return _typical(train) <= FEW_IMAGES and middle > SMALL


def _typical(train: Index) -> int:
    return int(np.median(np.bincount(train.labels, minlength=len(train.classes))))


def remarks(train: Index, val: Index, *, pretrained: bool) -> Iterator[str]:
    """Yield what keeps a model from being good, and what to do about it."""
    for split, index in {"training": train, "validation": val}.items():
        numbers = np.bincount(index.labels, minlength=len(index.classes))
        most = int(numbers.argmax())
        number = int(numbers.max())
        others = (len(index) - number) / (len(numbers) - 1)
        if number >= UNEVEN * others and 2 * number > len(index):
            share = 100 * number / len(index)
            yield (
                f"{share:.0f} % of the {split} images are {index.classes[most]}: a model that "
                f"always answers this is {share:.0f} % right; add images of other classes, and "
                "judge by the accuracy of each class"
            )
    counts = np.bincount(train.labels, minlength=len(train.classes))
    few = [f"{name} {n}" for name, n in zip(train.classes, counts, strict=True) if n < FEW]
    if few:
        yield (
            f"fewer than {FEW} training images: {shorten(few)}; such classes are hardly learned: "
            "add images"
        )
    typical = _typical(train)
    if typical <= FEW_IMAGES and not pretrained:
        yield (
            f"{typical} training images in a typical class, at most {FEW_IMAGES}: from random "
            "weights a model learns little of so few; begin with --weights timm:NAME, a file of "
            "timm or torchvision with its --model, or a run on more images"
        )
    if len(val) < FEW_VALIDATING:
        yield (
            f"{len(val)} validation images: an accuracy is known to about "
            f"{100 / math.sqrt(len(val)):.0f} points; add images to val"
        )


def fitted(chosen: Survey, *, minutes: float, fixed: bool) -> tuple[Survey, int, str]:
    """Choose image size and epochs so that a run takes about these minutes on this machine.

    Updates are timed at each size of LADDER, the largest first, until enough epochs fit; only at
    the size of the survey if it is `fixed`. Returns a survey at the size, the epochs, and a
    description. Raises LargebatchError if not even one epoch fits.
    """
    least, most = _epochs(chosen)
    smaller = [size for size in LADDER if size < chosen.image_size and not fixed]
    for size in (chosen.image_size, *smaller):
        if size in smaller:
            if not _accepts(chosen.start, size, chosen.train):
                continue
            chosen = survey(chosen.train, chosen.val, chosen.start, image_size=size)
        recipe = _recipe(chosen, "timed", most)
        plan = make_plan(recipe)
        updates = min(estimate(recipe, plan).run_seconds for _ in range(2))  # others may slow one
        images = plan.updates * plan.global_batch
        # Images that only pass forward, in evaluations and in the statistics pass.
        passes = len(chosen.val) * EVALUATIONS + min(len(chosen.train), STATISTICS)
        seconds = updates + updates * passes / images / 3  # without a backward pass
        # Added and not hidden: on a CPU decoding takes its time from training.
        seconds += (images + passes) * chosen.seconds
        epochs = int(USED * 60 * minutes * most / seconds)
        if epochs >= least:
            break
    if epochs < 1:
        raise LargebatchError(
            f"--minutes {minutes:g}: an epoch at {chosen.image_size} pixels takes "
            f"{seconds / most / 60:.1f} minutes here; give more, or a smaller --image-size or model"
        )
    epochs = min(epochs, most)
    text = (
        f"about {seconds / most * epochs / 60:.1f} minutes here, measured: "
        f"{plural(epochs, 'epoch')} of {seconds / most:.1f} s at {chosen.image_size} pixels"
    )
    return chosen, epochs, text + f"; {least} would be better" * (epochs < least)


def draft(images: Survey, *, name: str, epochs: int | None = None) -> str:
    """Return the text of a complete recipe, with the rule next to each choice."""
    classes = len(images.train.classes)
    number = len(images.train)
    validating = len(images.val)
    header = (
        f"{name}: {classes} classes, {number:,} training and {validating:,} validation images.",
        "Written by `largebatch init`: where to begin, not a result. The rules next to the numbers",
        "are what it followed. Measured: not yet.",
    )
    least, most = _epochs(images)
    rule = (
        f"{SEEN:,} images, {least} to {plural(most, 'epoch')}"
        if epochs is None
        else "as --minutes allows"
    )
    seen = min(most, max(least, round(SEEN / number)))
    recipe = _recipe(images, name, epochs or seen)
    require_accepted(
        recipe.model, classes=recipe.data.classes, image_sizes=[recipe.data.image_size]
    )
    updates = f"{UPDATES_PER_EPOCH} updates an epoch if there are enough images"
    comments = {
        "data.image_size": "from the short sides of half of the images",
        "data.mean": f"of {min(SAMPLE, number)} training images at this size",
        "data.crop_area": "random crops while training",
        "data.flip": "false where left and right mean something: letters, digits, signs",
        "data.eval_resize": "short side of clean images; the centre is cut out of it",
        "model": "from random weights",
        "batch.global_batch": f"{SMALLEST_BATCH} to {LARGEST_BATCH}, for at least {updates}",
        "schedule.peak_lr": "for SGD: 0.1 for every 256 of a batch (arXiv:1706.02677)",
        "polish": "Final Polishing: the last epochs on clean images, then statistics",
        "execution.cache": "decoded once; device: of one size; null: where it takes over 2 GiB",
        "duration": rule,
    }
    if images.image_size != image_sizes(images.train)[0]:
        del comments["data.image_size"]  # it was chosen otherwise
    if recipe.model.weights is not None:
        comments["model"] = "if its weights saw such images, try backbone: {lr_factor: 0.1}"
        comments["data.mean"] = "as the weights were trained"
    return dump_commented(recipe, comments, header=header)


def _epochs(images: Survey) -> tuple[int, int]:
    """Return the fewest and the most epochs; training from weights needs fewer."""
    return (5, 20) if images.start.model.weights is not None else (FEWEST_EPOCHS, MOST_EPOCHS)


def _recipe(images: Survey, name: str, epochs: int) -> Recipe:
    number = len(images.train)
    model = images.start.model
    total = num_bytes(images.train) + num_bytes(images.val)
    cache = "device" if one_size(images.train) and one_size(images.val) else "memory"
    batch = min(SMALLEST_BATCH, 1 << (number.bit_length() - 1))
    # Powers of two: BatchNorm spans and numbers of workers mostly are, and divide them.
    while batch < LARGEST_BATCH and 2 * batch * UPDATES_PER_EPOCH <= number:
        batch *= 2  # as long as enough updates are left
    normalized = images.start.has_batchnorm
    tree: dict[str, Any] = {
        "name": name,
        "seed": 1,
        "duration": {"epochs": epochs},
        "data": {
            "source": "folder",
            "classes": len(images.train.classes),
            "train_samples": number,
            "val_samples": len(images.val),
            "image_size": images.image_size,
            "mean": list(images.mean),
            "std": list(images.std),
            "crop_area": [0.35, 1.0],
            "flip": True,
            "eval_resize": images.eval_resize,
        },
        "model": model.model_dump(exclude_unset=True),
        "batch": {"global_batch": batch, "bn_span": min(batch, LARGEST_SPAN) * normalized or None},
        "optimizer": {"kind": "sgd", "momentum": 0.9, "weight_decay": 1e-4},
        "schedule": {
            "peak_lr": 0.1 * batch / 256,
            "warmup": {"epochs": max(1, epochs // 16)},
            "decay": {"kind": "cosine"},
        },
        "loss": {"label_smoothing": 0.1},
        "polish": {
            "clean": {"epochs": max(1, epochs // 16)},
            "statistics": {"samples": min(number, STATISTICS)},
        },
        "evaluation": {"every_epochs": max(1, epochs // EVALUATIONS)},
        "execution": {"cache": cache if total <= LARGEST_CACHE else None},
    }
    if "interpolation" in images.start.data:
        tree["data"] |= {"interpolation": images.start.data["interpolation"]}
    # Without BatchNorm there are no statistics to polish.
    if not normalized:
        del tree["polish"]
    return validate_tree(Recipe, tree, source=name)

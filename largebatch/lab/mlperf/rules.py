"""MLPerf's closed division: which of its rules for ResNet a recipe breaks.

The rules are those of MLPerf Training 4.0, the last round with ResNet: section "Hyperparameters
and optimizer" of github.com/mlcommons/training_policies, training_rules.adoc, its schedule of
evaluations, and what closed_resnet.yaml of mlperf-logging tests in a log. A setting that is no
hyperparameter there is fixed to the reference implementation. The log and the referee also use
the number of images, the target and the benchmark's name from here.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from largebatch.recipe.data import Data
from largebatch.recipe.model import RESNET50
from largebatch.recipe.optimizers import LARS, SGD
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.schedule import Polynomial

USAGE, BENCHMARK, ROUND = "training", "resnet", "4.0.0"
TARGET = 0.759
"""Top-1 accuracy at which a run is complete."""

TRAIN_SAMPLES, VAL_SAMPLES = 1_281_167, 50_000
FREE_MOMENTUM = 32_768
"""Least batch at which LARS may have any momentum."""

LARS_REMARK = (
    "the rules list no compliant implementation of LARS for PyTorch, as they do for TensorFlow and "
    "MXNet: a submission needs the consent of MLPerf's working group"
)

_REFERENCE_CROP = {"crop_area": (0.05, 1.0), "crop_aspect": (3 / 4, 4 / 3)}

_Checked = tuple[str, bool, str]
"""A setting, True if it keeps its rule, and the rule."""


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A setting of a recipe that the closed division forbids."""

    setting: str
    """Key in the recipe."""

    found: str
    rule: str


def broken_rules(recipe: Recipe) -> list[BrokenRule]:
    """Return the rules of the closed division that a recipe breaks, ordered by key."""
    checked = (
        *_data_rules(recipe.data),
        *_model_rules(recipe),
        *_optimizer_rules(recipe),
        *_schedule_rules(recipe),
        *_training_rules(recipe),
    )
    return [
        BrokenRule(setting, _found(recipe, setting), rule)
        for setting, kept, rule in checked
        if not kept
    ]


def warmup_epochs(recipe: Recipe) -> float:
    """Return the length of the warm-up in epochs."""
    warmup = recipe.schedule.warmup
    if warmup is None:
        return 0.0
    if warmup.epochs is not None:
        return warmup.epochs
    return (warmup.steps or 0) * recipe.batch.global_batch / recipe.train_samples


def _data_rules(data: Data) -> Iterator[_Checked]:
    imagenet = f"ImageNet's {TRAIN_SAMPLES:,} training and {VAL_SAMPLES:,} validation images"
    yield "data.source", data.source == "folder", f"images are {imagenet}"
    yield "data.classes", data.classes == 1000, "ImageNet has 1,000 classes"
    yield "data.train_samples", data.train_samples == TRAIN_SAMPLES, f"{imagenet}, all of them"
    yield "data.val_samples", data.val_samples == VAL_SAMPLES, f"{imagenet}, all of them"
    yield "data.image_size", data.image_size == 224, "224, as in the reference"
    yield "data.resolution", not data.resolution, "images have one size throughout"
    for key, (least, most) in _REFERENCE_CROP.items():
        bounds = getattr(data, key)
        same = bounds is not None and math.dist(bounds, (least, most)) < 1e-6
        yield f"data.{key}", same, f"from {least:g} to {most:.4g}, as the reference crops"
    yield "data.flip", data.flip is True, "half of the training images are mirrored at random"
    yield "data.translate", not data.translate, "images are not moved"
    resized = "the short side becomes 256 and the centre is shown, as in the reference"
    yield "data.eval_resize", data.eval_resize == 256, resized


def _model_rules(recipe: Recipe) -> Iterator[_Checked]:
    model, batch = recipe.model, recipe.batch
    yield "model.name", model.name in RESNET50, "the network is ResNet-50 v1.5: resnet50"
    plain = not model.arguments.keys() - {"zero_init_last"}
    yield "model.arguments", plain, "nothing of ResNet-50 v1.5 is changed"
    yield "model.weights", model.weights is None, "training begins with random weights"
    drawn = "the classifier's weights are drawn from N(0, 0.01)"
    yield "model.head_std", model.head_std == 0.01, drawn
    yield "batch.schedule", not batch.schedule, "the global batch is constant"


def _optimizer_rules(recipe: Recipe) -> Iterator[_Checked]:
    section = recipe.optimizer
    match section:
        case LARS():
            yield from _lars_rules(section, global_batch=recipe.batch.global_batch)
        case SGD():
            yield "optimizer.momentum", section.momentum == 0.9, "0.9 for SGD"
            plain = "SGD has plain momentum, as in the reference"
            yield "optimizer.nesterov", not section.nesterov, plain
        case _:
            yield "optimizer.kind", False, "lars or sgd"
            return
    decay = "0.0001 times a power of two, such as 0.00005"
    yield "optimizer.weight_decay", _is_power_of_two(section.weight_decay / 1e-4), decay


def _lars_rules(section: LARS, *, global_batch: int) -> Iterator[_Checked]:
    equal = section.convention in {"reference", "scaled-momentum"}
    yield "optimizer.convention", equal, "reference, or scaled-momentum as in MXNet's LARS"
    free = global_batch >= FREE_MOMENTUM
    momentum = f"0.9 for a global batch below {FREE_MOMENTUM:,}, else any"
    yield "optimizer.momentum", free or section.momentum == 0.9, momentum
    yield "optimizer.eta", section.eta == 1e-3, "0.001, as in the reference"
    yield "optimizer.eps", section.eps == 0.0, "0: nothing is added to the trust ratio's divisor"
    yield "optimizer.clip_ratio", section.clip_ratio is None, "the trust ratio has no limit"
    yield "optimizer.clip_gradient", section.clip_gradient is None, "gradients are not clipped"


def _schedule_rules(recipe: Recipe) -> Iterator[_Checked]:
    schedule, decay = recipe.schedule, recipe.schedule.decay
    yield "schedule.start_lr", schedule.start_lr == 0.0, "the warm-up starts at 0"
    yield "schedule.first_step", schedule.first_step == 1, "1: the reference counts updates from 1"
    if isinstance(decay, Polynomial):
        yield "schedule.decay.power", decay.power == 2.0, "the rate falls with power 2"
        yield "schedule.decay.end_lr", decay.end_lr == 1e-4, "the rate ends at 0.0001"
    else:
        yield "schedule.decay.kind", False, "polynomial, with power 2 and end_lr 0.0001"
    if isinstance(recipe.optimizer, SGD):
        rate = "0.001 times a whole number, for SGD"
        yield "schedule.peak_lr", _is_whole(schedule.peak_lr / 1e-3), rate
        yield "schedule.warmup", _is_whole(warmup_epochs(recipe)), "whole epochs, for SGD"


def _training_rules(recipe: Recipe) -> Iterator[_Checked]:
    smoothing = recipe.loss.label_smoothing in {0.0, 0.1}
    yield "loss.label_smoothing", smoothing, "0 or 0.1"
    for key in ("clean", "ema", "swa", "affine", "statistics"):
        absent = recipe.polish is None or getattr(recipe.polish, key) is None
        stage = "all updates are on augmented images, and the model is the one they leave"
        yield f"polish.{key}", absent, stage
    whole = "all training images are trained on"
    yield "data.held_out", recipe.data.held_out is None, whole
    yield "polish.held_out", recipe.train_samples == recipe.data.train_split, whole
    uncached = "the clock starts before any image is read, and a cache is filled earlier"
    yield "execution.cache", recipe.execution.cache is None, uncached
    evaluation = recipe.evaluation
    every = "accuracy is measured every 4 epochs"
    yield "evaluation.every_epochs", evaluation.every_epochs == 4, every
    offset = f"{every}, at an offset of 0, 1, 2 or 3"
    yield "evaluation.offset_epochs", evaluation.offset_epochs in {0, 1, 2, 3}, offset
    yield "evaluation.views", evaluation.views == 1, "one view of each image is evaluated"


def _is_whole(number: float) -> bool:
    return abs(number - round(number)) < 1e-5


def _is_power_of_two(number: float) -> bool:
    return number > 0 and _is_whole(math.log2(number))


def _found(recipe: Recipe, setting: str) -> str:
    value: object = recipe
    for key in setting.split("."):
        value = getattr(value, key)
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
    elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        return f"{len(value)} of them"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)

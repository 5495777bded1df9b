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
from typing import Any

from largebatch.errors import clip
from largebatch.recipe.model import RESNET50
from largebatch.recipe.optimizers import LARS, SGD
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.schedule import Polynomial
from largebatch.recipe.section import Duration, Section

USAGE, BENCHMARK, ROUND = "training", "resnet", "4.0.0"
TARGET = 0.759  # top-1 accuracy at which a run is complete

TRAIN_SAMPLES, VAL_SAMPLES = 1_281_167, 50_000
FREE_MOMENTUM = 32_768  # least batch at which LARS may have any momentum

_Checked = tuple[str, bool, str]
"""A key, True if it keeps its rule, and the rule."""

LARS_REMARK = (
    "the rules list no compliant implementation of LARS for PyTorch, as they do for TensorFlow and "
    "MXNet: a submission needs the consent of MLPerf's working group"
)


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A setting of a recipe that the closed division forbids."""

    setting: str
    """Key in the recipe."""

    found: str
    rule: str


def broken_rules(recipe: Recipe) -> list[BrokenRule]:
    """Return the rules of the closed division that a recipe breaks."""
    imagenet = f"ImageNet's {TRAIN_SAMPLES:,} training and {VAL_SAMPLES:,} validation images"
    whole, every = "all training images are trained on", "accuracy is measured every 4 epochs"
    data, batch, schedule = recipe.data, recipe.batch, recipe.schedule
    evaluation, model, polish = recipe.evaluation, recipe.model, recipe.polish
    cache = recipe.execution.cache
    updates = recipe.train_samples / batch.global_batch
    warmup = warmup_epochs(schedule.warmup, updates_per_epoch=updates)
    sgd = isinstance(recipe.optimizer, SGD)
    # Keys, True if it keeps the rule, and the rule.
    rules = (
        ("data.source", data.source == "folder", f"images are {imagenet}"),
        ("data.classes", data.classes == 1000, "ImageNet has 1,000 classes"),
        ("data.train_samples", data.train_samples == TRAIN_SAMPLES, f"{imagenet}, all of them"),
        ("data.val_samples", data.val_samples == VAL_SAMPLES, f"{imagenet}, all of them"),
        ("data.image_size", data.image_size == 224, "224, as in the reference"),
        ("data.resolution", not data.resolution, "images have one size throughout"),
        ("data.crop_area", _near(data.crop_area, (0.05, 1.0)), "the reference crops 0.05 to 1"),
        ("data.crop_aspect", _near(data.crop_aspect, (3 / 4, 4 / 3)), "from 3/4 to 4/3"),
        ("data.flip", data.flip is True, "half of the training images are mirrored at random"),
        ("data.translate", not data.translate, "images are not moved"),
        ("data.eval_resize", data.eval_resize == 256, "256, of which the centre is evaluated"),
        ("model.name", model.name in RESNET50, "the network is ResNet-50 v1.5: resnet50"),
        ("model.arguments", model.arguments.keys() <= {"zero_init_last"}, "ResNet-50 v1.5 as is"),
        ("model.weights", model.weights is None, "training begins with random weights"),
        ("model.head_std", model.head_std == 0.01, "the classifier is drawn from N(0, 0.01)"),
        ("batch.schedule", not batch.schedule, "the global batch is constant"),
        *_optimizer_rules(recipe.optimizer, global_batch=batch.global_batch),
        ("schedule.start_lr", schedule.start_lr == 0.0, "the warm-up starts at 0"),
        ("schedule.first_step", schedule.first_step == 1, "the reference counts updates from 1"),
        *_decay_rules(schedule.decay),
        ("schedule.peak_lr", not sgd or _is_whole(schedule.peak_lr / 1e-3), "whole 0.001 for SGD"),
        ("schedule.warmup", not sgd or _is_whole(warmup), "whole epochs for SGD"),
        ("loss.label_smoothing", recipe.loss.label_smoothing in {0.0, 0.1}, "0 or 0.1"),
        *(
            (f"polish.{key}", polish is None or getattr(polish, key) is None, "no polishing")
            for key in ("clean", "ema", "swa", "affine", "statistics")
        ),
        ("data.held_out", data.held_out is None, whole),
        ("polish.held_out", recipe.train_samples == data.train_split, whole),
        ("execution.cache", cache in {None, "none"}, "the clock starts before any image"),
        ("evaluation.every_epochs", evaluation.every_epochs == 4, every),
        ("evaluation.offset_epochs", evaluation.offset_epochs in range(4), f"{every}, from 0-3"),
        ("evaluation.views", evaluation.views == 1, "one view of each image is evaluated"),
    )
    settings = recipe.model_dump(mode="json", exclude_none=True)
    return [BrokenRule(key, _found(settings, key), rule) for key, kept, rule in rules if not kept]


def warmup_epochs(warmup: Duration | None, *, updates_per_epoch: float) -> float:
    """Return the length of a warm-up in epochs."""
    if warmup is None:
        return 0.0
    return (warmup.steps or 0) / updates_per_epoch if warmup.epochs is None else warmup.epochs


def _optimizer_rules(section: Section, *, global_batch: int) -> Iterator[_Checked]:
    match section:
        case LARS():
            equal = section.convention in {"reference", "scaled-momentum"}
            yield "optimizer.convention", equal, "reference, or scaled-momentum as in MXNet's LARS"
            free = global_batch >= FREE_MOMENTUM or section.momentum == 0.9
            yield "optimizer.momentum", free, f"0.9 for a global batch below {FREE_MOMENTUM:,}"
            yield "optimizer.eta", section.eta == 1e-3, "0.001, as in the reference"
            yield "optimizer.eps", section.eps == 0.0, "0: nothing is added to the divisor"
            yield "optimizer.clip_ratio", section.clip_ratio is None, "the ratio has no limit"
            yield "optimizer.clip_gradient", section.clip_gradient is None, "no clipping"
        case SGD():
            yield "optimizer.momentum", section.momentum == 0.9, "0.9 for SGD"
            yield "optimizer.nesterov", not section.nesterov, "SGD has plain momentum"
        case _:
            yield "optimizer.kind", False, "lars or sgd"
            return
    power = section.weight_decay > 0 and _is_whole(math.log2(section.weight_decay / 1e-4))
    yield "optimizer.weight_decay", power, "0.0001 times a power of two, such as 0.00005"


def _decay_rules(decay: Section) -> Iterator[_Checked]:
    if not isinstance(decay, Polynomial):
        yield "schedule.decay.kind", False, "polynomial, with power 2 and end_lr 0.0001"
        return
    yield "schedule.decay.power", decay.power == 2.0, "the rate falls with power 2"
    yield "schedule.decay.end_lr", decay.end_lr == 1e-4, "the rate ends at 0.0001"


def _is_whole(number: float) -> bool:
    return abs(number - round(number)) < 1e-5


def _near(bounds: tuple[float, float] | None, expected: tuple[float, float]) -> bool:
    return bounds is not None and math.dist(bounds, expected) < 1e-6


def _found(value: Any, setting: str) -> str:  # noqa: ANN401 -- JSON
    for key in setting.split("."):
        value = value.get(key)
    return clip(value if isinstance(value, str) else json.dumps(value), 60)

"""MLPerf's closed division: which of its rules for ResNet a recipe breaks.

The rules are those of MLPerf Training 4.0, the last round with ResNet: section "Hyperparameters
and optimizer" of github.com/mlcommons/training_policies, training_rules.adoc, its schedule of
evaluations, and what closed_resnet.yaml of mlperf-logging tests in a log. A setting that is no
hyperparameter there is fixed to the reference implementation. The log and the referee also use
the number of images, the target and the benchmark's name from here.
"""

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from largebatch.errors import clip
from largebatch.recipe.keys import CrossEntropy
from largebatch.recipe.model import RESNET50
from largebatch.recipe.optimizers import LARS, SGD
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.schedule import Polynomial
from largebatch.recipe.section import Duration, Section
from largebatch.rules import Finding, Rule, examine

USAGE = "training"
BENCHMARK = "resnet"
ROUND = "4.0.0"
TARGET = 0.759  # top-1 accuracy at which a run is complete

TRAIN_SAMPLES = 1_281_167
VAL_SAMPLES = 50_000
FREE_MOMENTUM = 32_768  # least batch at which LARS may have any momentum

LARS_REMARK = (
    "the rules list no compliant implementation of LARS for PyTorch, as they do for TensorFlow and "
    "MXNet: a submission needs the consent of MLPerf's working group"
)


def broken_rules(recipe: Recipe) -> list[Finding]:
    """Return the rules of the closed division that a recipe breaks.

    `check` is the key in the recipe, `text` its value, and `remedy` the rule.
    """
    return [*examine(recipe, RULES)]


def warmup_epochs(warmup: Duration | None, *, updates_per_epoch: float) -> float:
    """Return the length of a warm-up in epochs."""
    if warmup is None:
        return 0.0
    return (warmup.steps or 0) / updates_per_epoch if warmup.epochs is None else warmup.epochs


def _rule(setting: str, keeps: Callable[[Recipe], bool], rule: str) -> Rule[Recipe]:
    return Rule(
        check=setting,
        level="fault",
        when=lambda recipe: not keeps(recipe),
        text=lambda recipe: _value_of(recipe, setting),
        remedy=rule,
    )


OfSection = TypeVar("OfSection", bound=Section)


def _optimizer(
    kind: type[OfSection], keeps: Callable[[OfSection], bool]
) -> Callable[[Recipe], bool]:
    """Return a condition on an optimizer of one kind, which others keep."""
    return lambda recipe: not isinstance(recipe.optimizer, kind) or keeps(recipe.optimizer)


def _polynomial(keeps: Callable[[Polynomial], bool]) -> Callable[[Recipe], bool]:
    """Return a condition on a polynomial decay, which others keep."""

    def keeps_it(recipe: Recipe) -> bool:
        decay = recipe.schedule.decay
        return not isinstance(decay, Polynomial) or keeps(decay)

    return keeps_it


def _is_whole(number: float) -> bool:
    return abs(number - round(number)) < 1e-5


def _is_near(bounds: tuple[float, float] | None, expected: tuple[float, float]) -> bool:
    return bounds is not None and math.dist(bounds, expected) < 1e-6


def _has_free_momentum(recipe: Recipe) -> bool:
    return recipe.batch.global_batch >= FREE_MOMENTUM


def _warms_up_whole_epochs(recipe: Recipe) -> bool:
    updates = recipe.train_samples / recipe.batch.global_batch
    return _is_whole(warmup_epochs(recipe.schedule.warmup, updates_per_epoch=updates))


def _has_usual_decay(section: LARS | SGD) -> bool:
    decay = section.weight_decay
    return decay > 0 and _is_whole(math.log2(decay / 1e-4))


def _has_no(key: str) -> Callable[[Recipe], bool]:
    return lambda recipe: recipe.polish is None or getattr(recipe.polish, key) is None


def _value_of(recipe: Recipe, setting: str) -> str:
    value: Any = recipe.model_dump(mode="json", exclude_none=True)
    for key in setting.split("."):
        value = value.get(key)
    return clip(value if isinstance(value, str) else json.dumps(value), 60)


_IMAGENET = f"ImageNet's {TRAIN_SAMPLES:,} training and {VAL_SAMPLES:,} validation images"
_WHOLE = "all training images are trained on"
_EVERY_FOURTH = "accuracy is measured every 4 epochs"

# fmt: off
RULES: tuple[Rule[Recipe], ...] = (
    # The images, and how they are augmented.
    _rule("data.source", lambda it: it.data.source == "folder", f"images are {_IMAGENET}"),
    _rule("data.classes", lambda it: it.data.classes == 1000, "ImageNet has 1,000 classes"),
    _rule("data.train_samples", lambda it: it.data.train_samples == TRAIN_SAMPLES,
          f"{_IMAGENET}, all of them"),
    _rule("data.val_samples", lambda it: it.data.val_samples == VAL_SAMPLES,
          f"{_IMAGENET}, all of them"),
    _rule("data.image_size", lambda it: it.data.image_size == 224, "224, as in the reference"),
    _rule("data.resolution", lambda it: not it.data.resolution,
          "images have one size throughout"),
    _rule("data.crop_area", lambda it: _is_near(it.data.crop_area, (0.05, 1.0)),
          "the reference crops 0.05 to 1"),
    _rule("data.crop_aspect", lambda it: _is_near(it.data.crop_aspect, (3 / 4, 4 / 3)),
          "from 3/4 to 4/3"),
    _rule("data.flip", lambda it: it.data.flip is True,
          "half of the training images are mirrored at random"),
    _rule("data.translate", lambda it: not it.data.translate, "images are not moved"),
    _rule("data.augment", lambda it: it.data.augment is None,
          "crops and mirror images are the only augmentation"),
    _rule("data.mix", lambda it: it.data.mix is None, "images are not mixed"),
    _rule("data.erase", lambda it: it.data.erase is None, "nothing is erased"),
    # data.order keeps the rules: they permit arbitrary sharding and packing if the order is random
    # overall, and every image occurs once.
    _rule("data.repeats", lambda it: it.data.repeats == 1, "every image occurs once in an epoch"),
    _rule("data.eval_resize", lambda it: it.data.eval_resize == 256,
          "256, of which the centre is evaluated"),
    # The network.
    _rule("model.name", lambda it: it.model.name in RESNET50,
          "the network is ResNet-50 v1.5: resnet50"),
    _rule("model.arguments", lambda it: it.model.arguments.keys() <= {"zero_init_last"},
          "ResNet-50 v1.5 as is"),
    _rule("model.weights", lambda it: it.model.weights is None,
          "training begins with random weights"),
    _rule("model.head_std", lambda it: it.model.head_std == 0.01,
          "the classifier is drawn from N(0, 0.01)"),
    _rule("model.early", lambda it: it.model.early is None, "all layers are trained throughout"),
    _rule("model.backbone", lambda it: it.model.backbone is None,
          "all layers have the rate of the schedule"),
    # The optimizer.
    _rule("batch.schedule", lambda it: not it.batch.schedule, "the global batch is constant"),
    _rule("optimizer.kind", lambda it: isinstance(it.optimizer, LARS | SGD), "lars or sgd"),
    _rule("optimizer.convention",
          _optimizer(LARS, lambda it: it.convention in {"reference", "scaled-momentum"}),
          "reference, or scaled-momentum as in MXNet's LARS"),
    _rule("optimizer.momentum",
          lambda it: _has_free_momentum(it) or _optimizer(LARS, lambda o: o.momentum == 0.9)(it),
          f"0.9 for a global batch below {FREE_MOMENTUM:,}"),
    _rule("optimizer.eta", _optimizer(LARS, lambda it: it.eta == 1e-3),
          "0.001, as in the reference"),
    _rule("optimizer.eps", _optimizer(LARS, lambda it: it.eps == 0.0),
          "0: nothing is added to the divisor"),
    _rule("optimizer.clip_ratio", _optimizer(LARS, lambda it: it.clip_ratio is None),
          "the ratio has no limit"),
    _rule("optimizer.clip_gradient", _optimizer(LARS, lambda it: it.clip_gradient is None),
          "no clipping"),
    _rule("optimizer.clip_norm", lambda it: it.optimizer.clip_norm is None, "no clipping"),
    _rule("optimizer.layer_decay", lambda it: it.optimizer.layer_decay is None,
          "all layers have the rate of the schedule"),
    _rule("optimizer.momentum", _optimizer(SGD, lambda it: it.momentum == 0.9), "0.9 for SGD"),
    _rule("optimizer.nesterov", _optimizer(SGD, lambda it: not it.nesterov),
          "SGD has plain momentum"),
    _rule("optimizer.bias_lr", _optimizer(SGD, lambda it: it.bias_lr is None),
          "biases have the rate of the schedule"),
    _rule("optimizer.bias_weight_decay", _optimizer(SGD, lambda it: it.bias_weight_decay == 0),
          "biases and normalisation layers are not decayed"),
    _rule("optimizer.weight_decay", _optimizer(LARS, _has_usual_decay),
          "0.0001 times a power of two, such as 0.00005"),
    _rule("optimizer.weight_decay", _optimizer(SGD, _has_usual_decay),
          "0.0001 times a power of two, such as 0.00005"),
    # The schedule.
    _rule("schedule.start_lr", lambda it: it.schedule.start_lr == 0.0, "the warm-up starts at 0"),
    _rule("schedule.first_step", lambda it: it.schedule.first_step == 1,
          "the reference counts updates from 1"),
    _rule("schedule.decay.kind", lambda it: isinstance(it.schedule.decay, Polynomial),
          "polynomial, with power 2 and end_lr 0.0001"),
    _rule("schedule.decay.power", _polynomial(lambda it: it.power == 2.0),
          "the rate falls with power 2"),
    _rule("schedule.decay.end_lr", _polynomial(lambda it: it.end_lr == 1e-4),
          "the rate ends at 0.0001"),
    _rule("schedule.peak_lr",
          lambda it: not isinstance(it.optimizer, SGD) or _is_whole(it.schedule.peak_lr / 1e-3),
          "whole 0.001 for SGD"),
    _rule("schedule.warmup",
          lambda it: not isinstance(it.optimizer, SGD) or _warms_up_whole_epochs(it),
          "whole epochs for SGD"),
    _rule("loss.kind", lambda it: isinstance(it.loss, CrossEntropy), "cross_entropy"),
    _rule("loss.class_weights", lambda it: it.loss.class_weights is None,
          "every image has the same weight"),
    _rule("loss.label_smoothing", lambda it: it.loss.label_smoothing in {0.0, 0.1}, "0 or 0.1"),
    # What the reference does not have.
    _rule("protocol", lambda it: it.protocol is None, "updates are synchronous"),
    *(
        _rule(f"polish.{key}", _has_no(key), "no polishing")
        for key in ("clean", "ema", "swa", "affine", "statistics")
    ),
    _rule("data.held_out", lambda it: it.data.held_out is None, _WHOLE),
    _rule("polish.held_out", lambda it: it.train_samples == it.data.train_split, _WHOLE),
    _rule("execution.cache", lambda it: it.execution.cache in {None, "none"},
          "the clock starts before any image"),
    # Evaluations.
    _rule("evaluation.every_epochs", lambda it: it.evaluation.every_epochs == 4, _EVERY_FOURTH),
    _rule("evaluation.offset_epochs", lambda it: it.evaluation.offset_epochs in range(4),
          f"{_EVERY_FOURTH}, from 0-3"),
    _rule("evaluation.views", lambda it: it.evaluation.views == 1,
          "one view of each image is evaluated"),
)
# fmt: on

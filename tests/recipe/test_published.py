"""Recipes beside what their sources publish: each is written again in the words of its source.

`published.json` has the settings as the sources write them. What a source counts in another way is
converted here, and nowhere else: torch's weight decay into big_vision's, an EMA of every update
into torchvision's of every 32.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from largebatch import load_recipe
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.augment import RandAugment
from largebatch.recipe.keys import BinaryCrossEntropy
from largebatch.recipe.optimizers import LAMB, SGD, AdamW
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.schedule import Cosine, Polynomial

PUBLISHED: dict[str, Any] = json.loads(
    Path(__file__).with_name("published.json").read_text(encoding="utf-8")
)

FOLDER = Path(__file__).parents[2] / "recipes" / "imagenet"

Settings = dict[str, Any]


def cosine(recipe: Recipe) -> float:
    """Return the last rate of a recipe whose rate falls along half a cosine until its end."""
    decay = recipe.schedule.decay
    assert isinstance(decay, Cosine)
    assert decay.over is None
    return decay.end_lr


def warmup_epochs(recipe: Recipe) -> float | None:
    assert recipe.schedule.warmup is not None
    return recipe.schedule.warmup.epochs


def trained_size(recipe: Recipe) -> int:
    """Return the one size that a recipe trains at."""
    plan = make_plan(recipe, workers=1)
    ((_, size),) = plan.sized(range(plan.train_steps), otherwise=recipe.data.image_size)
    return size


def crops_of_torchvision(recipe: Recipe) -> bool:
    """Return True for RandomResizedCrop's defaults, in torchvision and in timm."""
    area, aspect = recipe.data.crop_area, recipe.data.crop_aspect
    return area == (0.08, 1.0) and aspect == pytest.approx((3 / 4, 4 / 3), rel=1e-6)


def crop_in_tests(recipe: Recipe) -> int:
    assert recipe.data.eval_resize is not None
    return recipe.data.eval_resize


def rand_augment(recipe: Recipe) -> str:
    """Return the augmentation as timm writes it, whose default number of operations is 2."""
    section = recipe.data.augment
    assert isinstance(section, RandAugment)
    assert (section.set, section.operations, section.probability) == ("timm", 2, None)
    # timm passes --train-interpolation on to the operations.
    assert section.interpolation == recipe.data.interpolation
    std, increasing = f"{section.std:g}", int(section.increasing)
    return f"rand-m{section.magnitude:g}-mstd{std}-inc{increasing}"


def mixing(recipe: Recipe) -> Settings:
    """Return timm's four flags of mixing, by their names without a prefix."""
    mix = recipe.data.mix
    assert mix is not None
    assert mix.until is None
    return {
        "mixup": mix.mixup,
        "cutmix": mix.cutmix,
        "mixup-prob": mix.probability,
        "mixup-switch-prob": mix.cutmix_part,
    }


def erasing(recipe: Recipe) -> Settings:
    """Return timm's three flags of erasing, by their names without a prefix."""
    erase = recipe.data.erase
    assert erase is not None
    assert erase.area == pytest.approx((0.02, 1 / 3))
    assert erase.aspect == pytest.approx((0.3, 1 / 0.3))
    mode = {"noise": "pixel", "constant": "const"}[erase.fill]
    return {"reprob": erase.probability, "remode": mode, "recount": erase.count}


def named(prefix: str, settings: Settings, *, separator: str = "-") -> Settings:
    return {prefix + key.replace("-", separator): value for key, value in settings.items()}


def resnet_strikes_back(recipe: Recipe) -> Settings:
    data, loss, optimizer, mix = recipe.data, recipe.loss, recipe.optimizer, mixing(recipe)
    assert isinstance(optimizer, LAMB)
    assert isinstance(loss, BinaryCrossEntropy)
    assert (loss.classes, recipe.model.name) == ("mean", "resnet50")
    # timm rounds the size before the crop down.
    ratio = next(
        r / 100 for r in range(100, 0, -1) if int(224 / (r / 100)) == crop_in_tests(recipe)
    )
    augment = rand_augment(recipe)
    magnitude = augment.removeprefix("rand-m").partition("-")[0]
    assert augment.endswith("-mstd0.5-inc1")
    span = recipe.batch.bn_span
    assert span is not None
    return {
        "Train Res": trained_size(recipe),
        "Test Res": data.image_size,
        "Epochs": recipe.duration.epochs,
        "Batch size": recipe.batch.global_batch,
        "Optimizer": optimizer.kind.upper(),
        "LR": recipe.schedule.peak_lr,
        "LR decay": recipe.schedule.decay.kind,
        "Weight decay": optimizer.weight_decay,
        "Warmup epochs": warmup_epochs(recipe),
        "Label smoothing": loss.label_smoothing or None,
        "Dropout": recipe.model.arguments.get("drop_rate"),
        "Stoch. depth": recipe.model.arguments.get("drop_path_rate"),
        "Repeated aug": data.repeats == 3,
        "Gradient clip": optimizer.clip_norm,
        "H. flip": data.flip,
        "RRC": crops_of_torchvision(recipe),
        "Rand Augment": f"{magnitude}/0.5",
        "Mixup alpha": mix["mixup"],
        "Cutmix alpha": mix["cutmix"],
        "Erasing prob": data.erase,
        "Test crop ratio": ratio,
        "CE loss": recipe.loss.kind == "cross_entropy",
        "BCE loss": recipe.loss.kind == "bce",
        "Mixed precision": recipe.precision == "fp16",
        "--bce-target-thresh": loss.target_threshold,
        "--aa": augment,
        "--train-interpolation": data.interpolation,
        "--warmup-lr": recipe.schedule.start_lr,
        "--min-lr": cosine(recipe),
        "-b": span,
        "GPUs": recipe.batch.global_batch // span,
        "Lamb(max_grad_norm)": optimizer.max_grad_norm,
        "Lamb(betas)": [optimizer.beta1, optimizer.beta2],
        "Lamb(eps)": optimizer.eps,
        "--mixup-prob": mix["mixup-prob"],
        "--mixup-switch-prob": mix["mixup-switch-prob"],
    }


def deit(recipe: Recipe) -> Settings:
    data, optimizer = recipe.data, recipe.optimizer
    assert isinstance(optimizer, AdamW)
    assert crops_of_torchvision(recipe)
    assert data.flip is True
    assert recipe.precision == "fp16"
    return {
        "--model": recipe.model.name,
        "--input-size": trained_size(recipe),
        "--epochs": recipe.duration.epochs,
        "batch size": recipe.batch.global_batch,
        "--lr": recipe.schedule.peak_lr * 512 / recipe.batch.global_batch,
        "--opt": optimizer.kind,
        "--opt-eps": optimizer.eps,
        "--opt-betas": [optimizer.beta1, optimizer.beta2],
        "--weight-decay": optimizer.weight_decay,
        "--sched": recipe.schedule.decay.kind,
        "--warmup-epochs": warmup_epochs(recipe),
        "--warmup-lr": recipe.schedule.start_lr,
        "--min-lr": cosine(recipe),
        "--clip-grad": optimizer.clip_norm,
        "--drop": recipe.model.arguments.get("drop_rate", 0.0),
        "--drop-path": recipe.model.arguments["drop_path_rate"],
        "--smoothing": recipe.loss.label_smoothing,
        "--bce-loss": recipe.loss.kind == "bce",
        "--aa": rand_augment(recipe),
        "--train-interpolation": data.interpolation,
        "--repeated-aug": data.repeats > 1,
        "num_repeats": data.repeats,
        **named("--", erasing(recipe)),
        **named("--", mixing(recipe)),
        "--eval-crop-ratio": data.image_size / crop_in_tests(recipe),
    }


def convnext(recipe: Recipe) -> Settings:
    data, optimizer, arguments = recipe.data, recipe.optimizer, recipe.model.arguments
    assert isinstance(optimizer, AdamW)
    assert crops_of_torchvision(recipe)
    assert (data.flip, data.repeats) == (True, 1)
    assert recipe.schedule.start_lr == 0
    assert recipe.polish is not None
    return {
        "--model": recipe.model.name,
        "--input_size": trained_size(recipe),
        "--epochs": recipe.duration.epochs,
        "batch size": recipe.batch.global_batch,
        "--lr": recipe.schedule.peak_lr,
        "--min_lr": cosine(recipe),
        "--opt": optimizer.kind,
        "--opt_eps": optimizer.eps,
        "--opt_betas": [optimizer.beta1, optimizer.beta2],
        "--weight_decay": optimizer.weight_decay,
        "--layer_decay": optimizer.layer_decay or 1.0,
        "--warmup_epochs": warmup_epochs(recipe),
        "--clip_grad": optimizer.clip_norm,
        "--drop_path": arguments["drop_path_rate"],
        "--layer_scale_init_value": arguments["ls_init_value"],
        "--head_init_scale": arguments.get("head_init_scale", 1.0),
        "--model_ema": True,
        "--model_ema_decay": recipe.polish.ema,
        "--smoothing": recipe.loss.label_smoothing,
        "--aa": rand_augment(recipe),
        "--train_interpolation": data.interpolation,
        **named("--", erasing(recipe)),
        **named("--", mixing(recipe), separator="_"),
        "--use_amp": recipe.precision != "fp32",
        "crop_pct": data.image_size / crop_in_tests(recipe),
    }


def torchvision(recipe: Recipe) -> Settings:
    data, optimizer, erase, mix = recipe.data, recipe.optimizer, recipe.data.erase, recipe.data.mix
    assert isinstance(optimizer, SGD)
    assert crops_of_torchvision(recipe)
    assert data.augment is not None
    assert data.augment.kind == "trivial_augment"
    assert data.augment.interpolation == data.interpolation
    assert erase is not None
    assert mix is not None
    # RandomChoice takes either with the same probability, and each has p=1.0.
    assert (mix.probability, mix.cutmix_part, mix.until) == (1.0, 0.5, None)
    assert (data.flip, recipe.precision, optimizer.nesterov) == (True, "fp32", False)
    assert cosine(recipe) == 0
    assert recipe.model.name == "torchvision/resnet50"
    assert recipe.polish is not None
    assert recipe.polish.ema is not None
    # main() of references/classification/train.py: the share of the model in an average that moves
    # every --model-ema-steps updates.
    steps = 32
    share = 1 - recipe.polish.ema**steps
    adjust = recipe.batch.global_batch * steps / (recipe.duration.epochs or 0)
    return {
        "ngpus": recipe.batch.global_batch // (recipe.batch.bn_span or 1),
        "--batch-size": recipe.batch.bn_span,
        "--epochs": recipe.duration.epochs,
        "--opt": optimizer.kind,
        "--momentum": optimizer.momentum,
        "--lr": recipe.schedule.peak_lr,
        "--lr-scheduler": f"{recipe.schedule.decay.kind}annealinglr",
        "--lr-warmup-epochs": warmup_epochs(recipe),
        "--lr-warmup-method": "linear",
        "--lr-warmup-decay": recipe.schedule.start_lr / recipe.schedule.peak_lr,
        "--weight-decay": optimizer.weight_decay,
        "--norm-weight-decay": optimizer.bias_weight_decay,
        "--label-smoothing": recipe.loss.label_smoothing,
        "--mixup-alpha": mix.mixup,
        "--cutmix-alpha": mix.cutmix,
        "--auto-augment": "ta_wide",
        "--random-erase": erase.probability,
        "RandomErasing(scale)": list(erase.area),
        "RandomErasing(ratio)": list(erase.aspect),
        "RandomErasing(value)": {"constant": 0, "noise": "random"}[erase.fill],
        "--ra-sampler": data.repeats > 1,
        "--ra-reps": data.repeats,
        "--model-ema-steps": steps,
        "--model-ema-decay": 1 - share / adjust,
        "--interpolation": data.interpolation,
        "--val-resize-size": data.eval_resize,
        "--val-crop-size": data.image_size,
        "--train-crop-size": trained_size(recipe),
    }


def big_vision(recipe: Recipe) -> Settings:
    """At another batch than 1,024 the rules of its header are undone first."""
    data, optimizer, augment, mix = (
        recipe.data,
        recipe.optimizer,
        recipe.data.augment,
        recipe.data.mix,
    )
    factor = recipe.batch.global_batch / 1024
    assert isinstance(optimizer, AdamW)
    assert isinstance(augment, RandAugment)
    assert augment.set == "big_vision"
    assert mix is not None
    assert (mix.cutmix, mix.probability, mix.until) == (None, 1.0, None)
    assert data.crop_area is not None
    assert recipe.schedule.warmup is not None
    assert recipe.loss.label_smoothing == 0
    assert cosine(recipe) == 0
    lowest, highest = (-data.mean[0] / data.std[0], (1 - data.mean[0]) / data.std[0])
    assert (data.mean, data.std) == ((data.mean[0],) * 3, (data.std[0],) * 3)
    is_whole = (recipe.model.name, recipe.model.arguments) == ("big_vision_vit_s16", {})
    return {
        "total_epochs": recipe.duration.epochs,
        "input.data.split": f"train[:{100 * data.train_split / data.train_samples:.4g}%]",
        "input.batch_size": recipe.batch.global_batch / factor,
        "input.pp": f"decode_jpeg_and_inception_crop({trained_size(recipe)})"
        + ("|flip_lr" if data.flip is True else "")
        + f"|randaug({augment.operations},{augment.magnitude:g})"
        + f"|value_range({lowest:g}, {highest:g})",
        "area_min, area_max": [100 * bound for bound in data.crop_area],
        "ratio_min, ratio_max": list(data.crop_aspect),
        "pp_eval": f"resize_small({data.eval_resize})|central_crop({data.image_size})",
        "loss": {"cross_entropy": "softmax_xent", "bce": "sigmoid_xent"}[recipe.loss.kind],
        # What the network has is in tests/models/test_vision_transformer.py.
        "model.variant": "S/16" if is_whole else None,
        "model.rep_size": is_whole,
        "model.pool_type": "gap" if is_whole else None,
        "model.posemb": "sincos2d" if is_whole else None,
        "optax_name": "scale_by_adam",
        "b1, b2, eps": [optimizer.beta1, optimizer.beta2, optimizer.eps],
        "grad_clip_norm": optimizer.clip_norm,
        "lr": recipe.schedule.peak_lr / math.sqrt(factor),
        # An update subtracts wd of the weights there, and rate times weight_decay in torch.
        "wd": recipe.schedule.peak_lr * optimizer.weight_decay / factor,
        "schedule.warmup_steps": (recipe.schedule.warmup.steps or 0) * factor,
        "schedule.decay_type": recipe.schedule.decay.kind,
        "mixup.p": mix.mixup,
    }


def ffcv(recipe: Recipe) -> Settings:
    """The sizes of every epoch and the rates are in test_optimizer_recipes.py."""
    data, optimizer, schedule = recipe.data, recipe.optimizer, recipe.schedule
    assert isinstance(optimizer, SGD)
    assert isinstance(schedule.decay, Polynomial)
    assert schedule.decay.power == 1.0
    assert schedule.start_lr == pytest.approx(1e-4 * 1.7)
    assert crops_of_torchvision(recipe)
    assert data.flip is True
    assert data.image_size / crop_in_tests(recipe) == pytest.approx(224 / 256, abs=2e-3)
    small, large = data.resolution
    assert small.until is not None
    # The size is the larger one from the first epoch on that is nearer to it.
    ramps = {12: [11, 13], 71: [65, 76]}
    return {
        "dist.world_size": recipe.batch.global_batch // (recipe.batch.bn_span or 1),
        "lr.lr": schedule.peak_lr,
        "lr.lr_schedule_type": "cyclic",
        "lr.lr_peak_epoch": warmup_epochs(recipe),
        "model.arch": recipe.model.name.removesuffix("_blurred"),
        "resolution.min_res": small.image_size,
        "resolution.max_res": large.image_size,
        "resolution.start_ramp, end_ramp": ramps[int(small.until.epochs or 0)],
        "training.batch_size": recipe.batch.bn_span,
        "training.epochs": recipe.duration.epochs,
        "training.label_smoothing": recipe.loss.label_smoothing,
        "training.momentum": optimizer.momentum,
        "training.optimizer": optimizer.kind,
        "training.weight_decay": optimizer.weight_decay,
        "training.use_blurpool": int(recipe.model.name.endswith("_blurred")),
        "validation.lr_tta": recipe.evaluation.views == 2,
        "validation.resolution": data.image_size,
    }


FORMATS: dict[str, Callable[[Recipe], Settings]] = {
    "resnet strikes back": resnet_strikes_back,
    "deit": deit,
    "convnext": convnext,
    "torchvision": torchvision,
    "big_vision": big_vision,
    "ffcv": ffcv,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_published_settings(name: str) -> None:
    published = PUBLISHED[name]
    recipe = load_recipe(FOLDER / f"{name}.yaml")
    sizes = (recipe.data.classes, recipe.data.train_samples, recipe.data.val_samples)
    assert sizes == (1000, 1_281_167, 50_000)
    written = FORMATS[published["format"]](recipe)
    assert written.keys() == published["settings"].keys()
    for key, value in published["settings"].items():
        is_number = isinstance(value, (float, list))
        expected = pytest.approx(value, rel=1e-4) if is_number else value
        assert written[key] == expected, key


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_header_quotes_the_published_accuracy(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("# Published: "))
    assert line.startswith(f"# Published: {PUBLISHED[name]['top1']} % top-1")

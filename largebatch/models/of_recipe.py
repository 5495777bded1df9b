"""The model of a recipe: built from its seed, and checked before training."""

from collections.abc import Collection

import torch
from torch import nn

from largebatch import accelerator
from largebatch.errors import DeviceMemoryError, RecipeError, clip
from largebatch.models import affine_parameters, build, kernels
from largebatch.models.batchnorm import SpanBatchNorm, with_span
from largebatch.models.wrappers import set_forward
from largebatch.recipe.model import Model
from largebatch.recipe.recipe import Recipe


def build_model(recipe: Recipe, device: torch.device) -> nn.Module:
    """Build the model on a device, in the recipe's precision, with weights from the recipe's seed.

    Raises RecipeError if `batch.bn_span` does not fit the model's BatchNorm, or if `polish.affine`
    finds no classifier; DeviceMemoryError if the device has no room for the model.
    """
    section = recipe.model
    torch.manual_seed(recipe.seed)
    model = build(
        section.name,
        num_classes=recipe.data.classes,
        arguments=section.arguments,
        head_std=section.head_std,
    )
    _set_span(model, recipe.batch.bn_span, name=section.name)
    if recipe.polish is not None and recipe.polish.affine is not None:
        try:
            affine_parameters(model)
        except ValueError as error:  # better now than after the whole schedule
            raise RecipeError(f"polish.affine: {error}") from None
    if device.type != "cpu":  # where it is; fake tensors cannot be moved
        try:
            with accelerator.memory_errors():
                model.to(device)
        except torch.OutOfMemoryError:
            raise DeviceMemoryError(
                f"model.name: {section.name} does not fit the free memory of {device}"
            ) from None
    if recipe.execution.channels_last(device.type):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs
    if device.type in kernels.DEVICES and recipe.execution.kernels != "torch":
        from largebatch.models.fusion import pair

        pair(model)
    if recipe.precision != "fp32":
        dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float16
        set_forward(model, torch.autocast(device.type, dtype)(type(model).forward))
    return model


def model_without_memory(section: Model, *, classes: int) -> nn.Module:
    """Build the model on the meta device: its weights have names and shapes, and no numbers."""
    with torch.device("meta"):
        return build(section.name, num_classes=classes, arguments=section.arguments)


def require_trainable(model: nn.Module, name: str) -> None:
    """Raise RecipeError if the model returns more than logits in training mode.

    GoogLeNet and Inception have auxiliary classifiers (arXiv:1409.4842, section 5), whose losses
    are not part of a recipe.
    """
    if getattr(model, "aux_logits", False):
        raise RecipeError(
            f"model.name: {name} has auxiliary classifiers; set model.arguments.aux_logits: false"
        )


def require_accepted(section: Model, *, classes: int, image_sizes: Collection[int]) -> None:
    """Raise RecipeError unless the model takes images of these sizes.

    Only shapes are computed, which needs no memory and no arithmetic.
    """
    if not image_sizes:
        return
    with torch.device("meta"), torch.no_grad():
        model = model_without_memory(section, classes=classes).eval()
        for size in sorted(image_sizes):
            try:
                shape = tuple(model(torch.zeros(2, 3, size, size)).shape)
                reason = f"it returns {' x '.join(map(str, shape))}, expected 2 x {classes}"
            except Exception as error:  # a model of the user's own raises all kinds
                shape = ()
                reason = clip(" ".join(str(error).split()), 200)
            if shape != (2, classes):
                raise RecipeError(
                    f"data.resolution: {section.name} does not take images of {size} x {size} "
                    f"({reason}); leave that size out or choose another model"
                )


def _set_span(model: nn.Module, span: int | None, *, name: str) -> None:
    try:
        with_span(model, span or 1)
    except ValueError as error:
        raise RecipeError(f"model.name: {name}: {error}") from None
    has_norm = any(isinstance(module, SpanBatchNorm) for module in model.modules())
    if has_norm and span is None:
        raise RecipeError(
            f"batch.bn_span: {name} has BatchNorm; state how many samples share statistics"
        )
    if not has_norm and span is not None:
        raise RecipeError(f"batch.bn_span: {name} has no BatchNorm; make it null")

"""The model of a recipe: built from its seed, checked before training, compiled if requested."""

from collections.abc import Collection

import torch
from torch import nn

from largebatch.errors import RecipeError, clip
from largebatch.models import affine_parameters, build, kernels
from largebatch.models.batchnorm import SpanBatchNorm, with_span
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.recipe import Recipe


def build_model(recipe: Recipe, device: torch.device) -> nn.Module:
    """Build the model on a device, in the recipe's precision; raises as `new_model`."""
    model = new_model(recipe).to(device)
    if recipe.execution.channels_last(device.type):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs
    if device.type in kernels.DEVICES:
        from largebatch.models.fusion import pair

        pair(model)
    return in_precision(model, recipe, device)


def new_model(recipe: Recipe) -> nn.Module:
    """Build the model on PyTorch's default device; its weights come from the recipe's seed.

    Raises RecipeError if `batch.bn_span` does not fit the model's BatchNorm, or if `polish.affine`
    finds no classifier.
    """
    torch.manual_seed(recipe.seed)
    model = _build(recipe, head_std=recipe.model.head_std)
    _set_span(model, recipe)
    if recipe.polish is not None and recipe.polish.affine is not None:
        try:
            affine_parameters(model)
        except ValueError as error:  # better now than after the whole schedule
            raise RecipeError(f"polish.affine: {error}") from None
    return model


def model_without_memory(recipe: Recipe) -> nn.Module:
    """Build the model on the meta device: its weights have names and shapes, and no numbers."""
    with torch.device("meta"):
        return _build(recipe, head_std=None)


def in_precision(model: nn.Module, recipe: Recipe, device: torch.device) -> nn.Module:
    """Make the model compute in the recipe's precision on this type of device; return it."""
    if recipe.precision != "fp32":
        dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float16
        model.forward = torch.autocast(device.type, dtype)(model.forward)
    return model


def prepare_training(model: nn.Module, recipe: Recipe, plan: Plan, device: torch.device) -> None:
    """Compile the model if the recipe requests it; raise RecipeError if it cannot be trained."""
    require_trainable(model, recipe)
    require_accepted(recipe, {piece.image_size for piece in plan.sizes})
    if recipe.execution.compile:
        from largebatch.models.compiled import compile_model

        shares_spans = plan.sync_workers > 1
        compile_model(model, recipe.execution.compile, device, shares_spans=shares_spans)


def require_trainable(model: nn.Module, recipe: Recipe) -> None:
    """Raise RecipeError if the model returns more than logits in training mode.

    GoogLeNet and Inception have auxiliary classifiers (arXiv:1409.4842, section 5), whose losses
    are not part of a recipe.
    """
    if getattr(model, "aux_logits", False):
        raise RecipeError(
            f"model.name: {recipe.model.name} has auxiliary classifiers, which are not trained "
            "here; build it without them by model.arguments.aux_logits: false. Of weights that "
            "have them, `largebatch polish` without --compare measures the statistics"
        )


def require_accepted(recipe: Recipe, image_sizes: Collection[int]) -> None:
    """Raise RecipeError unless the recipe's model takes images of these sizes.

    Only shapes are computed, which needs no memory and no arithmetic.
    """
    if not image_sizes:
        return
    with torch.device("meta"), torch.no_grad():
        model = model_without_memory(recipe).eval()
        for size in sorted(image_sizes):
            reason = _refusal(model, size, num_classes=recipe.data.classes)
            if reason:
                raise RecipeError(
                    f"data.resolution: {recipe.model.name} does not take images of {size} x {size} "
                    f"({reason}); leave that size out or choose another model"
                )


def _build(recipe: Recipe, *, head_std: float | None) -> nn.Module:
    section, classes = recipe.model, recipe.data.classes
    return build(section.name, num_classes=classes, arguments=section.arguments, head_std=head_std)


def _set_span(model: nn.Module, recipe: Recipe) -> None:
    span = recipe.batch.bn_span
    try:
        with_span(model, span or 1)
    except ValueError as error:
        raise RecipeError(f"model.name: {recipe.model.name}: {error}") from None
    has_norm = any(isinstance(module, SpanBatchNorm) for module in model.modules())
    if has_norm and span is None:
        raise RecipeError(
            f"batch.bn_span: {recipe.model.name} has BatchNorm; state how many samples share "
            "statistics"
        )
    if not has_norm and span is not None:
        raise RecipeError(f"batch.bn_span: {recipe.model.name} has no BatchNorm; make it null")


def _refusal(model: nn.Module, size: int, *, num_classes: int) -> str:
    """Return why a model does not take two images of this side; empty if it does."""
    try:
        found = model(torch.zeros(2, 3, size, size)).shape
    except Exception as error:  # a model of the user's own raises all kinds
        return clip(" ".join(str(error).split()), 200)
    if found == (2, num_classes):
        return ""
    return f"it makes {' x '.join(map(str, found))}, expected 2 x {num_classes}"

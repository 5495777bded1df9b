"""Recipe -> model and optimizer."""

from typing import assert_never

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from largebatch import recipe as recipes
from largebatch.contracts import Backend
from largebatch.errors import RecipeError
from largebatch.lars import LARS
from largebatch.models import build, param_groups
from largebatch.norm import SpanBatchNorm, with_span
from largebatch.recipe import Recipe


def build_model(recipe: Recipe, backend: Backend) -> nn.Module:
    """Build the model on the worker's device; every worker starts from the recipe's seed.

    Raises RecipeError where the model's BatchNorm and `batch.bn_span` do not fit each other.
    """
    section = recipe.model
    torch.manual_seed(recipe.seed)
    model = build(
        section.name,
        num_classes=recipe.data.classes,
        arguments=section.arguments,
        head_std=section.head_std,
    )
    _set_span(model, recipe)
    model.to(backend.device)
    if backend.device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs
    if recipe.precision == "bf16":
        model.forward = torch.autocast(backend.device.type, torch.bfloat16)(model.forward)
    for tensor in model.state_dict().values():
        backend.broadcast(tensor)
    return model


def build_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Build the optimizer; biases and normalisation layers are neither decayed nor adapted."""
    section, peak_lr = recipe.optimizer, recipe.schedule.peak_lr
    groups = param_groups(model, weight_decay=section.weight_decay)
    match section:
        case recipes.LARS():
            return LARS(
                groups,
                lr=peak_lr,
                momentum=section.momentum,
                eta=section.eta,
                eps=section.eps,
                convention=section.convention,
            )
        case recipes.SGD():
            for group in groups:
                del group["adapt"]
            return SGD(groups, lr=peak_lr, momentum=section.momentum, nesterov=section.nesterov)
        case _:
            assert_never(section)


def _set_span(model: nn.Module, recipe: Recipe) -> None:
    span = recipe.batch.bn_span
    try:
        with_span(model, span or 1)
    except ValueError as error:
        raise RecipeError(f"model.name: {recipe.model.name}: {error}") from None
    has_norm = any(isinstance(module, SpanBatchNorm) for module in model.modules())
    if has_norm and span is None:
        raise RecipeError(
            f"batch.bn_span: {recipe.model.name} has BatchNorm; say how many samples share "
            "statistics"
        )
    if not has_norm and span is not None:
        raise RecipeError(f"batch.bn_span: {recipe.model.name} has no BatchNorm; make it null")

"""Recipe and workers -> the reducer of the gradients, and their groups."""

from typing import assert_never

import torch
from torch import nn

from largebatch.distributed.backend import Backend
from largebatch.distributed.reducer import (
    Grouping,
    Reducer,
    by_bytes,
    constant,
    cubic,
    divide,
    quadratic,
)
from largebatch.models import norm_parameters
from largebatch.models.of_recipe import model_without_memory
from largebatch.recipe import execution
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.recipe import Recipe

_SENT_AS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHOWN = 8
"""Number of groups that are described."""


def build_reducer(
    recipe: Recipe,
    plan: Plan,
    model: nn.Module,
    backend: Backend,
    *,
    keeps_gradients: bool = False,
) -> Reducer:
    """Build the reducer, which sums or combines the gradients.

    `keeps_gradients`: an update's gradients are needed while the next ones are computed.
    """
    section, grouping = recipe.reduction, grouping_of(recipe.execution.groups)
    copies = copies_gradients(recipe, plan, backend.device, keeps_gradients=keeps_gradients)
    if section.parts is not None:
        parts, passes = section.parts, plan.accumulation
        from largebatch.distributed.adasum import Adasum

        return Adasum(
            model, backend, parts=parts, accumulation=passes, grouping=grouping, copies=copies
        )
    return Reducer(
        model.named_parameters(),
        backend,
        grouping=grouping,
        dtype=_SENT_AS[section.dtype],
        divisor=1.0,  # train() divides the loss by the global batch, so that sums are means
        exact=kept_exact(recipe, model),
        measure="noise_scale" in recipe.monitor,
        copies=copies,
    )


def copies_gradients(
    recipe: Recipe, plan: Plan, device: torch.device, *, keeps_gradients: bool = False
) -> bool:
    """Return True if a compiled pass may overwrite gradients that are still needed."""
    accumulates = any(passes > 1 for *_, passes in plan.within(range(plan.updates)))
    needed = accumulates or keeps_gradients
    has_graphs = recipe.execution.compile in {"reduce-overhead", "max-autotune"}
    return needed and has_graphs and device.type != "cpu"


def describe_groups(recipe: Recipe) -> str:
    """Describe the gradient groups."""
    section = recipe.reduction
    model = model_without_memory(recipe)
    exact, grouping = kept_exact(recipe, model), grouping_of(recipe.execution.groups)
    groups = divide(model.named_parameters(), grouping=grouping, exact=exact)
    width = 4 if section.dtype == "fp32" else 2
    sizes = []
    for group in groups:
        kept = bool(exact) and group[0][1] in exact
        size = sum(weight.numel() for _, weight in group) * (4 if kept else width) / 1e6
        sizes.append(f"{len(group)} ({size:.3g} MB)" + (" of normalisation in fp32" * kept))
    kind = recipe.execution.groups.kind
    how = f"Adasum of {section.parts} parts, " if section.parts else ""
    return f"{how}{kind}, in {section.dtype}; tensors: {', '.join(_shorten(sizes))}"


def _shorten(words: list[str]) -> list[str]:
    """Replace the middle of a long list by its length."""
    if len(words) <= _SHOWN:
        return words
    return [*words[: _SHOWN - 2], f"... {len(words) - _SHOWN + 1} more ...", words[-1]]


def kept_exact(recipe: Recipe, model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters whose gradients are always sent in fp32."""
    return set() if recipe.reduction.dtype == "fp32" else norm_parameters(model)


def grouping_of(section: execution.Groups) -> Grouping:
    """Return how gradients are divided into groups."""
    match section:
        case execution.CubicGroups():
            return cubic
        case execution.QuadraticGroups():
            return quadratic
        case execution.ConstantGroups():
            return constant(section.tensors)
        case execution.GroupsByBytes():
            return by_bytes(section.megabytes * 1e6)
        case _:
            assert_never(section)

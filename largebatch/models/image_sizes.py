"""Checks that a model accepts the recipe's image sizes or windows of words, before a run starts.

Only shapes are computed (on the meta device), which needs no memory and no arithmetic.
"""

from collections.abc import Collection, Sequence

import torch
from torch import nn

from largebatch.errors import RecipeError, clip
from largebatch.models import build
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.text import LANGUAGE_MODEL, Text


def require_inputs(recipe: Recipe, sizes: Collection[int]) -> None:
    """Raise RecipeError unless the recipe's model accepts its text, or images of these sizes."""
    if isinstance(recipe.data, Text):
        require_words(recipe)
    else:
        require_image_sizes(recipe, sizes)


def require_image_sizes(recipe: Recipe, sizes: Collection[int]) -> None:
    """Raise RecipeError unless the recipe's model accepts images of all these sizes."""
    if not sizes:
        return
    with torch.device("meta"), torch.no_grad():
        model = _build(recipe)
        for size in sorted(sizes):
            try:
                model(torch.empty(2, 3, size, size))
            except (RuntimeError, AssertionError, ValueError) as error:
                reason = clip(" ".join(str(error).split()), 200)
                raise RecipeError(
                    f"data.resolution: {recipe.model.name} does not take images of {size} x {size} "
                    f"({reason}); remove that size or choose another model"
                ) from None


def require_words(recipe: Recipe) -> None:
    """Raise RecipeError unless the recipe's model returns scores for every word of a window."""
    assert isinstance(recipe.data, Text)
    shape = (2, recipe.data.window)
    with torch.device("meta"), torch.no_grad():
        try:
            output = _shown(_build(recipe)(torch.zeros(shape, dtype=torch.int64)).shape)
        except (RuntimeError, AssertionError, TypeError, ValueError, IndexError) as error:
            output = clip(" ".join(str(error).split()), 200)
    if output != _shown((*shape, recipe.data.vocabulary)):
        raise RecipeError(
            f"model.name: {recipe.model.name} does not take the words of data.source: text: it "
            f"maps {_shown(shape)} to {output}, expected one score for every word; use "
            f"{LANGUAGE_MODEL}"
        )


def _shown(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _build(recipe: Recipe) -> nn.Module:
    return build(
        recipe.model.name,
        num_classes=recipe.data.classes,
        arguments=recipe.model.arguments,
        head_std=None,
    ).eval()

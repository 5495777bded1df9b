"""Whether a model takes images of a size, or windows of words, found before a run begins.

Shapes alone are computed: that takes no memory and no arithmetic.
"""

from collections.abc import Collection, Sequence

import torch
from torch import nn

from largebatch.errors import RecipeError, clip
from largebatch.models import build
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.text import LANGUAGE_MODEL, Text


def require_inputs(recipe: Recipe, sizes: Collection[int]) -> None:
    """Raise RecipeError where the recipe's model takes no words, or no images of these sizes."""
    if isinstance(recipe.data, Text):
        require_words(recipe)
    else:
        require_image_sizes(recipe, sizes)


def require_image_sizes(recipe: Recipe, sizes: Collection[int]) -> None:
    """Raise RecipeError where the recipe's model takes no images of one of these sizes."""
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
                    f"({reason}); leave that size out or choose another model"
                ) from None


def require_words(recipe: Recipe) -> None:
    """Raise RecipeError unless the recipe's model gives every word of a window its scores."""
    assert isinstance(recipe.data, Text)
    shape = (2, recipe.data.window)
    with torch.device("meta"), torch.no_grad():
        try:
            found = _shown(_build(recipe)(torch.zeros(shape, dtype=torch.int64)).shape)
        except (RuntimeError, AssertionError, TypeError, ValueError, IndexError) as error:
            found = clip(" ".join(str(error).split()), 200)
    if found != _shown((*shape, recipe.data.vocabulary)):
        raise RecipeError(
            f"model.name: {recipe.model.name} does not take words, as data.source: text has them: "
            f"of {_shown(shape)} it makes {found}, expected one score for every word; "
            f"{LANGUAGE_MODEL} does"
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

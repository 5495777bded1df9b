"""Whether a model takes images of a size: many do of any, others are built for one."""

from collections.abc import Collection

import torch

from largebatch.errors import RecipeError, clip
from largebatch.models import build
from largebatch.recipe.recipe import Recipe


def require_image_sizes(recipe: Recipe, sizes: Collection[int]) -> None:
    """Raise RecipeError where the recipe's model takes no images of one of these sizes.

    Shapes alone are computed: that takes no memory and no arithmetic.
    """
    if not sizes:
        return
    with torch.device("meta"), torch.no_grad():
        model = build(
            recipe.model.name,
            num_classes=recipe.data.classes,
            arguments=recipe.model.arguments,
            head_std=None,
        ).eval()
        for size in sorted(sizes):
            try:
                model(torch.empty(2, 3, size, size))
            except (RuntimeError, AssertionError, ValueError) as error:
                reason = clip(" ".join(str(error).split()), 200)
                raise RecipeError(
                    f"data.resolution: {recipe.model.name} does not take images of {size} x {size} "
                    f"({reason}); leave that size out or choose another model"
                ) from None

"""Whether a model takes the samples of a recipe, found before a run begins.

Shapes alone are computed: that takes no memory and no arithmetic.
"""

from collections.abc import Collection, Sequence

import torch
from torch import nn

from largebatch.errors import RecipeError, clip
from largebatch.models import build
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.task import Sample


def require_accepted(recipe: Recipe, image_sizes: Collection[int] = ()) -> None:
    """Raise RecipeError unless the recipe's model gives every label of a sample its scores.

    Images are tried in `image_sizes`. Samples with one label are not tried in their usual size.
    """
    if image_sizes:
        samples = [recipe.data.sample(size) for size in sorted(image_sizes)]
        key, advice = "data.resolution", "leave that size out or choose another model"
    elif recipe.data.sample().labels:
        samples, key, advice = [recipe.data.sample()], "model.name", "choose another model"
    else:
        return
    section = recipe.model
    with torch.device("meta"), torch.no_grad():
        model = build(
            section.name,
            num_classes=recipe.data.classes,
            arguments=section.arguments,
            head_std=None,
        ).eval()
        for sample in samples:
            reason = _refusal(model, sample, num_classes=recipe.data.classes)
            if reason:
                raise RecipeError(
                    f"{key}: {section.name} does not take {sample.name} ({reason}); {advice}"
                )


def _refusal(model: nn.Module, sample: Sample, *, num_classes: int) -> str:
    """Return why a model does not take two such samples; empty if it does."""
    expected = (2, *sample.labels, num_classes)
    dtype = torch.float32 if sample.limit is None else torch.int64
    try:
        found = model(torch.zeros((2, *sample.shape), dtype=dtype)).shape
    except Exception as error:  # a model of the user's own raises all kinds
        return clip(" ".join(str(error).split()), 200)
    return "" if found == expected else f"it makes {_shown(found)}, expected {_shown(expected)}"


def _shown(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))

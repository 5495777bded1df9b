"""The model that a recipe configures."""

import pytest
import torch
from short_runs import SMALL

from largebatch import load_recipe
from largebatch.models.of_recipe import build_model

NINE_LAYERS = ("model.name=cifar_resnet9", "model.arguments={width: 4}", *SMALL)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("null", torch.contiguous_format), ("channels_last", torch.channels_last)],
)
def test_a_cpu_takes_the_usual_order_unless_the_recipe_has_another(
    setting: str, expected: torch.memory_format
) -> None:
    recipe = load_recipe("digits_96", [*NINE_LAYERS, f"execution.memory_format={setting}"])
    model = build_model(recipe, torch.device("cpu"))
    kernels = [weight for weight in model.parameters() if weight.shape[2:] == (3, 3)]
    assert len(kernels) == 8
    assert all(kernel.is_contiguous(memory_format=expected) for kernel in kernels)

"""The model that a recipe configures."""

import copy

import pytest
import torch
from short_runs import SMALL

from largebatch import load_recipe
from largebatch.models.of_recipe import build_model

CPU = torch.device("cpu")
NINE_LAYERS = ("model.name=cifar_resnet9", "model.arguments={width: 4}", *SMALL)


def test_a_copy_of_a_model_in_bf16_computes_with_its_own_weights() -> None:
    """The forward pass in the recipe's precision belongs to the class, not to the original."""
    model = build_model(load_recipe("digits_96", [*NINE_LAYERS, "precision=bf16"]), CPU).eval()
    images = torch.rand(2, 3, 16, 16)
    assert model(images).dtype == torch.bfloat16
    twin = copy.deepcopy(model)
    assert torch.equal(twin(images), model(images))
    for weight in twin.parameters():
        weight.data.zero_()
    assert not twin(images).any()
    assert model(images).any()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("null", torch.contiguous_format), ("channels_last", torch.channels_last)],
)
def test_a_cpu_takes_the_usual_order_unless_the_recipe_has_another(
    setting: str, expected: torch.memory_format
) -> None:
    recipe = load_recipe("digits_96", [*NINE_LAYERS, f"execution.memory_format={setting}"])
    model = build_model(recipe, CPU)
    kernels = [weight for weight in model.parameters() if weight.shape[2:] == (3, 3)]
    assert len(kernels) == 8
    assert all(kernel.is_contiguous(memory_format=expected) for kernel in kernels)

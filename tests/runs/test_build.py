"""The model that a recipe configures."""

from pathlib import Path

import pytest
import torch
from short_runs import SMALL
from torch import Tensor

from largebatch import load_recipe, run
from largebatch.models.of_recipe import build_model
from largebatch.training.checkpoint import load_checkpoint

NINE_LAYERS = ("model.name=cifar_resnet9", "model.arguments={width: 4}", *SMALL)


def trained(out: Path, memory_format: str) -> dict[str, Tensor]:
    """Return the weights after three updates."""
    recipe = load_recipe("digits_96", [*NINE_LAYERS, f"execution.memory_format={memory_format}"])
    run(recipe, out=out, max_steps=3)
    newest = max((out / "checkpoints").iterdir())
    weights: dict[str, Tensor] = load_checkpoint(newest).state["model"]
    return weights


def test_the_memory_format_changes_the_order_in_memory_and_no_weight(tmp_path: Path) -> None:
    plain, last = (trained(tmp_path / each, each) for each in ("contiguous", "channels_last"))
    torch.testing.assert_close(last, plain, rtol=1e-4, atol=1e-5)


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

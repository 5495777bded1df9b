"""Runs on the digits that are a few updates long, and what they leave."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from largebatch import load_recipe
from largebatch.optional import require_torchvision
from largebatch.recipe.recipe import Recipe
from largebatch.training.checkpoint import load_checkpoint

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
CLEAN = "clean: {steps: 2}"
AFFINE = "affine: {steps: 3, lr: 0.05}"
STATISTICS = "statistics: {samples: 480}"
JUDGED = "keep: better, held_out: 200"
LEARNED = ("duration={steps: 40}", "schedule.warmup={steps: 10}")
"""Forty updates learn something."""
BROAD = "model.arguments.channels=[16, 32, 64, 128]"
"""As the recipe has them; NARROW nets learn less in a few updates."""
NARROW = "model.arguments.channels=[8, 8, 16, 16]"
SHALLOW = "model.arguments.layers=[1, 1, 1, 1]"
"""Half of its blocks: in so small a net the number of operations takes the time."""
HALF = (*("precision=fp16", "batch.global_batch=48", "data.image_size=16"), NARROW)
"""Arithmetic that is slow on processors, and so little of it."""
SMALL = ("data.image_size=16", "execution.cache=memory")
"""A run in a third of the time."""

BEFORE = 8
"""Updates of the schedule, else."""


def a_recipe(*polish: str, changes: tuple[str, ...] = ()) -> Recipe:
    """Return the digits' recipe with a short schedule and these stages."""
    return load_recipe(
        DIGITS,
        [
            *(f"duration={{steps: {BEFORE}}}", "schedule.warmup={steps: 2}", "evaluation={}"),
            *("model.arguments.drop_rate=0.3", NARROW, SHALLOW),
            f"polish={{{', '.join(polish)}}}",
            *(*SMALL, *changes),
        ],
    )


def timms(recipe: Recipe) -> nn.Module:
    """Return the recipe's model, built by timm alone."""
    require_torchvision()
    import timm

    arguments: Any = recipe.model.arguments
    model: nn.Module = timm.create_model("resnet18", num_classes=10, **arguments)
    return model


def content(folder: Path) -> dict[str, Any]:
    """Return the newest checkpoint of a run."""
    return load_checkpoint(max((folder / "checkpoints").iterdir())).state


def weights(folder: Path) -> dict[str, Tensor]:
    """Return the model in it."""
    state: dict[str, Tensor] = content(folder)["model"]
    return state


def log(folder: Path, event: str) -> list[dict[str, Any]]:
    """Return the records of a kind."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]

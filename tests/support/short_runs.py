"""Runs on the digits that are a few updates long, and what they leave."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from largebatch import load_recipe, run
from largebatch.optional import require_torchvision
from largebatch.recipe.recipe import Recipe
from largebatch.training.checkpoint import load_checkpoint

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
CLEAN = "clean: {steps: 2}"
AFFINE = "affine: {steps: 3, lr: 0.05}"
STATISTICS = "statistics: {samples: 480}"
EMA = "ema: 0.5"
SWA = "swa: {over: {steps: 4}, every: {steps: 2}}"
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

MUON = ("optimizer={kind: muon}", "schedule.peak_lr=0.01")

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


def plan_of_a_log() -> Any:  # noqa: ANN401 -- in place of a Plan
    """Return what a log reads of a plan: 99 updates of 8 images, ten of which are an epoch."""
    return SimpleNamespace(
        batch_at=lambda _: 8,
        epoch=lambda step: step / 10,
        updates=99,
        steps=99,
        train_steps=99,
        mix_steps=0,
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


def summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a run."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


TIMES = re.compile("second|gpu|cpu|bytes|time|capturable")
"""What is measured of the machine, or depends on it."""


def leaves(value: object, name: str = "") -> dict[str, Any]:
    """Return every tensor and number of a checkpoint by its path, but for seconds."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)  # type: ignore[assignment]  # pairs, too
    else:
        return {name: value}
    found: dict[str, Any] = {}
    for key, part in items:
        if not TIMES.search(str(key)):
            found |= leaves(part, f"{name}/{key}")
    return found


def apart(one: Path, other: Path, most: float) -> dict[str, float]:
    """Return by how much more than this part two runs differ, in anything they saved or logged.

    A deviation of confidences is a difference of these, and rounded as they are.
    """
    ours = leaves(content(one))
    theirs = leaves(content(other))
    for event in ("step", "evaluation"):
        ours |= leaves(log(one, event), event)
        theirs |= leaves(log(other, event), event)
    assert ours.keys() == theirs.keys()
    found = {
        name: distance(value, theirs[name])
        for name, value in ours.items()
        if not isinstance(value, str | None)
    }
    parts = {name: most / 10 if name.endswith("/loss") else most for name in found}
    for name in (it for it in found if it.endswith("confidence_deviation")):
        confidence = theirs[f"{name.rpartition('/')[0]}/average_confidence"]
        found[name] *= abs(float(theirs[name] / confidence))
    return {name: value for name, value in found.items() if not value <= parts[name]}


def distance(ours: Tensor | float, theirs: Tensor | float) -> float:
    """Return how far apart two values are, as a part of the largest."""
    one, other = (torch.as_tensor(value).double() for value in (ours, theirs))
    unknown = one.isnan() & other.isnan()  # such as a number that only some recipes have
    one, other = one.masked_fill(unknown, 0), other.masked_fill(unknown, 0)
    scale = one.abs().max().clamp(min=1e-3) if one.numel() else 1
    return float((one - other).abs().max() / scale) if one.numel() else 0.0


WHOLE = {
    "EMA, clean, affine": (
        ("clean: {steps: 4}", "affine: {steps: 4, lr: 0.05}", STATISTICS, EMA),
        (*MUON, "evaluation.every_epochs=0.2", "model.arguments.drop_path_rate=0.2"),
        BEFORE - 1,
    ),
    "SWA, sizes, batches, mixed images": (
        (SWA, STATISTICS),
        (
            "duration={steps: 12}",
            "data.resolution=[{until: {steps: 4}, image_size: 12}]",
            "data.mix={mixup: 0.4, cutmix: 1, until: {steps: 6}}",
            "batch.schedule=[{after: {steps: 8}, global_batch: 192, lr_factor: 1}]",
        ),
        11,
    ),
}
"""Stages, changes, and updates before the run is stopped, of which the last one is replayed."""


def with_and_without_graphs(case: str, folder: Path) -> None:
    """Train without graphs, and with them in two parts."""
    stages, changes, stop = WHOLE[case]
    eager = a_recipe(*stages, changes=(*changes, "execution.graph=false"))
    run(eager, out=folder / "eager")
    recipe = a_recipe(*stages, changes=changes)
    run(recipe, out=folder / "parts", max_steps=stop)
    run(recipe, out=folder / "parts", resume=True)

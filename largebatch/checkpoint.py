"""Checkpoints: everything a run needs to go on, written whole or not at all.

A file holds the weights, BatchNorm statistics, the optimizer, the loss scale, how many updates were
made, the recipe and what was measured so far. The sample order, crops, dropout and rates are
functions of the step, so nothing else has a state. A file appears under its name only when it is
complete; the newest one that can be read is loaded, so a run survives being killed while it saves.
"""

import io
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from largebatch.errors import CheckpointError, RecipeError
from largebatch.recipe.loading import dump_recipe, parse_recipe
from largebatch.recipe.recipe import Recipe

FORMAT = 2
KEEP = 2
"""How many checkpoints of a run stay on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state of a run between two updates."""

    recipe: Recipe
    step: int
    """Updates of the plan that lie behind."""

    seconds: float
    """Time the run has taken so far, over all its parts."""

    images: int
    train_seconds: float
    """Training samples seen, and the time that took."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any] = field(default_factory=dict)
    """Of the loss, in fp16; empty otherwise."""

    skipped: int = 0
    """Updates whose gradients overflowed."""

    given_up: int = 0
    """Those of `step` that were never made, because the stage they belong to diverged."""

    stages: list[dict[str, Any]] = field(default_factory=list)
    """The stages that have ended, as in summary.json."""

    average: dict[str, Any] = field(default_factory=dict)
    """The moving average, until it becomes the model; empty where there is none."""

    before: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The state in which the stage under way began, where it may have to come back."""


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `folder/step-<step>.pt` atomically, then delete all but the newest few."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{checkpoint.step:08d}.pt"
    partial = path.with_suffix(f".partial-{os.getpid()}")
    content = {entry.name: getattr(checkpoint, entry.name) for entry in fields(checkpoint)}
    content.update(format=FORMAT, recipe=dump_recipe(checkpoint.recipe))
    try:
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    for old in sorted(folder.glob("step-*.pt"))[:-KEEP]:
        old.unlink()
    return path


def load(path: Path) -> Checkpoint:
    """Read one checkpoint, to the CPU. Raises CheckpointError saying what is wrong with it."""
    return loads(_read(path), source=str(path))


def loads(data: bytes, *, source: str) -> Checkpoint:
    """Read a checkpoint from the bytes of its file; `source` begins every message."""
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(f"{source}: not a readable checkpoint: {reason}") from None
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise CheckpointError(f"{source}: not a checkpoint of this version of largebatch")
    try:
        recipe = parse_recipe(content.pop("recipe"), source="its recipe")
        return Checkpoint(recipe=recipe, **content)
    except (KeyError, TypeError, RecipeError) as error:
        raise CheckpointError(f"{source}: not a complete checkpoint: {error}") from None


def newest(folder: Path) -> bytes | None:
    """Return the bytes of the newest checkpoint that can be read, or None where there is none.

    Raises CheckpointError if there are some and none of them can be read.
    """
    problems = []
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        try:
            content = _read(path)
            loads(content, source=str(path))
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return content
    if problems:
        raise CheckpointError("\n".join(problems))
    return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such checkpoint or run folder") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the checkpoint: {error.strerror}") from None

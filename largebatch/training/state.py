"""The objects of one run on one worker, and checkpoints: everything a run needs to go on.

A checkpoint is written whole or not at all. It holds the weights, BatchNorm statistics, the
optimizer, the loss scale, how many updates were made, the recipe and what was measured so far. The
sample order, crops, dropout and rates are functions of the step, so nothing else has a state. A
file appears under its name only when it is complete; the newest one that can be read is loaded, so
a run survives being killed while it saves.
"""

import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from largebatch.data.pipeline import Pipeline
from largebatch.distributed.backend import Backend
from largebatch.distributed.reducer import Reducer
from largebatch.errors import CheckpointError, RecipeError
from largebatch.models.batchnorm import Spans
from largebatch.recipe.loading import dump_recipe, parse_recipe
from largebatch.recipe.plan import Plan
from largebatch.recipe.recipe import Recipe
from largebatch.schedules.functions import Schedule
from largebatch.training.ema import Average
from largebatch.training.loss import Criterion
from largebatch.training.step_log import Emit, StepLog

Means = tuple[Optimizer, Schedule, Reducer]
"""What makes updates: of these weights, at this rate of each step, from these sums."""

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


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
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


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint, to the CPU. Raises CheckpointError saying what is wrong with it."""
    return parse_checkpoint(_read(path), source=str(path))


def parse_checkpoint(data: bytes, *, source: str) -> Checkpoint:
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


def newest_checkpoint(folder: Path) -> bytes | None:
    """Return the bytes of the newest checkpoint that can be read, or None where there is none.

    Raises CheckpointError if there are some and none of them can be read.
    """
    problems = []
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        try:
            content = _read(path)
            parse_checkpoint(content, source=str(path))
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


@dataclass(kw_only=True)
class Session:
    """The objects of one run on one worker, and how far it has come."""

    recipe: Recipe
    plan: Plan
    backend: Backend
    pipeline: Pipeline
    model: nn.Module
    optimizer: Optimizer
    criterion: Criterion
    schedule: Schedule
    reducer: Reducer
    build_affine: Callable[[], Means]
    """Freezes what the affine stage leaves alone and returns what updates the rest."""

    average: Average | None
    """None if the recipe wants none, and when it has become the model."""

    spans: Spans
    scaler: GradScaler
    emit: Emit
    log: StepLog
    checkpoints: Path
    step: int = 0
    """Updates of the plan that lie behind; the sample order and the rates count with it."""

    given_up: int = 0
    """Those of them that were never made, because the stage they belong to diverged."""

    stages: list[dict[str, Any]] = field(default_factory=list)
    """The stages that have ended, as in summary.json."""

    before: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The state in which the stage under way began, where it may have to come back."""

    seconds_before: float = 0.0
    """What earlier parts of a resumed run took."""

    begun: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Time the run has taken so far."""
        return self.seconds_before + time.perf_counter() - self.begun

    @property
    def made(self) -> int:
        """Optimizer updates made."""
        return self.step - self.given_up

    @property
    def judged(self) -> bool:
        """Whether stages are undone that do not help."""
        polish = self.recipe.polish
        return polish is not None and polish.keep == "better"

    @property
    def last_kept(self) -> dict[str, Any] | None:
        """The stage that left the model as it is."""
        kept = [stage for stage in self.stages if stage["kept"]]
        return kept[-1] if kept else None

    def restore(self, state: Checkpoint) -> None:
        """Go on where a checkpoint stopped."""
        self.model.load_state_dict(state.model)
        if state.step > self.plan.steps:
            self.use(self.build_affine())
        self.optimizer.load_state_dict(state.optimizer)
        self.scaler.load_state_dict(state.scaler)
        if self.average is not None and state.average:
            self.average.load_state_dict(state.average)
        else:
            self.average = None  # it has become the model
        self.before = state.before
        self.step, self.given_up, self.stages = state.step, state.given_up, state.stages
        self.seconds_before = state.seconds
        self.log.images, self.log.seconds = state.images, state.train_seconds
        self.log.skipped = state.skipped

    def use(self, means: Means) -> None:
        """Make the updates that follow by other means."""
        self.reducer.close()  # its hooks would claim the same gradients
        self.optimizer, self.schedule, self.reducer = means

    def remember(self) -> None:
        """Keep the state as it is now, if a stage that begins here may be undone."""
        if self.judged and self.stages and not self.before:  # the first stage is not undone
            average = self.average.state_dict() if self.average is not None else {}
            self.before = {
                "model": _copy(self.model.state_dict()),
                "average": _copy(average),
                "scaler": self.scaler.state_dict(),
            }

    def go_back(self) -> None:
        """Return to the state in which the stage began.

        The optimizer goes on as it is: every stage that may follow has its own, or none.
        """
        self.model.load_state_dict(self.before["model"])
        if self.average is not None:
            self.average.load_state_dict(self.before["average"])
        self.scaler.load_state_dict(self.before["scaler"])

    def save(self) -> None:
        """Write a checkpoint; worker 0 only."""
        if self.backend.rank != 0:
            return
        save_checkpoint(
            self.checkpoints,
            Checkpoint(
                recipe=self.recipe,
                step=self.step,
                seconds=self.seconds,
                images=self.log.images,
                train_seconds=self.log.seconds,
                model=self.model.state_dict(),
                optimizer=self.optimizer.state_dict(),
                scaler=self.scaler.state_dict(),
                skipped=self.log.skipped,
                given_up=self.given_up,
                stages=self.stages,
                average=self.average.state_dict() if self.average is not None else {},
                before=self.before,
            ),
        )


def _copy(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}

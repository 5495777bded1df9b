"""What changes while a run trains, and checkpoints, which hold just that.

The sample order, crops, dropout and learning rates are functions of the step, so nothing else has a
state. A checkpoint is written whole or not at all: its file appears under its name only when it is
complete, and the newest one that can be read is loaded, so a run survives being killed while it
saves.
"""

import io
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from pydantic import TypeAdapter
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from largebatch.distributed.reducer import Reducer
from largebatch.errors import CheckpointError, RecipeError
from largebatch.recipe.loading import dump_recipe, parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.schedules.functions import Schedule
from largebatch.storage import whole_file
from largebatch.tracking.events import StageResult
from largebatch.training.ema import EMA

FORMAT = 3
KEEP = 2
"""How many checkpoints of a run stay on disk."""

_STAGES = TypeAdapter(list[StageResult])


class Updater(NamedTuple):
    """What makes updates: of these weights, at this learning rate, from these gradients."""

    optimizer: Optimizer
    schedule: Schedule
    reducer: Reducer


@dataclass(slots=True)
class Progress:
    """How far a run has come; every field is in the checkpoint."""

    step: int = 0
    """Updates of the plan that lie behind; the sample order and the learning rates count so."""

    discarded: int = 0
    """Those of them that were never made, because the stage they belong to diverged."""

    skipped: int = 0
    """Those whose gradients overflowed in fp16."""

    images: int = 0
    train_seconds: float = 0.0
    """Training samples seen, and the time that took."""

    seconds: float = 0.0
    """What the run has taken, over all its parts, up to the last checkpoint."""

    @property
    def updates(self) -> int:
        """Optimizer updates made."""
        return self.step - self.discarded

    def count(self, step: int, *, images: int, seconds: float, skipped: bool) -> None:
        """Count the update of a step."""
        self.step = step + 1
        self.images += images
        self.train_seconds += seconds
        self.skipped += skipped

    def discard_until(self, step: int) -> None:
        """Pass over the updates before `step`, which will never be made."""
        self.discarded += step - self.step
        self.step = step


@dataclass(kw_only=True)
class TrainState:
    """Everything that changes while a run trains; saves and loads itself.

    A new field goes into `state_dict` and `load_state_dict`; a test resumes a run and compares
    every field there is.
    """

    model: nn.Module
    updater: Updater
    scaler: GradScaler
    ema: EMA | None
    """None if the recipe wants none, and when it has become the model."""

    progress: Progress = field(default_factory=Progress)
    stages: list[StageResult] = field(default_factory=list)
    """The stages that have ended."""

    weights_sha256: str | None = None
    """Of the file that training began with; None: the weights were drawn from the seed."""

    snapshot: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The state in which the stage under way began, where it may be rolled back; else empty."""

    _begun: float = field(default_factory=time.perf_counter, init=False)

    @property
    def seconds(self) -> float:
        """Time the run has taken so far, over all its parts."""
        return self.progress.seconds + time.perf_counter() - self._begun

    @property
    def last_kept(self) -> StageResult | None:
        """The stage that left the model as it is."""
        return next((stage for stage in reversed(self.stages) if stage.kept), None)

    def use(self, updater: Updater) -> None:
        """Make the updates that follow by another updater."""
        self.updater.reducer.close()  # its hooks would claim the same gradients
        self.updater = updater

    def take_snapshot(self) -> None:
        """Note the state as it is, for a stage that may be rolled back; once a stage."""
        if not self.snapshot:
            ema = self.ema.state_dict() if self.ema is not None else {}
            self.snapshot = {
                "model": _copy(self.model.state_dict()),
                "ema": _copy(ema),
                "scaler": self.scaler.state_dict(),
            }

    def roll_back(self) -> None:
        """Return to the snapshot.

        The optimizer goes on as it is: every stage that may follow has its own, or none.
        """
        self.model.load_state_dict(self.snapshot["model"])
        if self.ema is not None:
            self.ema.load_state_dict(self.snapshot["ema"])
        self.scaler.load_state_dict(self.snapshot["scaler"])

    def end_stage(self, result: StageResult) -> None:
        """Add the result of a stage, which can be rolled back no more."""
        self.stages.append(result)
        self.snapshot = {}

    def store_ema(self) -> None:
        """Let the EMA become the model."""
        assert self.ema is not None
        self.ema.store()
        self.ema = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything as tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.updater.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.state_dict() if self.ema is not None else {},
            "progress": {**asdict(self.progress), "seconds": self.seconds},
            "stages": [asdict(stage) for stage in self.stages],
            "weights_sha256": self.weights_sha256,
            "snapshot": self.snapshot,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint stopped; the updater is already that of its stage."""
        self.model.load_state_dict(state["model"])
        self.updater.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.ema is not None and state["ema"]:
            self.ema.load_state_dict(state["ema"])
        else:
            self.ema = None  # it has become the model
        self.progress = Progress(**state["progress"])
        self.stages = _STAGES.validate_python(state["stages"])
        self.weights_sha256 = state.get("weights_sha256")  # older checkpoints have none
        self.snapshot = state["snapshot"]
        self._begun = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A recipe and the state of its run between two updates."""

    recipe: Recipe
    progress: Progress
    stages: list[StageResult]
    """Those that had ended."""

    state: dict[str, Any]
    """All of it, as TrainState.state_dict."""

    @classmethod
    def of(cls, recipe: Recipe, state: dict[str, Any]) -> Self:
        """Take a state; raise KeyError, TypeError or ValueError where it is not whole."""
        for key in ("model", "optimizer", "scaler", "ema", "snapshot"):
            if not isinstance(state[key], dict):
                raise TypeError(f"{key} is no mapping")
        stages = _STAGES.validate_python(state["stages"])
        return cls(recipe, Progress(**state["progress"]), stages, state)


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `folder/step-<step>.pt` whole or not at all, then delete all but the newest few."""
    path = folder / f"step-{checkpoint.progress.step:08d}.pt"
    content = {"format": FORMAT, "recipe": dump_recipe(checkpoint.recipe), **checkpoint.state}
    with whole_file(path) as file:
        torch.save(content, file)
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
        return Checkpoint.of(recipe, content)
    except (KeyError, TypeError, ValueError, RecipeError) as error:
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


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in state.items()}

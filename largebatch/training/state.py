"""The state of a run, as a checkpoint holds it.

The sample order, crops, dropout and learning rates are functions of the step, so nothing else has a
state.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from largebatch.distributed.reducer import Reducer
from largebatch.schedules.functions import Schedule
from largebatch.tracking.events import StageResult
from largebatch.training.averages import EMA, SWA
from largebatch.training.evaluation import Metrics

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_COUNTED = ("step", "k", "weight_sum", "lr_max", "scheduled_lr", "train_mode")
"""Counters in the parameter groups of optimizers: timm's Lamb, Shampoo, Schedule-Free."""


class Updater(NamedTuple):
    """The optimizer, schedule and reducer that make the updates of a stage."""

    optimizer: Optimizer
    schedule: Schedule
    reducer: Reducer


@dataclass(slots=True)
class Progress:
    """The progress of a run; every field is in the checkpoint."""

    step: Count = 0
    """Number of updates of the plan done; the sample order and the learning rates follow it."""

    discarded: Count = 0
    """Number of updates in `step` that were never made, because their stage diverged."""

    skipped: Count = 0
    """Number of updates that changed nothing, because gradients were not finite."""

    images: Count = 0
    train_seconds: Seconds = 0.0
    """Training samples seen, and the seconds of training on them."""

    seconds: Seconds = 0.0
    """Seconds of the run, over all its parts, up to the last checkpoint."""

    best: float | None = None
    best_step: Count | None = None
    """Top-1 of the best evaluation, and the number of updates before it."""

    @property
    def updates(self) -> int:
        """Number of optimizer updates made."""
        return self.step - self.discarded

    def note(self, metrics: Metrics) -> None:
        """Record an evaluation of the current state."""
        if self.best is None or metrics.top1 > self.best:
            self.best = metrics.top1
            self.best_step = self.step

    def discard_until(self, step: int) -> None:
        """Count the updates before `step` as discarded."""
        self.discarded += step - self.step
        self.step = step


@dataclass(kw_only=True)
class TrainState:
    """Everything that changes while a run trains; saves and loads itself.

    A new field goes into `state_dict` and `load_state_dict`.
    """

    model: nn.Module
    updater: Updater
    scaler: GradScaler
    average: EMA | SWA | None
    """EMA or SWA; None without one, and after it was copied into the model. Checkpoints store
    either as `ema`."""

    progress: Progress = field(default_factory=Progress)
    stages: list[StageResult] = field(default_factory=list)
    """Results of the stages that have ended."""

    weights_sha256: str | None = None
    """SHA-256 of the file with the initial weights; None if they were drawn from the seed."""

    snapshot: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State at the start of the current stage, if it may be rolled back; else empty."""

    build_affine: Callable[[], Updater] | None = None
    """Freezes the weights that the affine stage does not train; returns the updater of the rest."""

    _begun: float = field(default_factory=time.perf_counter, init=False)

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, over all its parts."""
        return self.progress.seconds + time.perf_counter() - self._begun

    @property
    def last_kept(self) -> StageResult | None:
        """Result of the stage that produced the current model."""
        return next((stage for stage in reversed(self.stages) if stage.kept), None)

    def close(self) -> None:
        """Remove the hooks of the reducer of the last stage."""
        self.updater.reducer.close()

    def begin_affine(self) -> None:
        """Use the updater of the affine stage from now on."""
        assert self.build_affine is not None
        self.updater.reducer.close()  # its hooks would claim the same gradients
        self.updater = self.build_affine()

    def move_average(self, skipped: Tensor | None) -> None:
        """Move the average in an update, unless `skipped` is true on the device.

        If so, call `count_skipped` before the next `count`.
        """
        if self.average is not None:
            self.average.move(skipped)

    def count(self, step: int, *, images: int, seconds: float) -> None:
        """Count the update of a step on the host, in which the average was moved."""
        self.progress.step = step + 1
        self.progress.images += images
        self.progress.train_seconds += seconds
        if self.average is not None:
            self.average.count(step)

    def count_skipped(self) -> None:
        """Count the last update as skipped."""
        self.progress.skipped += 1
        if self.average is not None:
            self.average.forget()

    def take_snapshot(self) -> None:
        """Store the current state, once in a stage that may be rolled back."""
        if self.snapshot:  # of the start of this stage, from a checkpoint
            return
        self.snapshot = {
            "model": _copied(self.model.state_dict()),
            "ema": _copied(self._average_state()),
            "scaler": self.scaler.state_dict(),
        }

    def roll_back(self) -> None:
        """Return to the snapshot without momentum: the next stage has its own optimizer."""
        self.model.load_state_dict(self.snapshot["model"])
        if self.average is not None:
            self.average.load_state_dict(self.snapshot["ema"])
        self.scaler.load_state_dict(self.snapshot["scaler"])
        self.updater.optimizer.state.clear()  # it may have diverged with the weights

    def _average_state(self) -> dict[str, Any]:
        return self.average.state_dict() if self.average is not None else {}

    def state_dict(self) -> dict[str, Any]:
        """Return everything as tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.updater.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": self._average_state(),
            "progress": {**asdict(self.progress), "seconds": self.seconds},
            "stages": [asdict(stage) for stage in self.stages],
            "weights_sha256": self.weights_sha256,
            "snapshot": self.snapshot,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint but its progress; the updater must be that of its stage.

        Hyper-parameters are kept from this run's optimizer. Raises KeyError, TypeError,
        RuntimeError or ValueError if the state is not of this run.
        """
        if self.average is not None and state["ema"]:
            self.average.load_state_dict(state["ema"])
        else:
            self.average = None  # it has become the model
        self.model.load_state_dict(state["model"])
        self.load_optimizer(**state["optimizer"])
        scaler = state["scaler"]
        if self.scaler.is_enabled() and not 0 < scaler["scale"] < math.inf:
            raise ValueError(
                f"scaler: the loss scale must be above 0 and finite, got {scaler['scale']}"
            )
        self.scaler.load_state_dict(scaler)
        self.weights_sha256 = state["weights_sha256"]
        self.snapshot = state["snapshot"]
        if self.snapshot:
            states = {"model": self.model.state_dict(), "ema": self._average_state()}
            for name, state_here in states.items():
                expected = {key: tensor.shape for key, tensor in state_here.items()}
                saved = {key: tensor.shape for key, tensor in self.snapshot[name].items()}
                if saved != expected:
                    raise ValueError(f"the snapshot has another {name} than this run")
        self._begun = time.perf_counter()

    def load_optimizer(
        self, state: dict[int, dict[str, Any]], param_groups: list[dict[str, Any]]
    ) -> None:
        """Load learning rates, counters, and momentum in the memory layout of each parameter.

        Raises as load_state_dict.
        """
        optimizer = self.updater.optimizer
        # The recipe's hyper-parameters, which may have been changed with --allow, and saved counts.
        groups_here = optimizer.state_dict()["param_groups"]
        groups = []
        for group, saved in zip(groups_here, param_groups, strict=True):
            counts = {key: saved[key] for key in _COUNTED if key in saved}
            for key, value in counts.items():
                if not isinstance(value, int | float) and getattr(value, "shape", None) != ():
                    raise TypeError(f"optimizer: {key} must be a number")
            groups.append({**group, "lr": float(saved["lr"]), **counts})
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for number, entry in state.items():
            if number >= len(weights):
                raise ValueError(f"optimizer: there is no parameter {number}")
            shape = weights[number].shape
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.shape not in {shape, torch.Size()}:
                    raise ValueError(
                        f"optimizer: {key} of parameter {number} has shape {list(value.shape)}, "
                        f"expected {list(shape)}"
                    )
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        # A checkpoint is contiguous; fused kernels need moments in the order of their weight.
        for weight, entry in optimizer.state.items():
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.shape == weight.shape:
                    entry[key] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}

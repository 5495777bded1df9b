"""The objects of one run on one worker, and what every stage of it ends with.

A stage ends with an evaluation. Where the recipe says `keep: better`, training pictures that were
held out decide whether what it did is kept, or the state before it comes back.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from largebatch import checkpoint
from largebatch.average import Average
from largebatch.checkpoint import Checkpoint
from largebatch.data.pipeline import Pipeline
from largebatch.distributed.backend import Backend
from largebatch.distributed.reducer import Reducer
from largebatch.evaluate import Metrics, evaluate
from largebatch.models.batchnorm import Spans
from largebatch.recipe.plan import Plan
from largebatch.recipe.recipe import Recipe
from largebatch.schedules.functions import Schedule
from largebatch.steplog import Emit, StepLog
from largebatch.train import Criterion

Means = tuple[Optimizer, Schedule, Reducer]
"""What makes updates: of these weights, at this rate of each step, from these sums."""


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
        checkpoint.save(
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


def measure(session: Session, stage: str) -> Metrics:
    """Evaluate the model as it is and emit the record."""
    begun = time.perf_counter()
    metrics = evaluate(
        session.model,
        session.pipeline.validation(),
        session.backend,
        expected=session.plan.val_samples,
    )
    session.emit(
        {
            "event": "evaluation",
            "stage": stage,
            "step": session.step,
            "epoch": session.plan.epoch(session.step),
            **asdict(metrics),
            "seconds": time.perf_counter() - begun,
        }
    )
    return metrics


def say(session: Session, stage: str, text: str) -> None:
    """Tell whoever follows the run, in words."""
    session.emit({"event": "note", "stage": stage, "step": session.step, "text": text})


def end_stage(
    session: Session, name: str, *, num_steps: int, note: str | None = None, failed: bool = False
) -> None:
    """Evaluate, keep or undo what the stage did, note what it changed, and save.

    `note` is what else there is to say of the stage; one that `failed` is undone whatever it did.
    """
    if note is not None:
        say(session, name, note)
    metrics = measure(session, name)
    after = {"top1": metrics.top1, "top5": metrics.top5, "loss": metrics.loss}
    last = session.last_kept
    verdict = _judge(session, name, failed=failed)
    if not verdict["kept"]:
        session.go_back()
    session.before = {}
    session.stages.append(
        {
            "name": name,
            "steps": num_steps,
            "seconds": session.seconds - sum(stage["seconds"] for stage in session.stages),
            **after,
            "before": {key: last[key] for key in after} if last else None,
            **verdict,
            "note": note,
        }
    )
    session.save()


def _judge(session: Session, name: str, *, failed: bool) -> dict[str, Any]:
    """Return top-1 on the pictures held out, where there are some, and whether to keep the stage.

    A model whose loss is no number is not kept, though some labels may be met by chance. Every
    worker decides alike: counts are exact, and one all-reduce gives all of them the same.
    """
    if not session.judged:
        return {"held_out": None, "kept": True}
    samples = len(session.pipeline.held_out_samples)
    batches = session.pipeline.held_out()
    measured = evaluate(session.model, batches, session.backend, expected=samples)
    found, last = measured.top1, session.last_kept
    usable = not failed and math.isfinite(measured.loss)
    kept = last is None or (usable and found > last["held_out"])
    if last is not None:
        session.emit(
            {
                "event": "decision",
                "stage": name,
                "step": session.step,
                "samples": samples,
                "before": last["held_out"],
                "after": found,
                "kept": kept,
            }
        )
    return {"held_out": found, "kept": kept}


def _copy(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}

"""What a run is made of on one worker, and what every stage of it ends with.

A stage ends with an evaluation. Where the recipe says `keep: better`, training images that were
held out decide whether what it did is kept, or the state before it comes back.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from largebatch.data.pipeline import Pipeline
from largebatch.distributed.backend import Backend
from largebatch.models.batchnorm import Spans
from largebatch.recipe.plan import Plan
from largebatch.recipe.recipe import Recipe
from largebatch.tracking.events import (
    Accuracy,
    Decision,
    Evaluation,
    Event,
    Note,
    StageName,
    StageResult,
    Tracker,
)
from largebatch.training.evaluation import Metrics, evaluate
from largebatch.training.loss import Criterion
from largebatch.training.state import Checkpoint, TrainState, Updater, save_checkpoint
from largebatch.training.step_log import StepLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The objects of one run on one worker. Of these only `state` changes by training."""

    recipe: Recipe
    plan: Plan
    backend: Backend
    pipeline: Pipeline
    criterion: Criterion
    spans: Spans
    state: TrainState
    build_affine: Callable[[], Updater]
    """Freezes what the affine stage leaves alone and returns what updates the rest."""

    trackers: list[Tracker]
    """Those that follow the run; none on workers other than the first."""

    emit: Callable[[Event], None]
    """Hands an event to the trackers."""

    step_log: StepLog
    checkpoints: Path

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on where a checkpoint stopped."""
        if checkpoint.progress.step > self.plan.steps:
            self.state.use(self.build_affine())
        self.state.load_state_dict(checkpoint.state)

    def measure(self) -> Metrics:
        """Evaluate the model as it is on the validation data."""
        return evaluate(
            self.state.model,
            self.pipeline.validation(),
            self.backend,
            expected=self.plan.val_samples,
        )

    def evaluate(self, stage: StageName) -> Metrics:
        """Measure the model as it is and emit the event."""
        begun = time.perf_counter()
        metrics = self.measure()
        step = self.state.progress.step
        self.emit(
            Evaluation(
                stage=stage,
                step=step,
                epoch=self.plan.epoch(step),
                seconds=time.perf_counter() - begun,
                **asdict(metrics),
            )
        )
        return metrics

    def note(self, stage: StageName, text: str) -> None:
        """Emit a note in words."""
        self.emit(Note(stage=stage, step=self.state.progress.step, text=text))

    def save(self) -> None:
        """Write a checkpoint; worker 0 only."""
        if self.backend.rank == 0:
            state = self.state.state_dict()
            with self.backend.busy():
                save_checkpoint(self.checkpoints, Checkpoint.of(self.recipe, state))

    def begin_stage(self) -> None:
        """Take a snapshot where the stage that begins, or goes on, may be rolled back."""
        if self._decides and self.state.stages:  # the first stage is never rolled back
            self.state.take_snapshot()

    def end_stage(
        self, name: StageName, *, num_steps: int, note: str | None = None, failed: bool = False
    ) -> None:
        """Evaluate, keep the stage or roll it back, note what it changed, and save.

        `note` is a remark on the stage; one that `failed` is rolled back whatever
        it did.
        """
        state = self.state
        if note is not None:
            self.note(name, note)
        metrics = self.evaluate(name)
        last = state.last_kept
        held_out, kept = self._decide(name, last, failed=failed)
        if not kept:
            state.roll_back()
        state.end_stage(
            StageResult(
                name=name,
                steps=num_steps,
                seconds=state.seconds - sum(stage.seconds for stage in state.stages),
                top1=metrics.top1,
                top5=metrics.top5,
                loss=metrics.loss,
                before=Accuracy(top1=last.top1, top5=last.top5, loss=last.loss) if last else None,
                held_out=held_out,
                kept=kept,
                note=note,
            )
        )
        self.save()

    @property
    def _decides(self) -> bool:
        """Whether stages are rolled back that do not help."""
        polish = self.recipe.polish
        return polish is not None and polish.keep == "better"

    def _decide(
        self, name: StageName, last: StageResult | None, *, failed: bool
    ) -> tuple[float | None, bool]:
        """Return top-1 on the images held out, None without them, and whether to keep the stage.

        A model whose loss is no number is not kept, though some labels may be met by chance. Every
        worker decides alike: counts are exact, and one all-reduce gives all of them the same.
        """
        if not self._decides:
            return None, True
        samples = len(self.pipeline.held_out_samples)
        batches = self.pipeline.held_out()
        found = evaluate(self.state.model, batches, self.backend, expected=samples)
        if last is None:
            return found.top1, True
        assert last.held_out is not None
        usable = not failed and math.isfinite(found.loss)
        kept = usable and found.top1 > last.held_out
        self.emit(
            Decision(
                stage=name,
                step=self.state.progress.step,
                samples=samples,
                before=last.held_out,
                after=found.top1,
                kept=kept,
            )
        )
        return found.top1, kept

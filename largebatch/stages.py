"""The stages of a run, in order: train, clean, statistics; each ends with an evaluation.

A stage drives the training loop and does between two updates what the loop does not know of: log,
evaluate, save, and stop when asked.
"""

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from largebatch import checkpoint
from largebatch.backends.reducer import Reducer
from largebatch.checkpoint import Checkpoint
from largebatch.contracts import Backend, Work
from largebatch.data.pipeline import Pipeline
from largebatch.errors import DivergedError
from largebatch.evaluate import Metrics, evaluate
from largebatch.norm import Spans
from largebatch.plan import Plan
from largebatch.polish import polish
from largebatch.recipe import Recipe
from largebatch.schedules import Schedule
from largebatch.train import Criterion, Update, step_seeds, train

Emit = Callable[[dict[str, Any]], None]


class StepLog:
    """Turns updates into records, one update late, so that nothing waits for the device.

    The loss and every worker's wish to stop are summed over the workers, so that all of them know
    the same and stop after the same update.
    """

    def __init__(
        self, plan: Plan, backend: Backend, emit: Emit, wants_stop: Callable[[], bool]
    ) -> None:
        self._plan, self._backend, self._emit = plan, backend, emit
        self._wants_stop = wants_stop
        self._pending: tuple[dict[str, Any], Tensor, Callable[[], None]] | None = None
        on_gpu = backend.device.type == "cuda"
        self._stream = torch.cuda.Stream(backend.device) if on_gpu else None
        self._begun = time.perf_counter()
        self.stopped = False
        self.images = 0
        self.seconds = 0.0
        self.skipped = 0

    def resume_clock(self) -> None:
        """Leave out the time since the last update, which went to something else."""
        self._begun = time.perf_counter()

    def add(self, stage: str, update: Update) -> None:
        """Take an update; emit the record of the one before."""
        wish = torch.full_like(update.loss, float(self._wants_stop()))
        sums = torch.stack([update.loss, wish])
        work = self._backend.all_reduce(sums)
        self.flush()
        seconds = time.perf_counter() - self._begun
        self._begun += seconds
        self.seconds += seconds
        self.images += self._plan.global_batch
        self.skipped += update.skipped
        record = {
            "event": "step",
            "stage": stage,
            "step": update.step,
            "epoch": self._plan.epoch(update.step + 1),
            "lr": update.lr,
            "loss_scale": update.loss_scale,
            "skipped": update.skipped,
            "step_seconds": seconds,
            "images_per_second": self._plan.global_batch / seconds,
        }
        self._pending = (record, sums, self._arrival(work))

    def _arrival(self, work: Work) -> Callable[[], None]:
        """Return what makes the stream of the log wait for the sums, and for nothing later."""
        if self._stream is None:
            return work.wait
        stream, made = self._stream, torch.cuda.Event()
        made.record()

        def arrive() -> None:
            stream.wait_event(made)
            work.wait()

        return arrive

    def flush(self) -> None:
        """Emit the record that is still open.

        Raises DivergedError if its loss is no number, or if fp16 fails without loss scaling too.
        """
        if self._pending is None:
            return
        record, sums, arrive = self._pending
        self._pending = None
        with torch.cuda.stream(self._stream):  # not behind the update that was queued since
            arrive()
            loss, wishes = sums.tolist()  # sync: with the update before
        self.stopped = self.stopped or wishes > 0
        self._emit({**record, "loss": loss})
        if record["skipped"] and record["loss_scale"] < 1:
            raise DivergedError(
                f"the gradients of step {record['step']} overflow in fp16 even without loss "
                "scaling; use precision: bf16 or fp32, or lower schedule.peak_lr"
            )
        if not math.isfinite(loss) and not record["skipped"]:
            raise DivergedError(
                f"the training loss became {loss} at step {record['step']} (rate "
                f"{record['lr']:.4g}); lower schedule.peak_lr or lengthen schedule.warmup"
            )


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
    spans: Spans
    scaler: GradScaler
    emit: Emit
    log: StepLog
    checkpoints: Path
    step: int = 0
    """Optimizer updates made."""

    stages: list[dict[str, Any]] = field(default_factory=list)
    """The stages that have ended, as in summary.json."""

    seconds_before: float = 0.0
    """What earlier parts of a resumed run took."""

    begun: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Time the run has taken so far."""
        return self.seconds_before + time.perf_counter() - self.begun

    def restore(self, state: Checkpoint) -> None:
        """Go on where a checkpoint stopped."""
        self.model.load_state_dict(state.model)
        self.optimizer.load_state_dict(state.optimizer)
        self.scaler.load_state_dict(state.scaler)
        self.step, self.stages = state.step, state.stages
        self.seconds_before = state.seconds
        self.log.images, self.log.seconds = state.images, state.train_seconds
        self.log.skipped = state.skipped


def run_stages(session: Session, *, until: int) -> bool:
    """Go through the stages that remain; return whether the run is complete.

    Stops early after `until` updates, or when any worker is asked to; what was done is saved.
    """
    plan = session.plan
    ends = {"train": plan.train_steps, "clean": plan.steps}
    for name, end in ends.items():
        if session.step < min(end, until) and not session.log.stopped:
            _train_stage(session, name, end=end, until=until)
        if session.step < end:
            _save(session)
            return False
    if session.stages[-1]["name"] != "statistics":
        polish_statistics(session)
    return True


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


def _train_stage(session: Session, name: str, *, end: int, until: int) -> None:
    plan, log = session.plan, session.log
    steps = range(session.step, end)
    batches = session.pipeline.training(steps, clean=name == "clean")
    updates = train(
        session.model,
        session.optimizer,
        batches,
        session.schedule,
        session.criterion,
        session.reducer,
        session.spans,
        session.scaler,
        steps=steps,
        accumulation=plan.accumulation,
        global_batch=plan.global_batch,
        seed=step_seeds(session.recipe.seed, session.backend.rank),
    )
    log.resume_clock()
    with closing(batches), closing(updates):
        for update in updates:
            log.add(name, update)
            session.step = update.step + 1
            if session.step < end and session.step in plan.evaluate_after:
                log.flush()
                measure(session, name)
                _save(session)
                log.resume_clock()
            if log.stopped or session.step in (end, until):
                break
    log.flush()
    if session.step == end:
        end_stage(session, name, num_steps=end - (plan.train_steps if name == "clean" else 0))


def polish_statistics(session: Session) -> None:
    """Do the statistics pass, if the recipe has one, and emit what it changed."""
    polishing = session.recipe.polish
    num_samples = polishing.statistics_samples if polishing else None
    if num_samples is None:
        return
    with closing(session.pipeline.statistics(num_samples)) as batches:
        drift = polish(session.model, batches, session.backend)
    session.emit(
        {
            "event": "drift",
            "stage": "statistics",
            "step": session.step,
            "samples": num_samples,
            "layers": [asdict(layer) for layer in drift],
        }
    )
    end_stage(session, "statistics", num_steps=0)


def end_stage(session: Session, name: str, *, num_steps: int) -> None:
    """Evaluate, note what the stage changed, and save."""
    metrics = measure(session, name)
    after = {"top1": metrics.top1, "top5": metrics.top5, "loss": metrics.loss}
    last = session.stages[-1] if session.stages else None
    session.stages.append(
        {
            "name": name,
            "steps": num_steps,
            "seconds": session.seconds - sum(stage["seconds"] for stage in session.stages),
            **after,
            "before": {key: last[key] for key in after} if last else None,
        }
    )
    _save(session)


def _save(session: Session) -> None:
    if session.backend.rank != 0:
        return
    checkpoint.save(
        session.checkpoints,
        Checkpoint(
            recipe=session.recipe,
            step=session.step,
            seconds=session.seconds,
            images=session.log.images,
            train_seconds=session.log.seconds,
            model=session.model.state_dict(),
            optimizer=session.optimizer.state_dict(),
            scaler=session.scaler.state_dict(),
            skipped=session.log.skipped,
            stages=session.stages,
        ),
    )

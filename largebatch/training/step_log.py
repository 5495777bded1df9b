"""The record of every update, made without waiting for it."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from largebatch.distributed.backend import Backend, Work
from largebatch.errors import DivergedError
from largebatch.recipe.plan import Plan
from largebatch.tracking.events import StageName, Step
from largebatch.training.loop import Update
from largebatch.training.state import TrainState


class _Pending(NamedTuple):
    """An update whose loss is still being summed."""

    step: Step
    sums: Tensor
    arrive: Callable[[], None]
    """Waits for them."""


class StepLog:
    """Counts updates and emits their records, one update late: nothing waits for the device.

    The loss and every worker's wish to stop are summed over the workers, so that all of them know
    the same and stop after the same update.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        state: TrainState,
        *,
        emit: Callable[[Step], None],
        wants_stop: Callable[[], bool],
    ) -> None:
        self._plan, self._backend, self._state = plan, backend, state
        self._emit, self._wants_stop = emit, wants_stop
        self._pending: _Pending | None = None
        on_gpu = backend.device.type == "cuda"
        self._stream = torch.cuda.Stream(backend.device) if on_gpu else None
        self._begun = time.perf_counter()
        self.stopped = False
        """Whether any worker was asked to stop."""

    def resume_clock(self) -> None:
        """Leave out the time since the last update, which went to something else."""
        self._begun = time.perf_counter()

    def add(self, stage: StageName, update: Update) -> None:
        """Count an update; emit the record of the one before. Raises what flush does."""
        wish = torch.full_like(update.loss, float(self._wants_stop()))
        sums = torch.stack([update.loss, wish])
        work = self._backend.all_reduce(sums)
        try:
            self.flush()
        except DivergedError:
            work.wait()  # nothing may be under way, for the run may go on without this stage
            raise
        seconds = time.perf_counter() - self._begun
        self._begun += seconds
        images = self._plan.global_batch
        self._state.progress.count(
            update.step, images=images, seconds=seconds, skipped=update.skipped
        )
        step = Step(
            stage=stage,
            step=update.step,
            epoch=self._plan.epoch(update.step + 1),
            loss=math.nan,
            lr=update.lr,
            loss_scale=update.loss_scale,
            skipped=update.skipped,
            step_seconds=seconds,
            images_per_second=images / seconds,
        )
        self._pending = _Pending(step, sums, self._arrival(work))

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
        step, sums, arrive = self._pending
        self._pending = None
        with torch.cuda.stream(self._stream):  # not behind the update that was queued since
            arrive()
            loss, wishes = sums.tolist()  # sync: with the update before
        self.stopped = self.stopped or wishes > 0
        self._emit(replace(step, loss=loss))
        if step.skipped and step.loss_scale < 1:
            raise DivergedError(
                f"the gradients of step {step.step} overflow in fp16 even without loss "
                f"scaling; use precision: bf16 or fp32, or lower {_lr_key(step.stage)}"
            )
        if not math.isfinite(loss) and not step.skipped:
            raise DivergedError(
                f"the training loss became {loss} at step {step.step} (learning rate "
                f"{step.lr:.4g}); lower {_lr_key(step.stage)}"
                + (" or lengthen schedule.warmup" if step.stage == "train" else "")
            )


def _lr_key(stage: StageName) -> str:
    """Return the key of a recipe that sets the learning rate of a stage."""
    return "polish.affine.lr" if stage == "affine" else "schedule.peak_lr"

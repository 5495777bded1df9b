"""What is told of every update, without waiting for it."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from largebatch.distributed.backend import Backend, Work
from largebatch.errors import DivergedError
from largebatch.recipe.plan import Plan
from largebatch.training.loop import Update

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
        """Take an update; emit the record of the one before. Raises what flush does."""
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
                f"scaling; use precision: bf16 or fp32, or lower {_rate_of(record['stage'])}"
            )
        if not math.isfinite(loss) and not record["skipped"]:
            raise DivergedError(
                f"the training loss became {loss} at step {record['step']} (rate "
                f"{record['lr']:.4g}); lower {_rate_of(record['stage'])}"
                + (" or lengthen schedule.warmup" if record["stage"] == "train" else "")
            )


def _rate_of(stage: str) -> str:
    """Return the key of a recipe that sets the rate of a stage."""
    return "polish.affine.lr" if stage == "affine" else "schedule.peak_lr"

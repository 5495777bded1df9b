"""Detects divergence: a loss or gradient that is not finite, or too many skipped updates."""

import math
from collections.abc import Callable

from largebatch.errors import DivergedError, shorten
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.tracking.events import Note, Step


class DivergenceCheck:
    """Checks the record of every update and counts consecutive skipped updates.

    At most `most_skipped` in a row may be, besides those whose gradients overflow in fp16.
    """

    def __init__(
        self, plan: Plan, *, most_skipped: int, in_fp16: bool, emit: Callable[[Note], None]
    ) -> None:
        self._plan, self._in_fp16, self._emit = plan, in_fp16, emit
        self._most_skipped, self._num_skipped = most_skipped, 0

    def check(self, step: Step, *, infinite: float = 0, bad: float = 0, ranks: float = 0) -> None:
        """Raise DivergedError if the run cannot continue after this update.

        `infinite` is above 0 if a gradient is not finite. `bad` is the number of workers whose part
        of the loss is not finite, and `ranks` the sum of their ranks.
        """
        if step.skipped and step.loss_scale < 1:
            raise DivergedError(
                f"the gradients of step {step.step} overflow in fp16 even without loss "
                f"scaling; use precision: bf16 or fp32, or lower {self._key(step)}"
            )
        if self._in_fp16 and step.skipped:
            return
        if math.isfinite(step.loss) and not infinite:
            self._num_skipped = 0
            return
        what = f"the training loss became {step.loss}"
        if math.isfinite(step.loss):
            what = "a gradient is not finite"
        where = self._where(step, bad=bad, ranks=ranks)
        text = f"{what} at step {step.step} (learning rate {step.lr:.4g}{where})"
        self._num_skipped += step.skipped
        if step.skipped and self._num_skipped <= self._most_skipped:
            self._emit(
                Note(
                    kind="update skipped",
                    stage=step.stage,
                    step=step.step,
                    text=f"update skipped: {text}",
                    numbers={"loss": step.loss, "lr": step.lr},
                )
            )
            return
        raise DivergedError(
            f"{text}; lower {self._key(step)}"
            + (" or lengthen schedule.warmup" if step.step < self._plan.train_steps else "")
        )

    def _key(self, step: Step) -> str:
        """Return the recipe key that sets the learning rate of an update."""
        return "schedule.peak_lr" if step.step < self._plan.steps else "polish.affine.lr"

    def _where(self, step: Step, *, bad: float, ranks: float) -> str:
        """Describe the worker with the bad loss, and the positions of its samples in the order."""
        if bad != 1:
            return f"; on {bad:.0f} workers" if bad else ""
        plan, rank = self._plan, int(ranks)
        ((_, _, accumulation),) = plan.within(range(step.step, step.step + 1))
        parts = (plan.positions(step.step, micro, rank) for micro in range(accumulation))
        samples = shorten([f"{part.start} to {part.stop - 1}" for part in parts], most=3)
        return f"; worker {rank}, samples {samples} of the order"

"""The record of every update, made without waiting for it.

The records are read from the device one update late: `add` counts an update, starts its sums over
the workers, and emits the record of the update before. `flush` emits the last one.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from largebatch import accelerator
from largebatch.distributed.backend import Backend
from largebatch.errors import DivergedError
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.recipe import Recipe
from largebatch.tracking.events import SYSTEM, Note, StageName, Step, System
from largebatch.tracking.noise_scale import RunningNoise
from largebatch.training.checkpoint import SaveClock
from largebatch.training.divergence import DivergenceCheck
from largebatch.training.loop import Update
from largebatch.training.monitors import Monitors
from largebatch.training.state import TrainState


class _Own(NamedTuple):
    """Values of an update that are equal on every worker, so that they need no sum."""

    monitored: list[float]
    skipped: bool = False
    loss_scale: float = 1.0
    scaled_by: float = 1.0


class _Pending(NamedTuple):
    """The last update that was counted, whose loss is still being summed."""

    step: Step
    update: Update
    own_values: Tensor
    """The content of `own`, on the device."""

    sums: Tensor
    """The content of `_Sums`, on the device; complete after `wait`."""

    wait: Callable[[], None]

    made: torch.Event | None
    """The end of the update on the device; None on a CPU."""

    own: _Own | None = None
    """None until it is read."""


class _Sums(NamedTuple):
    """The sums over the workers for every update."""

    loss: float
    bad: float
    ranks: float
    """Number of workers whose part of the loss is not finite, and the sum of their ranks."""

    infinite: float
    """Number of workers with a gradient that is not finite: all or none."""

    stop: float
    save: float
    squares: tuple[float, ...] = ()
    """Squared lengths from the reducers: of the first micro-batch's gradient, and of the sum."""

    system: tuple[float, ...] = ()
    """Resources used, a row for each worker; empty in updates that do not measure them."""


class StepLog:
    """Counts updates and emits their records, one update late: nothing waits for the device.

    The loss and every worker's requests to stop and to save are summed over the workers, so that
    all of them act on the same values after the same update. On a CPU that is the current update,
    on a GPU the one before: reading a number at once would stall the GPU.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        backend: Backend,
        state: TrainState,
        *,
        emit: Callable[[Step | System | Note], None],
        wants_stop: Callable[[], bool],
    ) -> None:
        self._plan, self._backend, self._state = plan, backend, state
        self._emit, self._wants_stop = emit, wants_stop
        self._save_clock = SaveClock(recipe.execution.checkpoints.every_minutes)
        self._noise = RunningNoise(plan)
        self._monitors = Monitors(recipe, plan, backend, state)
        in_fp16 = state.scaler.is_enabled()
        self._divergence = DivergenceCheck(recipe, plan, in_fp16=in_fp16, emit=emit)
        self._pending: _Pending | None = None
        self._stream = accelerator.stream(backend.device)
        self.is_training = False
        """True from an update until something other than updates is done."""

        self._begun = time.perf_counter()
        self.stopped = False
        """True if any worker was asked to stop."""

        self.save_due = False
        """True if the time for a checkpoint has come."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers whose trust ratios are in the records."""
        return self._monitors.layers

    @property
    def measure_norm(self) -> Callable[[], Tensor] | None:
        """Measures the gradients of an update; an argument of train()."""
        return self._monitors.measure_norm

    def note_saved(self, *, seconds: float) -> None:
        """Count the time to the next checkpoint from now; `seconds` are those it took."""
        self._save_clock.note_saved(seconds=seconds)
        self.save_due = False

    def resume_clock(self) -> None:
        """Exclude the time since the last update from the next one."""
        self._begun = time.perf_counter()
        self.is_training = True

    def add(self, stage: StageName, update: Update) -> None:
        """Count an update and emit the record of the one before; raise as `flush`."""
        seconds = time.perf_counter() - self._begun
        self._begun += seconds
        images = self._plan.batch_at(update.step)
        self._read_own()
        self._state.count(update.step, images=images, seconds=seconds)
        self._state.follow(update.step, update.skipped)
        sums = self.values_to_sum(update)
        own_values = self._measure(update)
        made = None if self._stream is None else accelerator.event(self._backend.device)
        work = self._backend.all_reduce(sums)
        step = Step(
            stage=stage,
            step=update.step,
            epoch=self._plan.epoch(update.step + 1),
            loss=math.nan,
            lr=update.lr,
            step_seconds=seconds,
            images_per_second=images / seconds,
        )
        following = _Pending(step, update, own_values, sums, work.wait, made)
        try:
            self._record()
        except DivergedError:
            work.wait()  # the run may go on without this stage: no operation may be pending
            self._pending = following
            self._read_own()
            self._pending = None
            raise
        self._pending = following
        if self._stream is None:
            self._record()

    @property
    def is_interrupted(self) -> bool:
        """True if this worker is asked to stop, or, on worker 0, to save."""
        return self._wants_stop() or self._save_is_late

    @property
    def _save_is_late(self) -> bool:
        return self._backend.rank == 0 and self._save_clock.is_late()

    def share_requests(self) -> None:
        """Set `stopped` and `save_due`, between updates, by the requests to any worker."""
        requests = torch.tensor([float(self._wants_stop()), float(self._save_is_late)])
        sums = requests.to(self._backend.device)
        self._backend.all_reduce(sums).wait()
        stop, save = sums.tolist()  # sync: between updates
        self.stopped = self.stopped or stop > 0
        self.save_due = self.save_due or save > 0

    def add_record(self, step: Step) -> None:
        """Count an update by its record and emit it; raise DivergedError if it diverged."""
        self._backend.started()
        images = self._plan.batch_at(step.step)
        self._state.count(step.step, images=images, seconds=step.step_seconds)
        self._state.follow(step.step, None)
        self._emit(step)
        self._divergence.check(step)

    def values_to_sum(self, update: Update) -> Tensor:
        """Return the values of this worker for `_Sums`."""
        bad = (~update.loss.isfinite()).to(update.loss.dtype)
        infinite = (~update.finite).to(update.loss.dtype)
        known = [float(self._wants_stop()), float(self._save_is_late)]
        copied = _copied([*known, *self._monitors.sample(update.step)], to=update.loss)
        requests, system = copied[: len(known)], copied[len(known) :]
        measured = update.loss.new_empty(0) if update.squares is None else update.squares
        loss = torch.stack([update.loss, bad, bad * self._backend.rank, infinite])
        return torch.cat([loss, requests, measured, system])

    def _measure(self, update: Update) -> Tensor:
        """Return the values of `_Own`, on the device."""
        monitored = self._monitors.measure(update)
        if update.skipped is None:
            return monitored
        scales = torch.stack([update.skipped, update.loss_scale, update.scaled_by])
        return torch.cat([scales, monitored])

    def flush(self) -> None:
        """Emit the record of the last update, before something else is done than updates.

        Raises DivergedError if the loss or a gradient is not finite and the update was made, if too
        many updates in a row were skipped, or if fp16 fails without loss scaling too.
        """
        try:
            self._record()
        finally:
            self.is_training = False

    def _record(self) -> None:
        """Read the values of the update counted last, and emit its record."""
        if self._pending is not None:
            self._read_own()
            with accelerator.on(self._stream):
                self._pending.wait()
                sums = self._pending.sums.tolist()  # sync: with the update before
            self._emit_record(sums)

    def _read_own(self) -> None:
        """Set `own` of the update counted last, and count it if it was skipped."""
        pending = self._pending
        if pending is None or pending.own is not None:
            return
        with accelerator.on(self._stream):  # not behind the update that was queued since
            if self._stream is not None and pending.made is not None:
                self._stream.wait_event(pending.made)
            values = pending.own_values.tolist()  # sync: with the update before, on a CPU with this
        own = _Own(values)
        if pending.update.skipped is not None:
            own = _Own(values[3:], bool(values[0]), *values[1:3])
        if own.skipped:
            self._state.count_skipped()
        self._pending = pending._replace(own=own)

    def _emit_record(self, sums: list[float]) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        own = pending.own
        assert own is not None
        step = replace(pending.step, skipped=own.skipped, loss_scale=own.loss_scale)
        self._backend.started()
        update = pending.update
        loss, bad, ranks, infinite, stop, save, *rest = sums
        squares = 0 if update.squares is None else len(update.squares)
        measured = tuple(rest[:squares]), tuple(rest[squares:])
        total = _Sums(loss, bad, ranks, infinite, stop, save, *measured)
        self.stopped = self.stopped or total.stop > 0
        self.save_due = self.save_due or total.save > 0
        data, reduction = update.data.seconds(), update.reduction.seconds()
        step = replace(step, loss=total.loss, data_seconds=data, reduction_seconds=reduction)
        if total.squares:
            noise = self._noise.add(step.step, *total.squares, loss_scale=own.scaled_by)
            step = replace(step, **noise)
        self._emit(replace(step, **self._monitors.fields(own.monitored, skipped=own.skipped)))
        if total.system:
            columns = {n: tuple(total.system[p :: len(SYSTEM)]) for p, n in enumerate(SYSTEM)}
            self._emit(System(stage=step.stage, step=step.step, **columns))  # type: ignore[arg-type]  # all columns
        try:
            self._divergence.check(step, infinite=total.infinite, bad=total.bad, ranks=total.ranks)
        except DivergedError:
            self.is_training = False
            raise


def _copied(values: Sequence[float], *, to: Tensor) -> Tensor:
    """Return numbers on the device of a tensor, in its type; a GPU is not waited for."""
    there = torch.tensor(values, dtype=to.dtype, pin_memory=accelerator.is_remote(to.device))
    return there.to(to.device, non_blocking=True)

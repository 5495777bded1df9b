"""The record of every update, made without waiting for it."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from largebatch import accelerator
from largebatch.distributed.backend import Backend
from largebatch.distributed.environment import GRACE_SECONDS
from largebatch.errors import DivergedError, PeerLostError, shorten
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.recipe import Recipe
from largebatch.tracking.events import SYSTEM, Note, StageName, Step, System
from largebatch.training.loop import Update
from largebatch.training.monitors import Monitors
from largebatch.training.noise import RunningNoise
from largebatch.training.state import TrainState


class _Own(NamedTuple):
    """What an update has found that needs no sum, for every worker has the same."""

    monitored: list[float]
    skipped: bool = False
    loss_scale: float = 1.0
    scaled_by: float = 1.0


class _Pending(NamedTuple):
    """The update counted last, whose loss is still being summed."""

    step: Step
    update: Update
    found: Tensor  # what `own` is read from
    sums: Tensor
    """What is summed; `arrive` waits for it."""

    arrive: Callable[[], None]

    made: torch.Event | None
    """When the device has made it; None on a CPU, which has."""

    own: _Own | None = None
    """None until it is read."""


class _Sums(NamedTuple):
    """What is summed over the workers for every update."""

    loss: float
    bad: float
    ranks: float
    """Workers whose part of the loss is not finite, and the sum of their ranks."""

    infinite: float
    """Workers that found a gradient that is not finite: all or none."""

    stop: float
    save: float
    squares: tuple[float, ...] = ()
    """What the reducers measured, if they do: of the first micro-batch, and of the sum."""

    system: tuple[float, ...] = ()
    """What the workers use, in the updates in which that is measured: a row for each."""


class StepLog:
    """Counts updates and emits their records, one update late: nothing waits for the device.

    The loss and every worker's requests to stop and to save are summed over the workers, so that
    all of them know the same after the same update. On a CPU that is the update under way, on a GPU
    the one before, for to read a number at once would leave the GPU idle.
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
        minutes, nonfinite = recipe.execution.checkpoints.every_minutes, recipe.nonfinite
        self._save_seconds = math.inf if minutes is None else 60 * minutes
        self._saved = time.perf_counter()
        self._noise = RunningNoise(plan)
        self._monitors = Monitors(recipe, plan, backend, state)
        self._in_fp16 = state.scaler.is_enabled()
        self._most_skipped = nonfinite.most if nonfinite.action == "skip" else 0
        self._num_skipped = 0
        self._pending: _Pending | None = None
        self._unrecorded: list[tuple[Update, int, float]] = []
        """The updates that are counted and have no record yet, with their images and seconds."""

        self._stream = accelerator.stream(backend.device)
        self._recorded: torch.Event | None = None
        """When the device has made the last update that has a record."""

        self.lock = threading.RLock()
        """Held while counts and records change; the thread of a rescue keeps it until the end."""

        self.is_training = False
        """Whether updates are made, so that the weights are never any but those of the last one."""

        self._begun = time.perf_counter()
        self.stopped = False
        """Whether any worker was asked to stop."""

        self.save_due = False
        """Whether the time for a checkpoint has come."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers whose trust ratios are in the records."""
        return self._monitors.layers

    @property
    def measure_norm(self) -> Callable[[], Tensor] | None:
        """What the updates that are logged measure their gradients by, as train() takes it."""
        return self._monitors.measure_norm

    def note_saved(self) -> None:
        """Count the time to the next checkpoint from now."""
        self._saved = time.perf_counter()
        self.save_due = False

    def resume_clock(self) -> None:
        """Leave out the time since the last update, which went to something else."""
        self._begun = time.perf_counter()
        self.is_training = True

    def add(self, stage: StageName, update: Update) -> None:
        """Count an update; emit the record of the one before. Raises what flush does."""
        seconds = time.perf_counter() - self._begun
        self._begun += seconds
        images = self._plan.batch_at(update.step)
        self._read_own()
        with self.lock:  # before the device is asked for more, which may hold the host
            self._state.count(update.step, images=images, seconds=seconds)
            self._unrecorded.append((update, images, seconds))
        self._state.follow(update.step, update.skipped)
        sums = self.requests(update)
        found = self._measure(update)
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
        following = _Pending(step, update, found, sums, work.wait, made)
        try:
            self._record()
        except DivergedError:
            self._unrecorded.clear()
            work.wait()  # nothing may be under way, for the run may go on without this stage
            self._pending = following
            self._read_own()
            self._pending = None
            raise
        self._pending = following
        if self._stream is None:
            self._record()

    @property
    def asks(self) -> bool:
        """Whether this worker alone is asked to stop, or to save, which worker 0 is."""
        return self._wants_stop() or self._save_is_late

    @property
    def _save_is_late(self) -> bool:
        late = time.perf_counter() - self._saved > self._save_seconds
        return late and self._backend.rank == 0

    def exchange_requests(self) -> None:
        """Take in whether any worker is asked to stop or to save, between updates."""
        requests = torch.tensor([float(self._wants_stop()), float(self._save_is_late)])
        sums = requests.to(self._backend.device)
        self._backend.all_reduce(sums).wait()
        stop, save = sums.tolist()  # sync: when all workers have come to rest
        self.stopped = self.stopped or stop > 0
        self.save_due = self.save_due or save > 0

    def add_made(self, step: Step) -> None:
        """Count and emit an update that parameter servers made.

        Raises DivergedError where its loss is not finite.
        """
        self._backend.started()
        images = self._plan.batch_at(step.step)
        self._state.count(step.step, images=images, seconds=step.step_seconds)
        self._state.follow(step.step, None)
        self._emit(step)
        self._judge(step, _Sums(step.loss, bad=0, ranks=0, infinite=0, stop=0, save=0))

    def exchange(self, bad: Tensor) -> bool:
        """Take in whether any worker was asked to stop; return whether `bad` is above 0 on any.

        For updates that this log does not count, since every worker makes its own.
        """
        sums = torch.cat([bad.unsqueeze(0), _copied([float(self._wants_stop())], to=bad)])
        self._backend.all_reduce(sums).wait()
        found, stop = sums.tolist()  # sync: once in several updates
        self.stopped = self.stopped or stop > 0
        return bool(found > 0)

    def requests(self, update: Update) -> Tensor:
        """Return what is summed: the loss, whether to stop, whether to save (worker 0 alone)."""
        bad = (~update.loss.isfinite()).to(update.loss.dtype)
        infinite = (~update.finite).to(update.loss.dtype)
        known = [float(self._wants_stop()), float(self._save_is_late)]
        copied = _copied([*known, *self._monitors.sample(update.step)], to=update.loss)
        requests, system = copied[: len(known)], copied[len(known) :]
        measured = update.loss.new_empty(0) if update.squares is None else update.squares
        loss = torch.stack([update.loss, bad, bad * self._backend.rank, infinite])
        return torch.cat([loss, requests, measured, system])

    def _measure(self, update: Update) -> Tensor:
        """Return what is monitored and, where updates may be skipped, what is learned of that."""
        monitored = self._monitors.measure(update)
        if update.skipped is None:
            return monitored
        scales = torch.stack([update.skipped, update.loss_scale, update.scaled_by])
        return torch.cat([scales, monitored])

    def flush(self) -> None:
        """Learn whether the last update was skipped, and emit the record that is still open.

        For when something else is done than updates. Raises DivergedError if the loss or a gradient
        is not finite and the update was made, if too many updates in a row were skipped, or if fp16
        fails without loss scaling too.
        """
        try:
            self._record()
        finally:
            with self.lock:
                self.is_training = False

    def _record(self) -> None:
        """Learn what the update counted last has found, and emit its record."""
        if self._pending is not None:
            self._read_own()
            sums = self._summed(self._pending)
            with self.lock:
                self._emit_record(sums)

    def _read_own(self) -> None:
        if self._pending is not None and self._pending.own is None:
            values = self._found(self._pending)
            with self.lock:
                self._take_own(values)

    def _found(self, pending: _Pending) -> list[float]:
        with accelerator.on(self._stream):  # not behind the update that was queued since
            if self._stream is not None and pending.made is not None:
                self._stream.wait_event(pending.made)
            return pending.found.tolist()  # sync: with the update before; on a CPU with this one

    def _summed(self, pending: _Pending) -> list[float]:
        with accelerator.on(self._stream):
            pending.arrive()
            return pending.sums.tolist()  # sync: with the same

    def _take_own(self, values: list[float]) -> None:
        """Count the update as skipped if it was."""
        assert self._pending is not None
        own = _Own(values)
        if self._pending.update.skipped is not None:
            own = _Own(values[3:], bool(values[0]), *values[1:3])
        if own.skipped:
            self._state.count_skipped()
        self._pending = self._pending._replace(own=own)

    def _emit_record(self, sums: list[float]) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        own = pending.own
        assert own is not None
        step = replace(pending.step, skipped=own.skipped, loss_scale=own.loss_scale)
        self._backend.started()
        loss, bad, ranks, infinite, stop, save, *rest = sums
        squares = 0 if pending.update.squares is None else len(pending.update.squares)
        measured = tuple(rest[:squares]), tuple(rest[squares:])
        found = _Sums(loss, bad, ranks, infinite, stop, save, *measured)
        self.stopped = self.stopped or found.stop > 0
        self.save_due = self.save_due or found.save > 0
        update = pending.update
        data, reduction = update.data.seconds(), update.reduction.seconds()
        step = replace(step, loss=found.loss, data_seconds=data, reduction_seconds=reduction)
        if found.squares:
            noise = self._noise.add(step.step, *found.squares, loss_scale=own.scaled_by)
            step = replace(step, **noise._asdict())
        self._emit(replace(step, **self._monitors.fields(own.monitored, skipped=own.skipped)))
        del self._unrecorded[0]
        self._recorded = pending.made
        if found.system:
            columns = {n: tuple(found.system[p :: len(SYSTEM)]) for p, n in enumerate(SYSTEM)}
            self._emit(System(stage=step.stage, step=step.step, **columns))  # type: ignore[arg-type]  # all columns
        try:
            self._judge(step, found)
        except DivergedError:
            self.is_training = False
            raise

    def settle(self) -> bool:
        """When a worker is lost, go back to the last update that has a record.

        The device may have come no further: it waits for what the lost one should have sent for the
        next update. Return False where the weights are those of an update without a record, or what
        is counted on the host cannot be taken back. Raises as flush does.
        """
        pending = self._pending
        values: list[list[float]] = []

        def read() -> None:
            with suppress(PeerLostError, RuntimeError):
                if pending is not None:
                    values.append(self._found(pending))
                    values.append(self._summed(pending))

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        reading.join(GRACE_SECONDS)  # it may wait for ever for a sum that does not come
        with self.lock:
            own, sums, *_ = *values, None, None
            if pending is not None and pending.own is None and own is not None:
                self._take_own(own)
            if sums is not None:
                self._emit_record(sums)
            self._pending = None
            while self._unrecorded:
                update, images, seconds = self._unrecorded.pop()
                if update.reduction.has_ended() or self._state.counts_on_host:
                    return False
                self._state.take_back(update.step, images=images, seconds=seconds)
        if self._recorded is not None:
            self._recorded.synchronize()  # sync: its gradients were summed before its loss
        return True

    def _judge(self, step: Step, found: "_Sums") -> None:
        """Raise DivergedError where the run cannot go on after this update."""
        if step.skipped and step.loss_scale < 1:
            raise DivergedError(
                f"the gradients of step {step.step} overflow in fp16 even without loss "
                f"scaling; use precision: bf16 or fp32, or lower {_lr_key(step.stage)}"
            )
        if self._in_fp16 and step.skipped:
            return
        if math.isfinite(found.loss) and not found.infinite:
            self._num_skipped = 0
            return
        what = f"the training loss became {found.loss}"
        if math.isfinite(found.loss):
            what = "a gradient is not finite"
        text = f"{what} at step {step.step} (learning rate {step.lr:.4g}{self._where(step, found)})"
        self._num_skipped += step.skipped
        if step.skipped and self._num_skipped <= self._most_skipped:
            self._emit(Note(stage=step.stage, step=step.step, text=f"update skipped: {text}"))
            return
        raise DivergedError(
            f"{text}; lower {_lr_key(step.stage)}"
            + (" or lengthen schedule.warmup" if step.stage == "train" else "")
        )

    def _where(self, step: Step, found: "_Sums") -> str:
        """Return which worker's loss it was, and its samples by their positions in the order."""
        if found.bad != 1:
            return f"; on {found.bad:.0f} workers" if found.bad else ""
        plan, rank = self._plan, int(found.ranks)
        ((_, _, accumulation),) = plan.within(range(step.step, step.step + 1))
        parts = (plan.positions(step.step, micro, rank) for micro in range(accumulation))
        samples = shorten([f"{part.start} to {part.stop - 1}" for part in parts], most=3)
        return f"; worker {rank}, samples {samples} of the order"


def _copied(values: Sequence[float], *, to: Tensor) -> Tensor:
    """Return numbers on the device of a tensor, in its type; a GPU is not waited for."""
    there = torch.tensor(values, dtype=to.dtype, pin_memory=accelerator.is_remote(to.device))
    return there.to(to.device, non_blocking=True)


def _lr_key(stage: StageName) -> str:
    """Return the key of a recipe that sets the learning rate of a stage."""
    return "polish.affine.lr" if stage == "affine" else "schedule.peak_lr"

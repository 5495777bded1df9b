"""The record of every update, made without waiting for it, and what `monitor` adds to it.

The norm is measured between the sum of the gradients and the optimizer, because some optimizers
overwrite `.grad`.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch import accelerator, registry
from largebatch.distributed.backend import Backend
from largebatch.errors import DivergedError, RecipeError
from largebatch.optim.clipping import gradient_norm
from largebatch.optim.lars import LARS
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.choices import Monitor
from largebatch.tracking.environment import Sampler
from largebatch.tracking.events import (
    SYSTEM,
    Event,
    Note,
    NoteKind,
    StageName,
    StepEvent,
    StopCause,
    System,
    Tracker,
)
from largebatch.tracking.log import record
from largebatch.tracking.noise_scale import RunningNoise
from largebatch.training.loop import Update
from largebatch.training.state import TrainState

SAMPLES = 200
"""Number of measurements of the workers' resources in a run; at most one in each update."""

STOP_CAUSES: tuple[StopCause, ...] = get_args(StopCause)

# For `every_minutes: auto`, the least seconds between two checkpoints, and the largest part of the
# time that they may take.
_AUTO_SECONDS = 120.0
_MOST_OF_TIME = 0.01


class RunLog:
    """Sends the events of a run to its trackers, which worker 0 has."""

    def __init__(self, folder: Path, state: TrainState) -> None:
        self.folder = folder
        self._state = state
        self.trackers: list[Tracker] = []
        self._texts: set[str] = set()

    def emit(self, event: Event) -> None:
        """Send an event to the trackers."""
        record(self.trackers, event)

    def note(self, stage: StageName, text: str, *, kind: NoteKind = "remark") -> None:
        """Emit a note."""
        self.emit(Note(kind=kind, stage=stage, step=self._state.progress.step, text=text))

    def note_once(self, stage: StageName, text: str) -> None:
        """Emit a remark, unless one with this text was emitted in any stage."""
        if text not in self._texts:
            self._texts.add(text)
            self.note(stage, text)


class Requests:
    """Requests of any worker to stop and to save, on which all act after the same update."""

    def __init__(
        self,
        backend: Backend,
        *,
        wants_stop: Callable[[], StopCause | None] = lambda: None,
        save_minutes: float | Literal["auto"] | None = None,
    ) -> None:
        self._backend = backend
        self._wants_stop = wants_stop
        self._save_minutes = save_minutes
        self._saved = time.perf_counter()
        self._cost = 0.0
        self.cause: StopCause | None = None
        """What requested a worker to stop; None if nothing did."""

        self.save_due = False
        """True if the time for a checkpoint has come."""

    def save_is_late(self) -> bool:
        """Return True if the time between two checkpoints is over, by `save_minutes`."""
        if self._save_minutes is None:
            return False
        wait = max(_AUTO_SECONDS, self._cost / _MOST_OF_TIME)
        if self._save_minutes != "auto":
            wait = 60 * self._save_minutes
        return time.perf_counter() - self._saved > wait

    @property
    def stopped(self) -> bool:
        """True if any worker was requested to stop."""
        return self.cause is not None

    def own(self) -> list[float]:
        """Return 1 on worker 0 if it is time to save, and for each cause, 1 for that to stop."""
        late = self._backend.rank == 0 and self.save_is_late()
        stop = self._wants_stop()
        return [float(late), *(float(cause == stop) for cause in STOP_CAUSES)]

    def take(self, save: float, *stops: float) -> None:
        """Set `cause` and `save_due` by the sums of `own` over the workers."""
        causes = [cause for cause, stop in zip(STOP_CAUSES, stops, strict=True) if stop > 0]
        self.cause = self.cause or next(iter(causes), None)
        self.save_due = self.save_due or save > 0

    def share(self) -> None:
        """Sum the requests over the workers, between updates, and take them."""
        sums = torch.tensor(self.own()).to(self._backend.device)
        self._backend.all_reduce(sums).wait()
        self.take(*sums.tolist())  # sync: between updates

    def note_saved(self, *, seconds: float) -> None:
        """Count the time to the next checkpoint from now; `seconds` are those it took."""
        self._saved = time.perf_counter()
        self._cost = seconds
        self.save_due = False


class DivergenceCheck:
    """Detects a loss or gradient that is not finite, or too many skipped updates.

    At most `most_skipped` updates in a row may be skipped, besides overflows in fp16.
    """

    def __init__(
        self, plan: Plan, *, most_skipped: int, in_fp16: bool, emit: Callable[[Note], None]
    ) -> None:
        self._plan = plan
        self._in_fp16 = in_fp16
        self._emit = emit
        self._most_skipped = most_skipped
        self._num_skipped = 0

    def check(
        self, step: StepEvent, *, infinite: float = 0, bad: float = 0, ranks: float = 0
    ) -> None:
        """Raise DivergedError if the run cannot continue after this update.

        `infinite` is above 0 if a gradient is not finite. `bad` is the number of workers whose part
        of the loss is not finite, and `ranks` the sum of their ranks.
        """
        # The key of the recipe that sets the learning rate of this update.
        key = "schedule.peak_lr" if step.step < self._plan.steps else "polish.affine.lr"
        if step.skipped and step.loss_scale < 1:
            raise DivergedError(
                f"the gradients of step {step.step} overflow in fp16 even without loss "
                f"scaling; use precision: bf16 or fp32, or lower {key}"
            )
        if self._in_fp16 and step.skipped:
            return
        if math.isfinite(step.loss) and not infinite:
            self._num_skipped = 0
            return
        what = f"the training loss became {step.loss}"
        if math.isfinite(step.loss):
            what = "a gradient is not finite"
        where = f"; on worker {ranks:.0f}" if bad == 1 else f"; on {bad:.0f} workers" if bad else ""
        text = f"{what} at step {step.step} (learning rate {step.lr:.4g}{where})"
        self._num_skipped += step.skipped
        if step.skipped and self._num_skipped <= self._most_skipped:
            self._emit(
                Note(
                    kind="update skipped",
                    stage=step.stage,
                    step=step.step,
                    text=f"update skipped: {text}",
                )
            )
            return
        raise DivergedError(
            f"{text}; lower {key}"
            + (" or lengthen schedule.warmup" if step.step < self._plan.train_steps else "")
        )


Monitoring = Callable[[nn.Module, Optimizer], Mapping[str, Tensor]]
"""A monitor of another package: returns numbers by name, as 0-d tensors on the model's device.

Called on every worker after each update, whose gradients some optimizers have overwritten by then;
it must not wait for the device. The numbers of worker 0 are recorded.
"""


class Monitors:
    """Measures the fields that the recipe monitors, on every worker.

    To add one, name it in `recipe/choices.py`, measure it here, and give it a field of
    `tracking.events.Step`. One of another package is an entry point: see `Monitoring`.
    """

    def __init__(
        self, monitored: Collection[Monitor], plan: Plan, backend: Backend, state: TrainState
    ) -> None:
        self._plan = plan
        self._state = state
        self._backend = backend
        self._norm = "gradient_norm" in monitored
        self._ratios = "trust_ratios" in monitored
        self._sampler = Sampler(backend.device) if "system" in monitored else None
        self._noise = RunningNoise(plan)
        self._others: dict[str, Monitoring] = {
            name: registry.load("monitors", name)
            for name in monitored
            if name in registry.installed("monitors")
        }
        self._names: list[str] = []
        """Names of the numbers of `_others`; none before the first update."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the parameters whose trust ratios are measured."""
        return tuple(self._adapted())

    @property
    def measure_norm(self) -> Callable[[], Tensor] | None:
        """Function that measures the gradients in train(); None if their norm is not monitored."""
        parameters = self._state.model.parameters
        return (lambda: gradient_norm(parameters())) if self._norm else None

    def measure(self, update: Update) -> Tensor:
        """Return the values of the last update for `fields`, on the device."""
        device = self._backend.device
        parts = [torch.empty(0, device=device)]
        if self._norm:
            assert update.gradient_norm is not None
            parts.append(update.gradient_norm.unsqueeze(0) / update.scaled_by)
        adapted = self._adapted().values()
        if adapted:
            found: dict[Tensor, Tensor] = self._state.updater.optimizer.trust_ratios()  # type: ignore[attr-defined]  # LARS's
            absent = torch.full((), torch.nan, device=device)  # torch.tensor would wait for a GPU
            parts.append(torch.stack([found.get(weight, absent) for weight in adapted]))
        names = []
        for monitor, measure in self._others.items():
            numbers = measure(self._state.model, self._state.updater.optimizer)
            names += [f"{monitor}.{name}" for name in numbers]
            parts += [number.detach().reshape(1) for number in numbers.values()]
        if self._names and names != self._names:
            raise RecipeError(
                f"monitor: {', '.join(self._others)}: expected the same names after every update"
            )
        self._names = names
        return torch.cat(parts)

    def fields(self, values: Sequence[float], *, skipped: bool) -> dict[str, Any]:
        """Return the fields of a step's record for the values of `measure`.

        A skipped update has no trust ratios.
        """
        first = len(values) - len(self._names)  # those of other packages are the last
        used = () if skipped else values[self._norm : first]
        ratios = tuple(float(f"{ratio:.5g}") for ratio in used)
        fields: dict[str, Any] = {"gradient_norm": values[0]} if self._norm else {}
        if ratios:
            fields["trust_ratios"] = ratios
        if self._names:
            fields["measured"] = dict(zip(self._names, values[first:], strict=True))
        return fields

    def sample(self, step: int) -> list[float]:
        """Return a row of SYSTEM for each worker; empty in most updates.

        Only this worker's row is not zero, so the sum over the workers has every row.
        """
        updates = self._plan.updates
        due = step % max(1, updates // SAMPLES) == 0 or step == updates - 1
        if self._sampler is None or not due:
            return []
        rows = [0.0] * (len(SYSTEM) * self._backend.world_size)
        first = len(SYSTEM) * self._backend.rank
        rows[first : first + len(SYSTEM)] = self._sampler.read()
        return rows

    def noise(self, step: int, squares: Sequence[float], *, loss_scale: float) -> dict[str, Any]:
        """Return the noise scale's fields of a step's record; none without the reducer's squares.

        `squares` are summed over the workers.
        """
        return self._noise.add(step, *squares, loss_scale=loss_scale) if squares else {}

    def system(self, step: StepEvent, rows: Sequence[float]) -> System | None:
        """Return the record of the rows of `sample`, summed over the workers; None without any."""
        if not rows:
            return None
        columns = {name: tuple(rows[place :: len(SYSTEM)]) for place, name in enumerate(SYSTEM)}
        return System(stage=step.stage, step=step.step, **columns)  # type: ignore[arg-type]  # all columns

    def _adapted(self) -> dict[str, nn.Parameter]:
        optimizer = self._state.updater.optimizer if self._ratios else None
        if not isinstance(optimizer, LARS):
            return {}
        adapted = {
            weight
            for group in optimizer.param_groups
            if group["adapt"]
            for weight in group["params"]
            if weight.numel()
        }
        named = self._state.model.named_parameters()
        return {name: weight for name, weight in named if weight in adapted}


class Sums(NamedTuple):
    """What the workers sum in every update, as one tensor: a message costs more than its numbers.

    `pack` makes a worker's part, and `unpack` reads the sum.
    """

    loss: float
    bad: float
    """Number of workers whose part of the loss is not finite."""

    ranks: float
    """Sum of the ranks of these workers."""

    infinite: float
    """Number of workers with a gradient that is not finite: all or none, for gradients are sums."""

    requests: Sequence[float]
    """Requests to save and to stop: see `Requests.own`."""

    squares: Sequence[float]
    """Squared lengths from the reducer; empty unless it measures them."""

    usage: Sequence[float]
    """Resources used: see `Monitors.sample`; empty in most updates."""

    @staticmethod
    def pack(
        update: Update, *, rank: int, requests: Sequence[float], usage: Sequence[float]
    ) -> Tensor:
        """Return a worker's part of the sums, on the device; the host does not wait for it."""
        loss = update.loss
        device = loss.device
        bad = (~loss.isfinite()).to(loss.dtype)
        infinite = (~update.finite).to(loss.dtype)
        # One copy, from pinned memory: another one would wait for the update.
        of_host = torch.tensor(
            [*requests, *usage], dtype=loss.dtype, pin_memory=accelerator.is_remote(device)
        )
        copied = of_host.to(device, non_blocking=True)
        squares = loss.new_empty(0) if update.squares is None else update.squares
        of_update = torch.stack([loss, bad, bad * rank, infinite])
        return torch.cat([of_update, copied[: len(requests)], squares, copied[len(requests) :]])

    @classmethod
    def unpack(cls, numbers: Sequence[float], *, num_squares: int) -> Self:
        """Return the numbers of a sum of `pack` by name."""
        loss, bad, ranks, infinite = numbers[:4]
        end_of_requests = 4 + 1 + len(STOP_CAUSES)
        end_of_squares = end_of_requests + num_squares
        return cls(
            loss=loss,
            bad=bad,
            ranks=ranks,
            infinite=infinite,
            requests=numbers[4:end_of_requests],
            squares=numbers[end_of_requests:end_of_squares],
            usage=numbers[end_of_squares:],
        )


class _Outcome(NamedTuple):
    """What every worker knows of an update without a sum, once it is read from the device."""

    skipped: bool
    loss_scale: float
    scaled_by: float
    monitored: Sequence[float]
    """Values of `Monitors.measure`."""

    @staticmethod
    def pack(update: Update, monitored: Tensor) -> Tensor:
        """Return the values on the device; updates that are never skipped have no scales either."""
        if update.skipped is None:
            return monitored
        scales = torch.stack([update.skipped, update.loss_scale, update.scaled_by])
        return torch.cat([scales, monitored])

    @classmethod
    def unpack(cls, numbers: Sequence[float], *, may_skip: bool) -> Self:
        """Return the numbers of `pack` by name."""
        if not may_skip:
            return cls(skipped=False, loss_scale=1.0, scaled_by=1.0, monitored=numbers)
        skipped, loss_scale, scaled_by = numbers[:3]
        return cls(bool(skipped), loss_scale, scaled_by, monitored=numbers[3:])


class _PendingUpdate(NamedTuple):
    """The last update that was counted, whose loss is still being summed."""

    step: StepEvent
    update: Update
    own_values: Tensor
    """The content of `outcome`, on the device; equal on every worker, so that it needs no sum."""

    sums: Tensor
    """The sums over the workers of `StepLog.values_to_sum`; complete after `wait`."""

    wait: Callable[[], None]

    made: torch.Event | None
    """The end of the update on the device; None on a CPU."""

    outcome: _Outcome | None = None
    """None until it is read."""


class StepLog:
    """Emits the records of updates.

    The loss and every worker's requests are summed over the workers, so that all of them act on
    the same values after the same update. On a CPU that is the current update, on a GPU the one
    before: reading a number at once would stall the GPU. `flush` emits the last record.
    """

    def __init__(  # noqa: PLR0913 -- the parts of a record
        self,
        plan: Plan,
        backend: Backend,
        *,
        monitors: Monitors,
        requests: Requests,
        divergence: DivergenceCheck,
        emit: Callable[[StepEvent | System | Note], None],
        count_skipped: Callable[[], None],
    ) -> None:
        self.plan = plan
        self._backend = backend
        self._emit = emit
        self._requests = requests
        self._divergence = divergence
        self._count_skipped = count_skipped
        """Called once for each update that turns out to have been skipped."""

        self.monitors = monitors
        self._pending: _PendingUpdate | None = None
        self._stream = accelerator.stream(backend.device)
        self.is_training = False
        """True from an update until something other than updates is done."""

        self._begun = time.perf_counter()

    def resume_clock(self) -> None:
        """Exclude the time since the last update from the next one."""
        self._begun = time.perf_counter()
        self.is_training = True

    def lap(self) -> float:
        """Return the seconds since the last update; call once after each."""
        seconds = time.perf_counter() - self._begun
        self._begun += seconds
        return seconds

    def add(self, stage: StageName, update: Update, *, seconds: float) -> None:
        """Start the sums of an update and emit the record of the one before; raise as `flush`."""
        sums = self.values_to_sum(update)
        own_values = _Outcome.pack(update, self.monitors.measure(update))
        # The values are read in a stream of their own, after this point of the other one: a read
        # there would wait for what was queued since.
        made = None if self._stream is None else accelerator.event(self._backend.device)
        work = self._backend.all_reduce(sums)
        step = StepEvent(
            stage=stage,
            step=update.step,
            epoch=self.plan.epoch(update.step + 1),
            loss=math.nan,
            mixed=update.step < self.plan.mix_steps,
            lr=update.lr,
            step_seconds=seconds,
            images_per_second=self.plan.batch_at(update.step) / seconds,
        )
        following = _PendingUpdate(step, update, own_values, sums, work.wait, made)
        # The record of the update before, whose sums came while this update was queued.
        try:
            self._record()
        except DivergedError:
            work.wait()  # the run may go on without this stage: no operation may be pending
            self._pending = following
            self.read_own()
            self._pending = None
            raise
        self._pending = following
        if self._stream is None:
            # A CPU has computed the update already, so nothing is gained by reading it later.
            self._record()

    def add_record(self, step: StepEvent) -> None:
        """Emit the record of an update that is known; raise DivergedError if it diverged."""
        self._backend.started()
        self._emit(step)
        self._divergence.check(step)

    def values_to_sum(self, update: Update) -> Tensor:
        """Return this worker's part of the `Sums` of an update, on the device."""
        return Sums.pack(
            update,
            rank=self._backend.rank,
            requests=self._requests.own(),
            usage=self.monitors.sample(update.step),
        )

    def flush(self) -> None:
        """Emit the record of the last update, before something else is done than updates.

        Raises DivergedError if the loss or a gradient is not finite and the update was made, if too
        many updates in a row were skipped, or if fp16 fails without loss scaling too.
        """
        try:
            self._record()
        finally:
            self.is_training = False

    def read_own(self) -> None:
        """Read whether the last update was skipped, and count it then: before the next is."""
        pending = self._pending
        if pending is None or pending.outcome is not None:
            return
        with accelerator.on(self._stream):  # not behind the update that was queued since
            if self._stream is not None and pending.made is not None:
                self._stream.wait_event(pending.made)
            values = pending.own_values.tolist()  # sync: with the update before, on a CPU with this
        outcome = _Outcome.unpack(values, may_skip=pending.update.skipped is not None)
        if outcome.skipped:
            self._count_skipped()
        self._pending = pending._replace(outcome=outcome)

    def _record(self) -> None:
        if self._pending is None:
            return
        self.read_own()
        with accelerator.on(self._stream):
            self._pending.wait()
            numbers = self._pending.sums.tolist()  # sync: with the update before
        pending = self._pending
        self._pending = None
        update = pending.update
        outcome = pending.outcome
        assert outcome is not None
        num_squares = 0 if update.squares is None else len(update.squares)
        sums = Sums.unpack(numbers, num_squares=num_squares)
        self._backend.started()
        self._requests.take(*sums.requests)
        step = replace(
            pending.step,
            skipped=outcome.skipped,
            loss_scale=outcome.loss_scale,
            loss=sums.loss,
            data_seconds=update.data.seconds(),
            reduction_seconds=update.reduction.seconds(),
            **self.monitors.noise(update.step, sums.squares, loss_scale=outcome.scaled_by),
        )
        fields = self.monitors.fields(outcome.monitored, skipped=outcome.skipped)
        self._emit(replace(step, **fields))
        if system := self.monitors.system(step, sums.usage):
            self._emit(system)
        try:
            self._divergence.check(step, infinite=sums.infinite, bad=sums.bad, ranks=sums.ranks)
        except DivergedError:
            self.is_training = False
            raise

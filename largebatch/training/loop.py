"""The training loop. If you read one file of this package, read this one.

A step is: set the learning rate, accumulate the gradients of one global batch, reduce, update. The
loop does not depend on YAML, LARS or the number of workers; runs/build.py combines these. It is a
generator: its caller logs, evaluates and saves between two updates, or stops.

`EagerStep` computes an update, in the order in which one reads it. `GraphedStep` records the same
work on a GPU and replays it (training/graph.py).
"""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from largebatch import accelerator
from largebatch.data.types import Batch
from largebatch.distributed.reducer import Reducer
from largebatch.models.batchnorm import Spans
from largebatch.optim.clipping import clip_factor, gradient_norm
from largebatch.optim.kernels.tabled import Tabled
from largebatch.optim.rates import frozen_weights, hidden_gradients, set_rates
from largebatch.schedules.functions import Schedule
from largebatch.training.losses import Criterion as Criterion  # noqa: PLC0414 -- public names
from largebatch.training.losses import cross_entropy as cross_entropy  # noqa: PLC0414 -- as above

T = TypeVar("T")


class Stopwatch:
    """Sums the time in its `with` blocks: of the host on a CPU, of the current stream on a GPU.

    Nothing waits for a GPU: events are recorded in its stream. What is in a graph is not measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: list[float] = []
        self._events: list[torch.Event] = []

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *_: object) -> None:
        self._mark()

    def _mark(self) -> None:
        if accelerator.is_recording():
            return
        if accelerator.is_remote(self._device):
            self._events.append(accelerator.event(self._device, enable_timing=True))
        else:
            self._seconds.append(time.perf_counter())

    def seconds(self) -> float:
        """Return the sum in seconds; on a GPU all events must have completed."""
        seconds = (end - begin for begin, end in _pairs(self._seconds))
        milliseconds = (begin.elapsed_time(end) for begin, end in _pairs(self._events))
        return sum(seconds) + float(sum(milliseconds)) / 1000


@dataclass(slots=True, kw_only=True)
class Result:
    """What an update computed besides weights. Tensors are 0-d, on the device."""

    loss: Tensor
    """This worker's share of the mean loss over the global batch; shares add up."""

    scaled_by: Tensor
    """Factor of the loss, and so of the measured gradients."""

    loss_scale: Tensor
    """Factor of the loss at the next step; 1 unless training in fp16."""

    finite: Tensor
    """True if all gradients of the global batch were finite."""

    reduction: Stopwatch
    """Time that it waited for the summed gradients after computing its own: the network, and slower
    workers. Sums for BatchNorm, for which a forward pass waits, and in graphs are not included."""

    skipped: Tensor | None = None
    """True if weights, momentum and statistics did not change because gradients were not finite.
    None if updates are never skipped."""

    squares: Tensor | None = None
    """Squared lengths of gradients, if the reducer measures them: see Reducer.squares."""

    gradient_norm: Tensor | None = None
    """Norm of the summed gradients before clipping, still scaled, if the step measures it."""


class Update(NamedTuple):
    """One optimizer update that was just made, or skipped. Tensors are those of its `Result`."""

    step: int
    lr: float
    loss: Tensor
    loss_scale: Tensor
    skipped: Tensor | None
    finite: Tensor

    data: Stopwatch
    """Seconds spent waiting for input."""

    reduction: Stopwatch
    scaled_by: Tensor
    squares: Tensor | None = None
    gradient_norm: Tensor | None = None


class Step(Protocol):
    """Makes optimizer updates: `accumulate` the micro-batches of one, then `finish` it."""

    model: nn.Module
    optimizer: Optimizer
    reducer: Reducer

    frozen: list[nn.Parameter]
    """Weights that the next update leaves as they are, with their momentum."""

    def accumulate(self, batch: Batch, *, first: bool, last: bool) -> None:
        """Add the gradients of a micro-batch: the `first`, the `last` or another one, or both."""

    def finish(self) -> Result:
        """Sum the gradients over the workers, and update the weights."""


@dataclass
class EagerStep:
    """An optimizer update, computed in the order in which one reads it.

    `criterion` sums the losses of the samples, which are divided by `global_batch`: that of all
    workers and micro-batches. `scaler` scales the loss for fp16; without one, nothing is scaled.
    With it, or with `skip_nonfinite`, an update whose summed gradients are not finite is skipped.
    An infinity of one worker is in every sum, so all workers skip the same update. The host does
    not wait for that result, except with optimizers that it must tell: all but LARS and torch's
    fused ones.

    With `clip_norm` gradients are clipped after they are summed: once in an update, and before
    anything of the optimizer reads them. `measure_norm` is called before that, while they are still
    scaled, and without the gradients of `frozen`. `follow` is called at the end of an update, with
    `Result.skipped`.

    >>> from largebatch.distributed.serial import Serial
    >>> model, backend = nn.Linear(4, 2), Serial(torch.device("cpu"))
    >>> reducer = Reducer(model.named_parameters(), backend)
    >>> step = EagerStep(
    ...     model,
    ...     torch.optim.SGD(model.parameters(), lr=0.1),
    ...     nn.CrossEntropyLoss(reduction="sum"),
    ...     reducer,
    ...     Spans(model, backend),
    ...     global_batch=8,
    ... )
    >>> batch = Batch(torch.randn(8, 4), torch.randint(2, (8,)))
    >>> step.accumulate(batch, first=True, last=True)
    >>> bool(step.finish().finite)
    True
    """

    model: nn.Module
    optimizer: Optimizer
    criterion: Criterion
    reducer: Reducer
    spans: Spans
    _: KW_ONLY
    global_batch: int
    scaler: GradScaler = field(default_factory=partial(GradScaler, enabled=False))
    skip_nonfinite: bool = False
    clip_norm: float | None = None
    measure_norm: Callable[[], Tensor] | None = None
    follow: Callable[[Tensor | None], object] = lambda _: None
    frozen: list[nn.Parameter] = field(default_factory=list, init=False)
    result: Result = field(init=False)
    """The result of the update so far."""

    def __post_init__(self) -> None:
        self._one = torch.ones((), device=self.reducer.device)
        self.result = self._new_result(self.scaler.scale(self._one))

    def without_graph(self) -> "EagerStep":
        """Return a step over the same objects that computes one update without a graph."""
        names = [it.name for it in fields(EagerStep) if it.init]
        step = EagerStep(**{name: getattr(self, name) for name in names})
        step.frozen = self.frozen
        return step

    def begin(self) -> None:
        """Begin the result of an update: nothing is computed yet."""
        self.result = self._new_result(self.result.loss_scale)

    def _new_result(self, scale: Tensor) -> Result:
        stopwatch = Stopwatch(self.reducer.device)
        return Result(
            loss=self._one, scaled_by=scale, loss_scale=scale, finite=self._one, reduction=stopwatch
        )

    def accumulate(self, batch: Batch, *, first: bool, last: bool) -> None:
        """Add the gradients of a micro-batch; those of the last one are sent while they come."""
        if first:
            self.begin()
        self.forward_backward(batch, first=first, last=last)

    def finish(self) -> Result:
        """Sum the gradients over the workers, and update weights and running statistics."""
        self.sum_gradients()
        self.update_weights()
        return self.result

    def forward_backward(self, batch: Batch, *, first: bool, last: bool) -> None:
        """Do the forward and the backward pass of a micro-batch."""
        if first:
            self.reducer.zero()
        # By the global batch, and not by the micro-batch: then sums over micro-batches and workers
        # are means over all samples, however these are divided.
        loss = self.criterion(self.model(batch.images), batch.labels) / self.global_batch
        if last:
            # The forward passes of this update are over, so their statistics are complete.
            self.spans.reduce()
            self.reducer.arm()
        self.scaler.scale(loss).backward()
        if first:
            self.result.loss = loss.detach()
        else:
            # In place: a graph of a later micro-batch adds to this memory at every replay.
            self.result.loss += loss.detach()

    def sum_gradients(self) -> None:
        """Finish the sums over the workers and measure the gradients."""
        with self.result.reduction:
            self.reducer.wait()
        self.spans.wait()
        self.result.squares = self.reducer.squares
        measure_norm = self.measure_norm
        if measure_norm is None and self.clip_norm is not None:
            measure_norm = partial(gradient_norm, self.reducer.parameters)
        if measure_norm is not None:
            with hidden_gradients(self.frozen):  # weights that this update does not change
                self.result.gradient_norm = measure_norm()
        if self.clip_norm is not None:
            assert self.result.gradient_norm is not None
            # Clipped here, and not with the optimizer: a graph of the optimizer alone would read
            # the norm where it was when the graph was recorded. The scale is read from the scaler,
            # whose memory stays.
            norm = self.result.gradient_norm / self.scaler.scale(self._one)
            self.reducer.scale(clip_factor(norm, self.clip_norm))

    def update_weights(self) -> None:
        """Update weights and running statistics, unless gradients are not finite."""
        result = self.result
        result.finite = self._are_finite()
        # From here on the weights may be half of an update: no state to save if memory runs out.
        self.reducer.in_passes = False
        skipped = ~result.finite if self.skip_nonfinite else None
        before = self.scaler.scale(self._one)
        with hidden_gradients(self.frozen):
            self._step_optimizer(skipped)
        if self.scaler.is_enabled():
            # A scaler says that it has skipped a step by a smaller scale only.
            skipped = result.loss_scale < before
        result.skipped = skipped
        # After the step, and by the same condition, as the average follows the new weights.
        self.spans.update(skipped)
        self.follow(skipped)

    def _are_finite(self) -> Tensor:
        # LARS reads the gradients once, for their norms too. A scaler would change them after that.
        if isinstance(self.optimizer, Tabled) and not self.scaler.is_enabled():
            are_finite = self.optimizer.examine(self.reducer.parameters)
            if are_finite is not None:
                return are_finite
        return self.reducer.finite()

    def _step_optimizer(self, skipped: Tensor | None) -> None:
        optimizer = self.optimizer
        scaler = self.scaler
        skips_itself = getattr(optimizer, "_step_supports_amp_scaling", False)  # torch's fused ones
        if skipped is not None and skips_itself and not scaler.is_enabled():
            # As GradScaler does it: the optimizer reads on the device whether it skips this step.
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:  # else a step outside of this loop would read them
                del optimizer.grad_scale  # type: ignore[attr-defined]
                del optimizer.found_inf  # type: ignore[attr-defined]
        elif skipped is None or self.result.finite.item():  # sync: only where updates are skipped
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            self.result.loss_scale = scaler.scale(self._one)


def train(
    step: Step,
    batches: Iterator[Batch],
    schedule: Schedule,
    *,
    steps: range,
    accumulation: int,
    seed: Callable[[int], int],
) -> Generator[Update, None, None]:
    """Make one optimizer update for each of `steps`, in order, and yield after each.

    An update takes `accumulation` micro-batches. `seed` gives every update its own seed for dropout
    and the like, so a resumed run needs no generator state.
    """
    device = step.reducer.device
    for number in steps:
        step.model.train()
        accelerator.seed(seed(number), device)
        lr = schedule(number)
        set_rates(step.optimizer, lr, step=number)
        step.frozen = frozen_weights(step.optimizer, step=number)
        step.reducer.in_passes = True
        data = Stopwatch(device)
        for micro in range(accumulation):
            with data:
                # A loader of the user's may yield any pair of images and labels.
                batch = Batch(*next(batches))
            step.accumulate(batch, first=micro == 0, last=micro == accumulation - 1)
        result = step.finish()
        yield Update(
            step=number,
            lr=lr,
            loss=result.loss,
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            finite=result.finite,
            data=data,
            reduction=result.reduction,
            scaled_by=result.scaled_by,
            squares=result.squares,
            gradient_norm=result.gradient_norm,
        )


def _pairs(marks: list[T]) -> Iterator[tuple[T, T]]:
    """Return the start and end of each block."""
    return zip(marks[::2], marks[1::2], strict=True)


def step_seeds(seed: int, rank: int) -> Callable[[int], int]:
    """Return the seed of each step on one worker: counter-based, different on every worker."""
    return lambda step: int(np.random.SeedSequence((seed, rank, step)).generate_state(1)[0])

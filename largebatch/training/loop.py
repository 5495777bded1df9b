"""The training loop. If you read one file of this package, read this one.

A step is: set the rate, accumulate one global batch of gradients, reduce, update. The loop knows
nothing of YAML, of LARS, or of how many workers there are; `run` puts those together. It is a
generator: whoever drives it logs, evaluates and saves between two updates, or stops.
"""

import time
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from largebatch import accelerator
from largebatch.data.types import Batch
from largebatch.distributed.reducer import Reducer
from largebatch.models.batchnorm import Spans
from largebatch.schedules.functions import Schedule
from largebatch.training.loss import Criterion

T = TypeVar("T")


class Stopwatch:
    """Adds up the time in its `with` blocks: a CPU's own, or what the stream of a GPU spends there.

    Nothing waits for a GPU: events are left in its stream. A wait of the host for which the GPU did
    not run out of work counts as nothing, for it costs nothing.
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
        if accelerator.is_remote(self._device):
            self._events.append(accelerator.event(self._device, enable_timing=True))
        else:
            self._seconds.append(time.perf_counter())

    def has_ended(self) -> bool:
        """Return whether the device has come by the last block; nothing waits for it."""
        return all(event.query() for event in self._events[-1:])

    def seconds(self) -> float:
        """Return the sum; a GPU must have come by the last block."""
        seconds = (end - begin for begin, end in _pairs(self._seconds))
        milliseconds = (begin.elapsed_time(end) for begin, end in _pairs(self._events))
        return sum(seconds) + float(sum(milliseconds)) / 1000


class Update(NamedTuple):
    """One optimizer update that was just made, or skipped."""

    step: int
    lr: float
    loss: Tensor
    """This worker's part of the global batch's mean loss, on the device; the parts add up."""

    loss_scale: Tensor
    """What the loss will be multiplied by at the next step, 0-d, on the device; 1 unless training
    in fp16."""

    skipped: Tensor | None
    """Whether weights, momentum and statistics are as they were, for gradients were not finite: a
    0-d bool on the device. None where no update is skipped."""

    finite: Tensor
    """Whether all gradients of the global batch were finite: 0-d, bool, on the device."""

    data: Stopwatch
    """What the update waited for its images."""

    reduction: Stopwatch
    """What it waited for the sums of the gradients when it had computed its own: the network, and
    slower workers. Sums for BatchNorm that a forward pass waits for are not in it."""

    scaled_by: Tensor
    """What the loss was multiplied by, and with it what was measured of the gradients: 0-d, on the
    device."""

    squares: Tensor | None = None
    """What the reducer measured, if it does: see Reducer.squares."""

    gradient_norm: Tensor | None = None
    """What `measure_norm` of train() returned, if there is one."""


def train(  # noqa: PLR0913 -- these are the nouns of training; a config object would only hide them
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterator[Batch],
    schedule: Schedule,
    criterion: Criterion,
    reducer: Reducer,
    spans: Spans,
    scaler: GradScaler,
    *,
    steps: range,
    accumulation: int,
    global_batch: int,
    seed: Callable[[int], int],
    skip_nonfinite: bool = False,
    measure_norm: Callable[[], Tensor] | None = None,
) -> Generator[Update, None, None]:
    """Make one optimizer update for each of `steps`, in order, and yield after each.

    `seed` gives every step its own seed for dropout and the like, so that a resumed run needs no
    generator state. `scaler` scales the loss for fp16 and is disabled otherwise. With it, or with
    `skip_nonfinite`, an update whose summed gradients are not finite is skipped: one worker's
    infinity is in everyone's sum, so that all skip the same step. Nothing waits to know of it, but
    the optimizers that `scaler` waits for: all but LARS and torch's fused ones. `measure_norm` is
    called when the gradients are summed, and scaled still: before the optimizer, which may write
    into them.
    """
    one = torch.ones((), device=reducer.device)
    scale = scaler.scale(one)
    for step in steps:
        model.train()
        accelerator.seed(seed(step), reducer.device)
        lr, scaled_by = schedule(step), scale
        for group in optimizer.param_groups:
            group["lr"] = lr
        reducer.zero()
        loss = torch.zeros((), device=reducer.device)
        data, reduction = Stopwatch(reducer.device), Stopwatch(reducer.device)
        for micro in range(accumulation):
            with data:
                images, labels = next(batches)
            part = criterion(model(images), labels) / global_batch
            if micro == accumulation - 1:
                spans.reduce()
                reducer.arm()
            scaler.scale(part).backward()
            loss += part.detach()
        with reduction:
            reducer.wait()
        finite = reducer.finite()
        norm = None if measure_norm is None else measure_norm()
        skipped = ~finite if skip_nonfinite else None
        if skipped is None or finite.item():  # sync: only where the recipe skips updates
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scale = scaler.scale(one)
        if scaler.is_enabled():
            skipped = scale < scaled_by
        spans.update(skipped)
        measured = data, reduction, scaled_by, reducer.squares, norm
        yield Update(step, lr, loss, scale, skipped, finite, *measured)


def _pairs(marks: list[T]) -> Iterator[tuple[T, T]]:
    """Return each block's begin and end."""
    return zip(marks[::2], marks[1::2], strict=True)


def step_seeds(seed: int, rank: int) -> Callable[[int], int]:
    """Return the seed of each step on one worker: counter-based, different on every worker."""
    return lambda step: int(np.random.SeedSequence((seed, rank, step)).generate_state(1)[0])

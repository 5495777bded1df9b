"""The training loop. If you read one file of this package, read this one.

A step is: set the learning rate, accumulate the gradients of one global batch, reduce, update. The
loop does not depend on YAML, LARS or the number of workers; runs/build.py combines these. It is a
generator: its caller logs, evaluates and saves between two updates, or stops.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from largebatch import accelerator
from largebatch.data.types import Batch
from largebatch.distributed.reducer import Reducer
from largebatch.models.batchnorm import Spans
from largebatch.optim.rates import frozen_weights, hidden_gradients, set_rates
from largebatch.recipe.choices import OffTarget
from largebatch.schedules.functions import Schedule
from largebatch.training.graph import Graphs, UseGraph, uses_graphs

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

Criterion = Callable[[Tensor, Tensor], Tensor]
"""Function (logits N x K, labels N) -> sum of the losses of the samples, 0-d."""


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


class Update(NamedTuple):
    """One optimizer update that was just made, or skipped."""

    step: int
    lr: float
    loss: Tensor
    """This worker's share of the mean loss over the global batch, on the device; shares add up."""

    loss_scale: Tensor
    """Factor of the loss at the next step: 0-d, on the device; 1 unless training in fp16."""

    skipped: Tensor | None
    """True if weights, momentum and statistics did not change because gradients were not finite:
    0-d bool, on the device. None if updates are never skipped."""

    finite: Tensor
    """True if all gradients of the global batch were finite: 0-d bool, on the device."""

    data: Stopwatch
    """Seconds spent waiting for input."""

    reduction: Stopwatch
    """Time that it waited for the summed gradients after computing its own: the network, and slower
    workers. Sums for BatchNorm, for which a forward pass waits, and in graphs are not included."""

    scaled_by: Tensor
    """Factor of the loss, and so of the measured gradients: 0-d, on the device."""

    squares: Tensor | None = None
    """Squared lengths of gradients, if the reducer measures them: see Reducer.squares."""

    gradient_norm: Tensor | None = None
    """Value returned by `measure_norm` of train(), if it is given."""


@dataclass(slots=True)
class Results:
    """What an update computes besides weights: 0-d tensors on the device, as in `Update`."""

    scale: Tensor
    loss: Tensor
    finite: Tensor
    skipped: Tensor | None = None
    squares: Tensor | None = None
    norm: Tensor | None = None


@dataclass(kw_only=True)
class Work:
    """The work of an update on the device, in the parts that a graph can replay (see graph.py).

    `results` are those of the update so far, `reduction` the time of its sums.
    """

    model: nn.Module
    optimizer: Optimizer
    criterion: Criterion
    reducer: Reducer
    spans: Spans
    scaler: GradScaler
    global_batch: int
    skip_nonfinite: bool
    measure_norm: Callable[[], Tensor] | None
    follow: Callable[[Tensor | None], object]

    def __post_init__(self) -> None:
        self._one = torch.ones((), device=self.reducer.device)
        self.results = Results(self.scaler.scale(self._one), self._one, self._one)
        self.reduction = Stopwatch(self.reducer.device)
        self.frozen: list[nn.Parameter] = []
        """Weights that this update leaves as they are."""

    def accumulate(self, batch: Batch, *, first: bool, last: bool) -> None:
        """Add the gradients of a micro-batch; those of the last one are sent while they come."""
        results, reducer = self.results, self.reducer
        if first:
            reducer.zero()
            results.loss = torch.zeros((), device=reducer.device)
        loss = self.criterion(self.model(batch.images), batch.labels) / self.global_batch
        if last:
            self.spans.reduce()
            reducer.arm()
        self.scaler.scale(loss).backward()
        results.loss += loss.detach()

    def sum(self) -> None:
        """Finish the sums over the workers and measure the gradients."""
        results = self.results
        with self.reduction:
            self.reducer.wait()
        self.spans.wait()
        results.squares = self.reducer.squares
        results.norm = None if self.measure_norm is None else self.measure_norm()

    def update(self) -> None:
        """Update weights and running statistics, unless gradients are not finite."""
        results, scaler = self.results, self.scaler
        examine = None if scaler.is_enabled() else getattr(self.optimizer, "examine", None)
        results.finite = self.reducer.finite(examine)  # a scaler would change what LARS examined
        self.reducer.in_passes = False
        skipped = ~results.finite if self.skip_nonfinite else None
        before = scaler.scale(self._one)
        with hidden_gradients(self.frozen):
            self._step(skipped)
        if scaler.is_enabled():
            skipped = results.scale < before
        results.skipped = skipped
        self.spans.update(skipped)
        self.follow(skipped)

    def _step(self, skipped: Tensor | None) -> None:
        results, optimizer, scaler = self.results, self.optimizer, self.scaler
        skips_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        if skipped is not None and skips_itself and not scaler.is_enabled():
            optimizer.grad_scale, optimizer.found_inf = None, skipped.float()  # type: ignore[attr-defined]  # as GradScaler sets them
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        elif skipped is None or results.finite.item():  # sync: only where the recipe skips updates
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            results.scale = scaler.scale(self._one)


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
    follow: Callable[[Tensor | None], object] = lambda _: None,
    graph: UseGraph = False,
    note: Callable[[str], object] = _LOG.info,
) -> Generator[Update, None, None]:
    """Make one optimizer update for each of `steps`, in order, and yield after each.

    `seed` gives every step its own seed for dropout and the like, so a resumed run needs no
    generator state. `scaler` scales the loss for fp16 and is disabled otherwise. With it, or with
    `skip_nonfinite`, an update whose summed gradients are not finite is skipped. An infinity of
    one worker is in every sum, so all workers skip the same step. The host does not wait for that
    result, except with optimizers that it must tell: all but LARS and torch's fused ones.
    `measure_norm` is called after the gradients are summed, while they are still scaled, and before
    the optimizer, which may overwrite them. `follow` is called at the end of an update, with
    `Update.skipped`.

    With `graph` an update is recorded once for each shape of a batch, on a GPU, and replayed with
    the same bits as a result; parts that cannot be recorded run without. `note` gets one sentence:
    which parts these are, and why. With True RecipeError is raised if the passes are among them.
    """
    work = Work(
        model=model,
        optimizer=optimizer,
        criterion=criterion,
        reducer=reducer,
        spans=spans,
        scaler=scaler,
        global_batch=global_batch,
        skip_nonfinite=skip_nonfinite,
        measure_norm=measure_norm,
        follow=follow,
    )
    parts = Graphs(work, graph, note) if uses_graphs(graph, reducer.device) else work
    for step in steps:
        model.train()
        accelerator.seed(seed(step), reducer.device)
        lr, scaled_by = schedule(step), work.results.scale
        set_rates(optimizer, lr, step=step)
        work.frozen = frozen_weights(optimizer, step=step)
        work.results = Results(scaled_by, scaled_by, scaled_by)
        data, work.reduction = Stopwatch(reducer.device), Stopwatch(reducer.device)
        for micro in range(accumulation):
            reducer.in_passes = True
            with data:
                batch = Batch(*next(batches))
            parts.accumulate(batch, first=micro == 0, last=micro == accumulation - 1)
        parts.sum()
        parts.update()
        found = work.results
        yield Update(
            step, lr, found.loss, found.scale, found.skipped, found.finite,
            data, work.reduction, scaled_by, found.squares, found.norm,
        )  # fmt: skip


def _pairs(marks: list[T]) -> Iterator[tuple[T, T]]:
    """Return the start and end of each block."""
    return zip(marks[::2], marks[1::2], strict=True)


def step_seeds(seed: int, rank: int) -> Callable[[int], int]:
    """Return the seed of each step on one worker: counter-based, different on every worker."""
    return lambda step: int(np.random.SeedSequence((seed, rank, step)).generate_state(1)[0])


def cross_entropy(*, smoothing: float, off_target: OffTarget) -> Criterion:
    """Return a criterion that sums the smoothed cross-entropy over the samples of a batch.

    With K classes and smoothing a (Szegedy et al. 2016, arXiv:1512.00567, section 7), `all` gives
    every class a/K and adds 1 - a to the label, as PyTorch and TensorFlow do; `others` gives
    a/(K-1) to each other class and 1 - a to the label, as MXNet does. Raises ValueError if
    smoothing is not in [0, 1); the criterion above 1 - 1/K.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), got {smoothing:g}")
    if off_target not in get_args(OffTarget):
        known = ", ".join(get_args(OffTarget))
        raise ValueError(f"off_target must be one of {known}, got {off_target!r}")

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        classes = logits.shape[-1]
        if smoothing > 1 - 1 / classes:
            raise ValueError(
                f"smoothing ({smoothing:g}) makes the labelled one of {classes} classes the least "
                "likely"
            )
        mass = smoothing
        if smoothing and off_target == "others":
            mass = smoothing * classes / (classes - 1)
        return F.cross_entropy(logits, labels, label_smoothing=mass, reduction="sum")

    return criterion

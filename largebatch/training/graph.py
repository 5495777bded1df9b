"""An update as one CUDA graph: recorded once for each shape of a batch, then replayed.

A small device batch is bound by the host, which launches hundreds of kernels; a graph is one
launch. The first two updates of a shape run as always, because libraries choose kernels and
optimizers create their state in them; during the second it is noted where the host waits for the
device. The third is recorded, part by part, and replayed from then on:

    passes      forward and backward pass of a micro-batch, a graph for each place in an update:
                the first one writes gradients, later ones add to them, the last one sends them
    sums        sums over the workers (NCCL's alone can be recorded), and their check
    update      the optimizer, the loss scale, the running statistics, the average of an EMA

One graph has as many of them as can be recorded; the rest runs after it. All graphs of a `train()`
share memory. A batch is copied into the memory that the graph reads: on the device that takes
microseconds, and copies from the host overlap with updates before (data/decoders/prefetch.py).

What a replay must find is on the device: gradients, moments, statistics, and the numbers of the
optimizer, which `refresh` copies there. Random numbers are those of the seed that is set before.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from largebatch import accelerator
from largebatch.data.types import Batch
from largebatch.distributed.backend import in_graphs
from largebatch.distributed.reducer import Held
from largebatch.errors import RecipeError, clip
from largebatch.models.wrappers import needs_host, watch_host
from largebatch.optim.rates import hidden_gradients

if TYPE_CHECKING:
    from largebatch.training.loop import Results, Stopwatch, Work

UseGraph = Literal["auto", True, False]

NOTHING, PASSES, SUMS, EVERYTHING = range(4)
"""How much of an update is recorded."""

_WARM_UP = 2  # updates of a shape before it is recorded

_SHAPES = 4  # shapes whose graphs are kept

_REST = {
    NOTHING: "updates run without a CUDA graph",
    PASSES: "forward and backward passes are CUDA graphs; sums and the update follow",
    SUMS: "an update is a CUDA graph up to the optimizer, which follows",
    EVERYTHING: "an update is one CUDA graph",
}


@dataclass(slots=True)
class _Part:
    """A recorded part of an update, and what the host must know after it was replayed."""

    graph: accelerator.Graph
    depth: int
    held: Held
    is_summed: bool
    results: "Results"
    counts: list[int]
    """Spans that were counted."""


@dataclass(slots=True)
class _Shape:
    form: object
    updates: int = 0
    batch: Batch | None = None
    """The memory that the graphs read."""

    changed: Callable[[], str | None] = lambda: None
    """Names what the model has changed on the host since the second update."""

    parts: dict[tuple[bool, bool], _Part] = field(default_factory=dict)
    """By whether the micro-batch is the first and the last one of an update."""


class Graphs:
    """Replays the parts of an update that it has recorded."""

    def __init__(self, work: "Work", use: UseGraph, note: Callable[[str], object]) -> None:
        self._work, self._use, self._note = work, use, note
        self._device = work.reducer.device
        self._shapes: dict[object, _Shape] = {}
        self._shape = _Shape(None)
        self._read: list[object] = []
        self._depth, self._reason, self._noted, self._drops = EVERYTHING, "", -1, 0
        over_workers = [it for it in work.spans.groups if not in_graphs(it)]
        if problem := needs_host(work.model):
            self._limit(NOTHING, problem)
        elif over_workers:
            self._limit(NOTHING, "a BatchNorm span is summed over workers, and not by NCCL")
        elif not in_graphs(work.spans.backend) or not in_graphs(work.reducer.workers):
            self._limit(PASSES, "only NCCL's sums can be recorded")

    def replay(self, batch: Batch, stopwatch: "Stopwatch", *, first: bool, last: bool) -> bool:
        """Do the work of a micro-batch, or of the last and the update; False to do it eagerly."""
        if self._depth == NOTHING:
            return False
        if first:
            self._begin(batch)
        shape, key = self._shape, (first, last)
        if shape.updates < _WARM_UP:
            return False
        if shape.updates == _WARM_UP:
            self._watch(batch, stopwatch, *key)
            return True
        if shape.batch is None or shape.form != _form(batch):
            return False  # a smaller last micro-batch
        if key not in shape.parts and not self._record(shape, stopwatch, *key):
            return False
        for kept, given in zip(shape.batch, batch, strict=True):
            kept.copy_(given, non_blocking=True)
        self._run(shape.parts[key], stopwatch, last=last)
        return True

    def _begin(self, batch: Batch) -> None:
        """Choose the graphs of an update; drop all if they would use outdated memory."""
        optimizer, is_whole = self._work.optimizer, self._depth == EVERYTHING
        weights = chain(*(group["params"] for group in optimizer.param_groups))
        read = self._can_replay() if is_whole else None
        now = [accelerator.Graph.failures, _addresses(weights)]
        if is_whole:
            states = chain(*(state.values() for state in optimizer.state.values()))
            now += [read, _addresses(states)]
        if now != self._read[: len(now)] or (is_whole and read is None):
            warm_up = {key: it for key, it in self._shapes.items() if it.updates < _WARM_UP}
            self._drops += len(warm_up) < len(self._shapes)
            self._shapes, self._read = warm_up, now
        if self._drops > _SHAPES:
            self._drops = 0
            self._limit(SUMS if is_whole else NOTHING, "tensors or settings change between updates")
        form = _form(batch)
        key = form, len(self._work.frozen)
        if key not in self._shapes and self._pool() and accelerator.is_crowded(self._device):
            self._shapes.clear()  # its first updates cannot use the memory of other graphs
        self._shape = self._shapes.pop(key, _Shape(form))
        self._shapes[key] = self._shape  # the newest is the last
        if len(self._shapes) > _SHAPES:
            self._shapes.pop(next(iter(self._shapes)))
        self._shape.updates += 1
        if self._shape.updates == _WARM_UP + 1 and self._depth:
            self._shape.batch = Batch(*map(torch.empty_like, batch))

    def _watch(self, batch: Batch, stopwatch: "Stopwatch", first: bool, last: bool) -> None:  # noqa: FBT001 -- a key
        """Do the work as always, and note what cannot be recorded of it."""
        work, self._shape.changed = self._work, watch_host(self._work.model)
        with accelerator.passes(self._device, self._shape.changed) as found:
            work.accumulate(batch, first=first, last=last)
        if found:
            self._limit(NOTHING, found[0])
        if not last:
            return
        with accelerator.waits(self._device) as found:
            work.sum(stopwatch)
        if found:
            self._limit(PASSES, found[0])
        with accelerator.waits(self._device) as found:
            work.update()
        name, optimizer = type(work.optimizer).__name__, work.optimizer
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        if self._can_replay() is None:
            self._limit(SUMS, f"{name} takes its numbers from the host here")
        elif any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)):
            self._limit(SUMS, f"{name} has hooks, which may decide on the host")
        if found:
            self._limit(SUMS, found[0])

    def _record(self, shape: _Shape, stopwatch: "Stopwatch", first: bool, last: bool) -> bool:  # noqa: FBT001 -- a key
        """Record a part; nothing is computed. Return False if that failed, without a trace.

        Raises torch.OutOfMemoryError, also without a trace.
        """
        work, reducer, spans = self._work, self._work.reducer, self._work.spans
        held, counts, results = [*reducer.held()], spans.counts, work.results
        assert shape.batch is not None
        handled = sys.exception()  # by the caller
        if name := shape.changed():
            self._limit(NOTHING, f"{name} changes between updates, which a replay would not see")
            return False
        try:
            graph = accelerator.Graph(self._device, self._pool())
            work.results = replace(results)
            depth = self._depth if last else PASSES
            with graph.record():
                work.accumulate(shape.batch, first=first, last=depth >= SUMS)
                if depth >= SUMS:
                    work.sum(stopwatch)
                if depth == EVERYTHING:
                    work.update()
            more = [after - before for after, before in zip(spans.counts, counts, strict=True)]
            part = _Part(graph, depth, reducer.held(), spans.is_summed, work.results, more)
            shape.parts[first, last] = part
        except Exception as problem:  # torch and Triton raise all kinds
            self._shapes.clear()
            if work.scaler.is_enabled():
                work.scaler._per_optimizer_states.clear()  # gradients are not unscaled
            cause: BaseException | None = problem
            while cause is not None and cause is not handled:
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None  # after it a graph may be invalid
                cause = cause.__context__
            reason = clip(" ".join(f"{type(problem).__name__}: {problem}".split()), 200)
            self._limit(NOTHING, f"recording failed ({reason})")
            return False
        finally:
            reducer.hold(held)
            reducer.in_passes = True
            spans.counts, spans.is_summed, work.results = counts, False, results
        if last:
            self._say()
        return True

    def _run(self, part: _Part, stopwatch: "Stopwatch", *, last: bool) -> None:
        work, reducer, spans = self._work, self._work.reducer, self._work.spans
        reducer.hold(part.held)
        reducer.in_passes = part.depth < EVERYTHING
        if part.depth == EVERYTHING:
            with hidden_gradients(work.frozen):
                work.optimizer.refresh()  # type: ignore[attr-defined]  # see _can_replay
        part.graph.replay()
        work.results = replace(part.results)
        spans.counts = [a + b for a, b in zip(spans.counts, part.counts, strict=True)]
        spans.is_summed = part.is_summed
        if not last:
            return
        if part.depth < SUMS:
            spans.reduce()
            reducer.arm(complete=True)
            work.sum(stopwatch)
        if part.depth < EVERYTHING:
            work.update()
        for it in fields(work.results):  # the next replay overwrites them
            value = getattr(work.results, it.name)
            if value is not None and (it.name != "scale" or work.scaler.is_enabled()):
                setattr(work.results, it.name, value.clone())

    def _pool(self) -> object:
        """Return the memory of the graphs; None without any, for torch then refuses it."""
        every = chain.from_iterable(shape.parts.values() for shape in self._shapes.values())
        return next((part.graph.pool for part in every), None)

    def _can_replay(self) -> object:
        """Return what a graph of the optimizer's step reads; None if it cannot be in a graph.

        An optimizer that can be has its numbers on the device. It has `can_replay`, and `refresh`,
        which copies them there before a replay, and the addresses of the gradients.
        """
        with hidden_gradients(self._work.frozen):
            return getattr(self._work.optimizer, "can_replay", lambda: None)()

    def _limit(self, depth: int, reason: str) -> None:
        if depth < self._depth:
            self._depth, self._reason = depth, reason
        if depth == NOTHING:
            self._say()

    def _say(self) -> None:
        """Note how much is recorded; raise RecipeError if a graph is required and there is none."""
        if self._depth == NOTHING and self._use is True:
            raise refused(self._reason)
        if self._noted != self._depth:
            self._noted = self._depth
            self._note(_REST[self._depth] + (f": {self._reason}" if self._reason else ""))


def refused(reason: str) -> RecipeError:
    """Return the error of a graph that is required and cannot be."""
    return RecipeError(f"execution.graph: true: {reason}; set graph: auto, or false")


def require_graphs(use: UseGraph, device: torch.device, *, protocol: bool = False) -> None:
    """Raise RecipeError if a graph is required and the device or a protocol has none."""
    if use is True and protocol:
        raise refused("learners of a protocol send each gradient by itself")
    if use is True and device.type not in accelerator.GRAPHS:
        raise refused(f"there are no graphs on a device of type {device.type}")


def _addresses(tensors: Iterable[object]) -> list[int]:
    return [it.data_ptr() for it in tensors if isinstance(it, torch.Tensor)]


def _form(batch: Batch) -> object:
    return tuple((it.shape, it.dtype, it.stride()) for it in batch)

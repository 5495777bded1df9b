"""An update as one CUDA graph: recorded once for each shape of a batch, then replayed.

A small device batch is bound by the host, which launches hundreds of kernels; a graph is one
launch. The first two updates of a shape run as always, because libraries choose kernels and
optimizers create their state in them; during the second it is noted where the host waits for the
device. The third is recorded, part by part, and replayed from then on:

    passes      forward and backward pass of a micro-batch, a graph for each place in an update:
                the first one writes gradients, later ones add to them, the last one sends them
    sums        sums over the workers (NCCL's alone can be recorded)
    optimizer   check of gradients, its step, loss scale, running statistics, average of an EMA

One graph has all of them, or as many from the first as can be recorded. The optimizer has its own
graph where passes or sums cannot be recorded. All graphs of a `train()` share memory. A batch is
copied into the memory that the graph reads: on the device that takes microseconds, and copies from
the host overlap with updates before (data/decoders/prefetch.py).

What a replay must find is on the device: gradients, moments, statistics, and the numbers of the
optimizer, which `refresh` copies there. Random numbers are those of the seed that is set before.
"""

import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from largebatch import accelerator, proof
from largebatch.data.types import Batch
from largebatch.distributed.agreement import agree
from largebatch.distributed.backend import in_graphs
from largebatch.distributed.reducer import Held
from largebatch.errors import RecipeError, clip
from largebatch.models.wrappers import is_on_several_devices, needs_host, watch_host
from largebatch.optim.rates import hidden_gradients

if TYPE_CHECKING:
    from largebatch.training.loop import Work

UseGraph = Literal["auto", True, False]

_PARTS = PASSES, SUMS, OPTIMIZER = "forward and backward", "sums of gradients", "optimizer"
"""Parts of an update in their order, by their names in the log."""

_WARM_UP = 2  # updates of a shape before it is recorded

_SHAPES = 4  # shapes whose graphs are kept


@dataclass(slots=True)
class _Graph:
    """Recorded parts of an update, and what the host must know after they were replayed."""

    graph: accelerator.Graph
    parts: Collection[str]
    held: Held
    results: dict[str, Tensor]
    """Values of `Results` in its memory."""

    is_summed: bool
    before: list[int]
    """Spans that were counted before; the sums over workers are of this number of them."""

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

    graphs: dict[object, _Graph] = field(default_factory=dict)
    """By whether the micro-batch is the first one of an update, and parts; or by OPTIMIZER."""


class Graphs:
    """Does the work of an update in place of `Work`: replays the parts that it has recorded."""

    def __init__(self, work: "Work", use: UseGraph, note: Callable[[str], object]) -> None:
        self._work, self._use, self._note = work, use, note
        self._device = work.reducer.device
        self._shapes: dict[object, _Shape] = {}
        self._shape = _Shape(None)
        self._replayed: Collection[str] = ()  # parts, since the last micro-batch began
        self._computed: set[str] = set()  # results of this update in the memory of graphs
        self._excluded: dict[str, str] = {}  # parts that are not recorded, and why
        self._read: list[object] = []
        self._noted, self._drops = "", 0
        self._has_watched = False  # True from the second update of a shape to the next one
        over_workers = [it for it in work.spans.groups if not in_graphs(it)]
        if is_on_several_devices(work.model):
            self._exclude(OPTIMIZER, "the model is on several devices")
        if problem := needs_host(work.model):
            self._exclude(PASSES, problem)
        elif over_workers:
            self._exclude(PASSES, "a BatchNorm span is summed over workers, and not by NCCL")
        elif not in_graphs(work.spans.backend) or not in_graphs(work.reducer.workers):
            self._exclude(SUMS, "only NCCL's sums can be recorded")
        self._agree()

    def accumulate(self, batch: Batch, *, first: bool, last: bool) -> None:
        """Do the passes of a micro-batch; a graph of the last one may do the rest too."""
        work, self._replayed = self._work, ()
        if first:
            self._computed = set()
            self._begin(batch)
        shape = self._shape
        parts = [*takewhile(lambda it: it not in self._excluded, _PARTS if last else _PARTS[:1])]
        key = first, *parts
        if parts and shape.batch is not None and shape.form == _form(batch):
            passes = partial(work.accumulate, shape.batch, first=first, last=SUMS in parts)
            graph = shape.graphs.get(key) or self._record(key, parts, passes)
            if graph is not None and (not last or graph.before == work.spans.counts):
                for kept, given in zip(shape.batch, batch, strict=True):
                    kept.copy_(given, non_blocking=True)
                self._replay(graph)
                return
        # Not recorded, or a smaller micro-batch now or before the last.
        self._do(PASSES, partial(work.accumulate, batch, first=first, last=last))

    def sum(self) -> None:
        """Finish the sums over the workers, unless a graph did."""
        if SUMS in self._replayed:
            return
        if PASSES in self._replayed:
            self._work.spans.reduce()
            self._work.reducer.arm(complete=True)
        self._do(SUMS, self._work.sum)

    def update(self) -> None:
        """Update weights and running statistics, unless a graph did."""
        work = self._work
        if OPTIMIZER not in self._replayed and not self._replay_optimizer():
            self._do(OPTIMIZER, work.update)
        for name in self._computed:  # the next replay overwrites them
            setattr(work.results, name, getattr(work.results, name).clone())
        self._has_watched = self._shape.updates == _WARM_UP

    def _begin(self, batch: Batch) -> None:
        """Choose the graphs of an update."""
        self._shape = _Shape(None)
        if self._has_watched:  # which may have found something on one worker
            self._has_watched = False
            self._agree()
        if {PASSES, OPTIMIZER} <= self._excluded.keys():
            self._say()
            return
        self._drop_outdated()
        form = _form(batch)
        key = form, len(self._work.frozen)
        if key not in self._shapes and self._pool() and self._is_crowded():
            self._shapes.clear()  # its first updates cannot use the memory of other graphs
        self._shape = self._shapes.pop(key, _Shape(form))
        self._shapes[key] = self._shape  # the newest is the last
        if len(self._shapes) > _SHAPES:
            self._shapes.pop(next(iter(self._shapes)))
        self._shape.updates += 1
        if self._shape.updates == _WARM_UP + 1 and PASSES not in self._excluded:
            self._shape.batch = Batch(*map(torch.empty_like, batch))

    def _drop_outdated(self) -> None:
        """Drop all graphs if they would use outdated memory."""
        optimizer, has_own = self._work.optimizer, OPTIMIZER not in self._excluded
        weights = chain(*(group["params"] for group in optimizer.param_groups))
        statistics = chain(*(layer._buffers.values() for layer in self._work.spans.layers))
        read = self._can_replay() if has_own else None
        now = [accelerator.Graph.failures, _addresses(weights), _addresses(statistics)]
        if has_own:
            states = chain(*(state.values() for state in optimizer.state.values()))
            now += [read, _addresses(states)]
        if now != self._read[: len(now)] or (has_own and read is None):
            warm_up = {key: it for key, it in self._shapes.items() if it.updates < _WARM_UP}
            self._drops += len(warm_up) < len(self._shapes)
            self._shapes, self._read, self._shape = warm_up, now, _Shape(None)
        if self._drops > _SHAPES:
            self._drops, part = 0, OPTIMIZER if has_own else PASSES
            self._exclude(part, "tensors or settings change between updates")

    def _do(self, part: str, do: Callable[[], object]) -> None:
        """Do a part without a graph; in the second update of a shape, note what prevents one."""
        if self._shape.updates != _WARM_UP:
            do()
            return
        watch = accelerator.waits(self._device)
        if part == PASSES:
            self._shape.changed = watch_host(self._work.model)
            watch = accelerator.passes(self._device, self._shape.changed)
        elif part == OPTIMIZER and self._can_replay() is None:
            name = type(self._work.optimizer).__name__
            self._exclude(OPTIMIZER, f"{name} needs the host here, or has hooks")
        with watch as found:
            do()
        if found:
            self._exclude(part, found[0])

    def _record(
        self, key: object, parts: list[str], passes: Callable[[], object] = lambda: None
    ) -> _Graph | None:
        """Record parts on all workers; nothing is computed. Return None if that failed on any.

        Nothing then remains of it. Raises the error of a device without memory, also without a
        trace.
        """
        if not self._shape.updates:  # dropped in this update
            return None
        before = set(self._excluded)
        self._record_here(key, parts, passes)
        self._agree()
        if before != self._excluded.keys():
            self._shapes.clear()
            self._shape = _Shape(None)
            accelerator.Graph.share_failures(1)  # on some worker
            return None
        if parts[-1] == [it for it in _PARTS if it not in self._excluded][-1]:
            self._say()
        return self._shape.graphs[key]

    def _record_here(self, key: object, parts: list[str], passes: Callable[[], object]) -> None:
        """Record parts on this worker, or exclude the one that cannot be recorded."""
        work, reducer, spans, shape = self._work, self._work.reducer, self._work.spans, self._shape
        held, counts, is_summed = [*reducer.held()], spans.counts, spans.is_summed
        handled = sys.exception()  # by the caller
        if PASSES in parts and (name := shape.changed()):
            self._exclude(PASSES, f"{name} changes between updates, which a replay would not see")
            return
        results, part = work.results, parts[0]
        steps = {PASSES: passes, SUMS: work.sum, OPTIMIZER: work.update}
        try:
            work.results = replace(results)
            graph = accelerator.Graph(self._device, self._pool())
            with graph.record():
                for part in parts:
                    steps[part]()
            more = [after - before for after, before in zip(spans.counts, counts, strict=True)]
            values = {it.name: getattr(work.results, it.name) for it in fields(results)}
            new = {name: it for name, it in values.items() if it is not getattr(results, name)}
            made = _Graph(graph, parts, reducer.held(), new, spans.is_summed, counts, more)
            shape.graphs[key] = made
        except Exception as problem:  # torch and Triton raise all kinds
            self._shapes.clear()
            self._shape = _Shape(None)
            if work.scaler.is_enabled():
                work.scaler._per_optimizer_states.clear()  # gradients are not unscaled
            cause: BaseException | None = problem
            while cause is not None and cause is not handled:
                if accelerator.is_out_of_memory(cause):
                    raise cause from None  # after it a graph may be invalid
                cause = cause.__context__
            reason = clip(" ".join(f"{type(problem).__name__}: {problem}".split()), 200)
            self._exclude(part, f"recording failed ({reason})")
        finally:
            reducer.hold(held)
            reducer.in_passes = True
            spans.counts, spans.is_summed, work.results = counts, is_summed, results

    def _replay(self, graph: _Graph) -> None:
        work, reducer, spans = self._work, self._work.reducer, self._work.spans
        reducer.hold(graph.held)
        reducer.in_passes = OPTIMIZER not in graph.parts
        if not reducer.in_passes:
            with hidden_gradients(work.frozen):
                work.optimizer.refresh()  # type: ignore[attr-defined]  # see _can_replay
        graph.graph.replay()
        work.results = replace(work.results, **graph.results)
        spans.counts = [a + b for a, b in zip(spans.counts, graph.counts, strict=True)]
        spans.is_summed = graph.is_summed
        self._replayed = graph.parts
        self._computed |= graph.results.keys()

    def _replay_optimizer(self) -> bool:
        """Replay the optimizer's own graph; return False to do without."""
        work = self._work
        is_apart = SUMS in self._excluded and OPTIMIZER not in self._excluded
        if not is_apart or self._shape.updates <= _WARM_UP:
            return False
        if PASSES not in self._replayed:
            self._drop_outdated()  # the passes may have moved the weights
        graph = self._shape.graphs.get(OPTIMIZER) or self._record(OPTIMIZER, [OPTIMIZER])
        if graph is None:
            return False
        pairs = zip(graph.held, work.reducer.held(), strict=True)
        both = [(kept[name], it) for (kept, _), (given, _) in pairs for name, it in given.items()]
        if moved := [(kept, given) for kept, given in both if given is not kept]:
            torch._foreach_copy_([kept for kept, _ in moved], [given for _, given in moved])
        self._replay(graph)
        return True

    def _pool(self) -> object:
        """Return the memory of the graphs; None without any, for torch then refuses it."""
        every = chain.from_iterable(shape.graphs.values() for shape in self._shapes.values())
        return next((each.graph.pool for each in every), None)

    def _can_replay(self) -> object:
        """Return what a graph of the optimizer's step reads; None if it cannot be in a graph.

        An optimizer that can be has its numbers on the device. It has `can_replay`, and `refresh`,
        which copies them there before a replay, and the addresses of the gradients. Hooks may
        decide on the host.
        """
        optimizer = self._work.optimizer
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        if any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)):
            return None
        with hidden_gradients(self._work.frozen):
            return getattr(optimizer, "can_replay", lambda: None)()

    def _exclude(self, part: str, reason: str) -> None:
        """Do without a graph of a part on this worker; `_agree` follows on all of them."""
        if part in self._excluded:
            return
        self._excluded[part] = reason
        if part == PASSES:
            self._exclude(SUMS, "they follow the passes")

    def _agree(self) -> None:
        """Exclude what any worker excludes; raise RecipeError on all if that is required.

        NCCL waits without end for a worker whose graphs are different. So every worker calls this
        at the same places: before the first update, after the second one of a shape, which decides
        what is recorded, and after a recording, before it is replayed.
        """
        own = {part: self._excluded.get(part) for part in _PARTS}
        for part, reason in agree(own, self._work.reducer.workers, self._device).items():
            if reason is not None:
                self._exclude(part, reason)
        if self._use is True and PASSES in self._excluded:
            raise refused(self._excluded[PASSES])

    def _is_crowded(self) -> bool:
        """Return True if graphs leave too little memory for others on any worker."""
        reason = "crowded" if accelerator.is_crowded(self._device) else None
        return any(agree({"memory": reason}, self._work.reducer.workers, self._device).values())

    def _say(self) -> None:
        """Note which parts of an update are not recorded, and why."""
        parts = [f"{it} ({self._excluded[it]})" for it in _PARTS if it in self._excluded]
        rest = f"parts of an update without a CUDA graph: {'; '.join(parts)}"
        text = rest if parts else "an update is one CUDA graph"
        if text != self._noted:
            self._noted = text
            self._note(text)


def refused(reason: str) -> RecipeError:
    """Return the error of a graph that is required and cannot be."""
    return RecipeError(f"execution.graph: true: {reason}; set graph: auto, or false")


def uses_graphs(use: UseGraph, device: torch.device) -> bool:
    """Return True if updates are recorded; raise RecipeError if that is required and refused."""
    require_graphs(use, device)
    if use is False or device.type not in accelerator.GRAPHS:
        return False
    reason = proof.refusal(proof.GRAPH, device)
    if reason is not None and use is True:
        raise refused(reason)
    return reason is None


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

"""An update as one CUDA graph: recorded once for each shape of a batch, then replayed.

A small device batch is bound by the host, which launches hundreds of kernels; a graph is one
launch. The first two updates of a shape run as always, because libraries choose kernels and
optimizers create their state in them; during the second it is noted where the host waits for the
device. The third is recorded, part by part (`Part`), and replayed from then on.

One graph has all parts, or as many from the first as can be recorded. The optimizer has its own
graph where passes or sums cannot be recorded. All graphs of a step share memory. A batch is copied
into the memory that the graph reads: on the device that takes microseconds, and copies from the
host overlap with updates before (data/decoders/prefetch.py).

What a replay must find is on the device, and stays where it was: the gradients in the buffers of
the reducer, weights, moments, statistics, and the numbers of the optimizer, which `refresh` sends
there. Random numbers are those of the seed that is set before.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partial
from typing import Any, Literal

import torch

from largebatch import accelerator, proof
from largebatch.accelerator import Replayable
from largebatch.data.types import Batch
from largebatch.distributed.agreement import agree
from largebatch.errors import RecipeError, clip
from largebatch.models.wrappers import is_on_several_devices, needs_host, watch_host
from largebatch.optim import replay
from largebatch.optim.rates import hidden_gradients
from largebatch.training.loop import EagerStep, Result

_LOG = logging.getLogger(__name__)

UseGraph = Literal["auto", True, False]


class Part(Enum):
    """A part of an update, in their order, with its name in the log."""

    PASSES = "forward and backward"
    """Both passes of a micro-batch. An update has a graph for each place of a micro-batch: the
    first one writes gradients, later ones add to them, the last one sends them."""

    SUMS = "sums of gradients"
    """Sums over the workers; NCCL's alone can be recorded."""

    OPTIMIZER = "optimizer"
    """The check of the gradients, the optimizer's step, the loss scale, running statistics, and the
    average of an EMA."""


WARM_UP = 2
"""Updates of a shape without a graph. Libraries choose kernels and optimizers create their state in
the first. Whether the host waits for the device is found in the second, in which nothing is done
for the first time."""

# Shapes whose graphs are kept. A run has few at a time: one or two image sizes, each with a whole
# and a smaller last micro-batch. All of a graph's intermediate results stay allocated.
_SHAPES = 4


@dataclass(slots=True)
class _RecordedUpdate:
    """Recorded parts of an update, and what the host must know after they were replayed."""

    graph: accelerator.Graph
    parts: list[Part]
    results: dict[str, Any]
    """Fields of `Result` that the recording has computed, in the memory of the graph."""

    before: list[int]
    """Spans that were counted before; the sums over workers are of this number of them."""

    after: list[int]
    """Spans that were counted after."""

    has_sums: bool
    """True if the moments of the spans are summed over the workers, and not used yet."""


@dataclass(slots=True)
class _BatchShape:
    form: object
    updates: int = 0
    batch: Batch | None = None
    """The memory that the graphs read."""

    changed: Callable[[], str | None] = lambda: None
    """Names what the model has changed on the host since the second update."""

    reads: dict[str, object] = field(default_factory=dict)
    """What the graphs have fixed, by its name; the same in every update that is replayed."""

    graphs: dict[object, _RecordedUpdate] = field(default_factory=dict)
    """By whether the micro-batch is the first one of an update, and parts."""


@dataclass(kw_only=True)
class GraphedStep(EagerStep):
    """An update on a GPU, recorded once for each shape of a batch and replayed.

    It has the same bits as a result. Parts that cannot be recorded run without a graph, on all
    workers; `note` gets one sentence: which parts these are, and why. With `required` RecipeError
    is raised if the passes are among them.

    Gradients stay in the buffers of the reducer. Weights, statistics, the optimizer's state and its
    settings besides the learning rate must stay as they are too: ValueError is raised if other code
    replaces one after a graph was recorded, or freezes a weight. A new step records again.

    A replay calls no Python. `criterion`, `measure_norm` and `follow` are called while an update is
    recorded, and what the host does in them then is not repeated; nor does a replay see settings of
    the model or the criterion that are changed later, such as a rate of dropout: create a new step.

    All workers must be given batches of the same shapes in the same order, because they agree with
    each other after updates that are counted by shape.
    """

    required: bool = False
    note: Callable[[str], object] = _LOG.info

    def __post_init__(self) -> None:
        super().__post_init__()
        self._noted = ""
        self._device = self.reducer.device
        self._workers = self.reducer.workers
        self._replayable: dict[str, Replayable] = {
            "requires_grad of weights": self.reducer,
            "running statistics": self.spans,
        }
        self._shapes: dict[object, _BatchShape] = {}
        self._shape = _BatchShape(None)
        self._failures = accelerator.Graph.failures
        self._replayed: list[Part] = []
        """Parts that were replayed since the last micro-batch began."""

        self._in_graphs: set[str] = set()
        """Results of this update in the memory of graphs."""

        self._excluded: dict[Part, str] = {}
        """Parts that are not recorded, and why."""

        self._has_watched = False
        """True from the second update of a shape to the next one."""

        if is_on_several_devices(self.model):
            self._exclude(Part.OPTIMIZER, "the model is on several devices")
        if problem := needs_host(self.model):
            self._exclude(Part.PASSES, problem)
        elif self.spans.groups and (problem := self.spans.refusal()):
            self._exclude(Part.PASSES, f"a BatchNorm span is summed over workers: {problem}")
        if problem := self.reducer.refusal() or self.spans.refusal():
            self._exclude(Part.SUMS, problem)
        self._agree()

    def accumulate(self, batch: Batch, *, first: bool, last: bool) -> None:
        """Do the passes of a micro-batch; a graph of the last one may do the rest too."""
        self._replayed = []
        if first:
            self.begin()
            self._begin_shape(batch)
        graph = self._graph_of_passes(batch, first=first, last=last)
        if graph is None:
            work = partial(self.forward_backward, batch, first=first, last=last)
            self._watch(Part.PASSES, work)
            return
        assert self._shape.batch is not None
        for memory, tensor in zip(self._shape.batch, batch, strict=True):
            memory.copy_(tensor, non_blocking=True)
        self._replay(graph)

    def finish(self) -> Result:
        """Do what no graph has done of the sums and the update of the weights."""
        if Part.SUMS not in self._replayed:
            if Part.PASSES in self._replayed:
                # The hooks that send gradients did not run: all are sent now.
                self.spans.reduce()
                self.reducer.arm(complete=True)
            self._watch(Part.SUMS, self.sum_gradients)
        if Part.OPTIMIZER not in self._replayed:
            graph = self._graph_of_optimizer()
            if graph is None:
                self._watch(Part.OPTIMIZER, self.update_weights)
            else:
                self._replay(graph)
        # The caller keeps results for longer than one update, and the next replay overwrites them.
        for name in self._in_graphs:
            setattr(self.result, name, getattr(self.result, name).clone())
        self._in_graphs = set()
        self._has_watched = self._shape.updates == WARM_UP
        return self.result

    def _begin_shape(self, batch: Batch) -> None:
        """Choose the graphs of an update."""
        self._shape = _BatchShape(None)
        for replayable in self._replayable.values():
            replayable.refresh()
        if self._has_watched:
            # One worker alone may have found that its host waits. All workers watched the same
            # update, for their batches have the same shape, so all of them come here.
            self._has_watched = False
            self._agree()
        if {Part.PASSES, Part.OPTIMIZER} <= self._excluded.keys():
            self._say()
            return
        if self._failures != accelerator.Graph.failures:
            # After a recording that failed, also one of an evaluation, older graphs draw random
            # numbers by another seed than the one that is set.
            self._failures = accelerator.Graph.failures
            self._shapes.clear()
        form = _form(batch)
        # Weights that are not trained yet have no gradient in the optimizer's step.
        key = form, len(self.frozen)
        if key not in self._shapes and self._pool() and self._is_crowded():
            # The first updates of a shape run without a graph, and cannot use the graphs' memory.
            self._shapes.clear()
        self._shape = self._shapes.pop(key, _BatchShape(form))
        self._shapes[key] = self._shape  # now the last one; the first was not used for the longest
        if len(self._shapes) > _SHAPES:
            self._shapes.pop(next(iter(self._shapes)))
        self._shape.updates += 1
        if self._shape.updates > WARM_UP:
            self._require_unchanged()
        else:
            # Again in the second update: the first has created the state of the optimizer.
            self._shape.reads = self._reads()
        if self._shape.updates == WARM_UP + 1 and Part.PASSES not in self._excluded:
            self._shape.batch = Batch(*map(torch.empty_like, batch))

    def _graph_of_passes(self, batch: Batch, *, first: bool, last: bool) -> _RecordedUpdate | None:
        """Return the graph of a micro-batch, which is recorded if it is new; None to do without."""
        shape = self._shape
        parts: list[Part] = []
        for part in Part if last else [Part.PASSES]:
            if part in self._excluded:
                break
            parts.append(part)
        # A smaller micro-batch than the first of an update has no graph.
        if not parts or shape.batch is None or shape.form != _form(batch):
            return None
        # Where the sums cannot be recorded, no pass may send: `finish` sends all gradients.
        sends = Part.SUMS in parts
        passes = partial(self.forward_backward, shape.batch, first=first, last=sends)
        graph = shape.graphs.get((first, *parts)) or self._record((first, *parts), parts, passes)
        if graph is not None and last and graph.before != self.spans.counts:
            return None  # another micro-batch before this one was smaller
        return graph

    def _graph_of_optimizer(self) -> _RecordedUpdate | None:
        """Return the optimizer's own graph, where the sums have none; None to do without."""
        is_separate = Part.SUMS in self._excluded and Part.OPTIMIZER not in self._excluded
        if not is_separate or self._shape.updates <= WARM_UP:
            return None
        if Part.PASSES not in self._replayed:
            self._require_unchanged()  # the passes may have moved weights
        key = Part.OPTIMIZER
        return self._shape.graphs.get(key) or self._record(key, [Part.OPTIMIZER], lambda: None)

    def _reads(self) -> dict[str, object]:
        """Return what the graphs of an update fix, by its name: addresses, and the optimizer's."""
        weights = [it for group in self.optimizer.param_groups for it in group["params"]]
        memory: dict[str, object] = {name: it.reads() for name, it in self._replayable.items()}
        memory["weights"] = [weight.data_ptr() for weight in weights]
        if Part.OPTIMIZER not in self._excluded:
            with hidden_gradients(self.frozen):
                refusal = replay.refusal(self.optimizer)
                memory["state or settings of the optimizer"] = refusal, replay.reads(self.optimizer)
        return memory

    def _require_unchanged(self) -> None:
        """Raise ValueError if a replay would use memory or numbers that are outdated."""
        reads = self._reads()
        changed = [name for name in reads if reads[name] != self._shape.reads[name]]
        if changed:
            raise ValueError(
                f"{', '.join(changed)}: changed or replaced after updates were recorded in a "
                "graph, which would not follow; change tensors in place, or create a new step, or "
                "train without a graph (execution.graph: false)"
            )

    def _watch(self, part: Part, work: Callable[[], object]) -> None:
        """Do a part without a graph; in the second update of a shape, note what prevents one."""
        if self._shape.updates != WARM_UP:
            work()
            return
        watch: AbstractContextManager[list[str]] = accelerator.waits(self._device)
        if part is Part.PASSES:
            self._shape.changed = watch_host(self.model)
            watch = accelerator.passes(self._device, self._shape.changed)
        elif part is Part.OPTIMIZER:
            with hidden_gradients(self.frozen):
                refusal = replay.refusal(self.optimizer)
            if refusal is not None:
                self._exclude(Part.OPTIMIZER, refusal)
        with watch as problems:
            work()
        if problems:
            self._exclude(part, problems[0])

    def _record(
        self, key: object, parts: list[Part], passes: Callable[[], object]
    ) -> _RecordedUpdate | None:
        """Record parts on all workers; nothing is computed. Return None if that failed on any.

        Nothing then remains of it. Raises the error of a device without memory, also without a
        trace.
        """
        excluded = set(self._excluded)
        graph = self._record_here(parts, passes)
        self._agree()
        if excluded != self._excluded.keys():
            self._forget_shapes()
            accelerator.Graph.share_failures(1)  # on some worker
            self._failures = accelerator.Graph.failures
            return None
        assert graph is not None
        self._shape.graphs[key] = graph
        if parts[-1] is [part for part in Part if part not in self._excluded][-1]:
            self._say()
        return graph

    def _record_here(
        self, parts: list[Part], passes: Callable[[], object]
    ) -> _RecordedUpdate | None:
        """Record parts on this worker, or exclude the one that cannot be recorded."""
        if Part.PASSES in parts and (name := self._shape.changed()):
            reason = f"{name} changes between updates, which a replay would not see"
            self._exclude(Part.PASSES, reason)
            return None
        work = {
            Part.PASSES: passes,
            Part.SUMS: self.sum_gradients,
            Part.OPTIMIZER: self.update_weights,
        }
        spans = self.spans
        result = self.result
        before = spans.counts
        has_sums = spans.is_summed
        handled = sys.exception()  # an error that the caller handles is not the recording's
        part = parts[0]
        try:
            self.result = replace(result)
            graph = accelerator.Graph(self._device, self._pool())
            with graph.record():
                for part in parts:
                    work[part]()
            if not self.reducer.is_placed:
                # The gradients of those would stay in memory of the graph.
                raise ValueError("a micro-batch reaches some of the weights only")
            return _RecordedUpdate(
                graph=graph,
                parts=parts,
                results=_changes(result, self.result),
                before=before,
                after=spans.counts,
                has_sums=spans.is_summed,
            )
        except Exception as problem:  # torch and Triton raise all kinds
            # Graphs share memory, so a recording that ended early may have broken older ones.
            self._forget_shapes()
            self.reducer.cancel()
            self.scaler.update(result.loss_scale)  # the same; forgets that gradients were unscaled
            # A graph may be invalid because memory ran out: then that is the error.
            cause: BaseException | None = problem
            while cause is not None and cause is not handled:
                if accelerator.is_out_of_memory(cause):
                    raise cause from None
                cause = cause.__context__
            reason = clip(" ".join(f"{type(problem).__name__}: {problem}".split()), 200)
            self._exclude(part, f"recording failed ({reason})")
            return None
        finally:
            # Nothing was computed: the host takes back what it has counted.
            self.result = result
            self.reducer.in_passes = True
            spans.counts = before
            spans.is_summed = has_sums

    def _replay(self, graph: _RecordedUpdate) -> None:
        if Part.OPTIMIZER in graph.parts:
            self.reducer.in_passes = False
            assert isinstance(self.optimizer, Replayable), "see replay.refusal"
            with hidden_gradients(self.frozen):
                self.optimizer.refresh()
        graph.graph.replay()
        for name, tensor in graph.results.items():
            setattr(self.result, name, tensor)
        counts = zip(self.spans.counts, graph.before, graph.after, strict=True)
        self.spans.counts = [now + after - before for now, before, after in counts]
        self.spans.is_summed = graph.has_sums
        self._replayed = graph.parts
        self._in_graphs |= graph.results.keys()

    def _forget_shapes(self) -> None:
        """Drop all graphs; the rest of this update has none."""
        self._shapes.clear()
        self._shape = _BatchShape(None)

    def _pool(self) -> object:
        """Return the memory of the graphs; None without any, for torch then refuses it."""
        for shape in self._shapes.values():
            for graph in shape.graphs.values():
                return graph.graph.pool
        return None

    def _exclude(self, part: Part, reason: str) -> None:
        """Do without a graph of a part on this worker; `_agree` follows on all of them."""
        if part in self._excluded:
            return
        self._excluded[part] = reason
        if part is Part.PASSES:
            self._exclude(Part.SUMS, "they follow the passes")

    def _agree(self) -> None:
        """Exclude what any worker excludes; raise RecipeError on all if that is required.

        NCCL waits without end for a worker whose graphs are different. So every worker calls this
        at the same places: before the first update, after the second one of a shape, which decides
        what is recorded, and after a recording, before it is replayed.
        """
        reasons = {part.value: self._excluded.get(part) for part in Part}
        agreed = agree(reasons, self._workers, self._device)
        for part in Part:
            reason = agreed[part.value]
            if reason is not None:
                self._exclude(part, reason)
        if self.required and Part.PASSES in self._excluded:
            raise refused(self._excluded[Part.PASSES])

    def _is_crowded(self) -> bool:
        """Return True if graphs leave too little memory for others on any worker."""
        reason = "crowded" if accelerator.is_crowded(self._device) else None
        return any(agree({"memory": reason}, self._workers, self._device).values())

    def _say(self) -> None:
        """Note which parts of an update are not recorded, and why."""
        parts = [f"{it.value} ({self._excluded[it]})" for it in Part if it in self._excluded]
        rest = f"parts of an update without a CUDA graph: {'; '.join(parts)}"
        text = rest if parts else "an update is one CUDA graph"
        if text != self._noted:
            self._noted = text
            self.note(text)


def refused(reason: str) -> RecipeError:
    """Return the error of a graph that is required and cannot be."""
    return RecipeError(f"execution.graph: true: {reason}; set graph: auto, or false")


def step_for(
    use: UseGraph, device: torch.device, *, note: Callable[[str], object] = _LOG.info
) -> Callable[..., EagerStep]:
    """Return the class of the step on a device: GraphedStep, or EagerStep where graphs are refused.

    `note` is that of GraphedStep. Raises RecipeError if a graph is required (True) and refused.
    """
    require_graphs(use, device)
    if use is False or device.type not in accelerator.GRAPHS:
        return EagerStep
    reason = proof.refusal(proof.GRAPH, device)
    if reason is None:
        return partial(GraphedStep, required=use is True, note=note)
    if use is True:
        raise refused(reason)
    return EagerStep


def require_graphs(use: UseGraph, device: torch.device) -> None:
    """Raise RecipeError if a graph is required and the device has none."""
    if use is True and device.type not in accelerator.GRAPHS:
        raise refused(f"there are no graphs on a device of type {device.type}")


def _changes(before: Result, after: Result) -> dict[str, Any]:
    """Return the fields of a result that are other objects than before, by name."""
    values = {it.name: getattr(after, it.name) for it in fields(Result)}
    return {name: value for name, value in values.items() if value is not getattr(before, name)}


def _form(batch: Batch) -> object:
    return tuple((it.shape, it.dtype, it.stride()) for it in batch)

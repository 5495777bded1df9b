"""BatchNorm with a span: the recipe sets how many samples share statistics.

Plain BatchNorm normalises over a device's batch, so the same recipe trains a different network on a
different machine. Here the global batch is divided into contiguous groups of `span` samples that
are normalised separately: several groups in a device batch ("ghost batches", Hoffer et al. 2017,
arXiv:1705.08741, section 4), or one group over several workers with common statistics.

With `Spans`, the running statistics are updated once per optimizer step, with the mean over all
spans of the global batch: over groups, micro-batches and workers. Without it they are updated once
per forward pass, as in PyTorch, so accumulation changes them and every worker has its own.

Every forward pass in training mode counts once, as in PyTorch. Recomputation in a backward pass
(activation checkpointing: torch.utils.checkpoint, a network's `memory_efficient`) does not count.

In a graph of torch.compile the spans are counted on the device: a Python number that changes with
every micro-batch would cause a recompilation each time.

Only training communicates. If a layer normalises by its batch without updating statistics, as in
Final Polishing, workers may hold different numbers of samples or none, and each normalises its own
spans.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.distributed.backend import Backend, Group, Work, in_graphs
from largebatch.models import kernels
from largebatch.models.batchnorm_functional import MeanAndVariance, check, exact_type, normalise
from largebatch.models.wrappers import describe_layer, has_own_hooks

M = TypeVar("M", bound=nn.Module)

_ALIGNMENT = 16
"""Bytes between counters: compiled graphs write to other addresses by way of a copy. Moments have
such addresses if all layers have a multiple of 4 channels."""

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SpanBatchNorm(_BatchNorm):
    """BatchNorm over contiguous groups of `span` samples; 1d, 2d and 3d inputs (N x C x ...).

    A forward pass in training mode updates the running buffers with the mean over its groups, or
    `moments` if `Spans` updates the buffers. `with_span` makes it of a layer, whose children (an
    activation) are applied after it, in order.

    A copy, pickled or not, has no workers and no `Spans`: it normalises its input alone and updates
    its own buffers, until it is passed to `Spans`.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    span: int

    group: Group | None = None
    """Workers that share each span in training; None if this worker holds whole spans."""

    moments: Tensor | None = None
    """Mean and unbiased variance (2 x C), summed over the spans of the step so far; None unless
    `Spans` updates the buffers."""

    num_spans = 0
    """Number of spans in `moments`, without those of compiled graphs."""

    num_in_graphs: Tensor | None = None
    """Number of spans in `moments` from compiled graphs: 0-d, on the device; None unless `Spans`
    updates the buffers."""

    def __getstate__(self) -> dict[str, object]:
        """Return the state of a copy, without the process group, which belongs to this process."""
        state = {**self.__dict__, "group": None, "moments": None, "num_spans": 0}
        state.pop("normalise", None)  # see leave_graphs
        return {**state, "num_in_graphs": None}

    def leave_graphs(self) -> None:
        """Exclude the statistics from compiled graphs, because workers exchange them."""
        self.normalise = torch.compiler.disable(self.normalise)  # type: ignore[method-assign]

    def forward(self, images: Tensor) -> Tensor:
        """Normalise N x C x ...; in training, N is this worker's part of a span, or whole spans."""
        if self.training and self.ends_in_relu() and kernels.take(images, span=self.span):
            return self.normalise(images, relu=True)
        out = self.normalise(images) if self.training else super().forward(images)
        for child in self._activations():
            out = child(out)
        return out

    def extra_repr(self) -> str:
        """Return the settings of the layer for its repr."""
        return f"{super().extra_repr()}, span={self.span}"  # type: ignore[no-untyped-call]  # torch's

    def ends_in_relu(self) -> bool:
        """Return True if the children are a ReLU, and what does nothing, without hooks."""
        layers = self._activations()
        kinds = [type(layer) for layer in layers if type(layer) is not nn.Identity]
        return kinds == [nn.ReLU] and relu_is_torchs() and not any(map(has_hooks, layers))

    def _activations(self) -> list[nn.Module]:
        """Return the layers behind the normalisation: timm's, not those that compute weights."""
        return [child for name, child in self.named_children() if name != "parametrizations"]

    def normalise(
        self, images: Tensor, other: Tensor | None = None, *, relu: bool = False
    ) -> Tensor:
        """Normalise in training; only kernels take `other` and `relu` (see `norm_relu`)."""
        self._check_input_dim(images)
        if self.moments is not None and getattr(self, "_is_replica", False):
            raise ValueError(
                "DataParallel replicates a BatchNorm whose spans are summed over workers: their "
                "number would be lost with the replica; start one worker per GPU instead"
            )
        group = self.group if self.track_running_stats else None
        compiled = torch.compiler.is_compiling()
        # A pass within a backward pass is recomputed, and already counted.
        is_recomputed = not compiled and torch._C._current_graph_task_id() != -1
        # A span over several workers counts once, on the first of them.
        counts = (
            self.track_running_stats
            and self.moments is not None
            and not is_recomputed
            and (group is None or group.rank == 0)
        )
        sums = self.moments if counts else None
        if self.track_running_stats and sums is None:
            # Also in a recomputation: checkpointing compares the tensors that are saved.
            sums = images.new_zeros(2, self.num_features, dtype=exact_type(images))
        settings: dict[str, Any] = {
            "eps": self.eps,
            "span": self.span,
            "group": group,
            "sums": sums,
        }
        if kernels.take(images, other, span=self.span):
            check(images, span=self.span, group=group)
            out: Tensor
            out, _ = kernels.batchnorm().normalise(
                images, other, self.weight, self.bias, relu=relu, **settings
            )
        else:
            assert other is None  # `norm_relu` and `forward` have asked `kernels.take` too
            assert not relu
            # Nothing was added to the sums in this step: they need not be read.
            is_zero = not compiled and (not counts or self.num_spans == 0)
            out = normalise(images, self.weight, self.bias, is_zero=is_zero, **settings)
        num = -(-len(images) // self.span) if group is None else 1
        if counts and compiled:
            assert self.num_in_graphs is not None  # `Spans` sets both
            self.num_in_graphs += num
        elif counts:
            self.num_spans += num
        elif sums is not None and self.moments is None and not is_recomputed:
            self._move_buffers(MeanAndVariance(*(sums / num)))
        return out

    @torch.no_grad()
    def _move_buffers(self, means: MeanAndVariance) -> None:
        """Update the buffers once with the spans' mean moments, like PyTorch."""
        self.num_batches_tracked += 1
        average = (1 / self.num_batches_tracked).to(means.mean.dtype)  # PyTorch, if no momentum
        weight = average if self.momentum is None else self.momentum
        for buffer, mean in zip((self.running_mean, self.running_var), means, strict=True):
            buffer.copy_(buffer.to(mean.dtype).lerp(mean, weight))

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 -- PyTorch's signature
        if input.dim() < 2:
            raise ValueError(f"expected N x C x ..., got {input.dim()} dimensions")


_CALL = nn.Module.__call__
_FORWARD = {kind: kind.forward for kind in (nn.ReLU, nn.Identity, SpanBatchNorm)}
_RELU = F.relu
"""Functions that a kernel may stand for, unless others are set in their place."""


def relu_is_torchs() -> bool:
    """Return True if PyTorch's ReLU has not been replaced."""
    return F.relu is _RELU


def has_hooks(module: nn.Module) -> bool:
    """Return True if anything besides the forward pass of its class runs when a module is called.

    Also if another one was set: on the module, or on a class that a kernel may stand for.
    """
    kind = type(module)
    if kind in _FORWARD and kind.forward is not _FORWARD[kind]:
        return True
    return has_own_hooks(module) or "forward" in vars(module) or kind.__call__ is not _CALL


def with_span(model: M, span: int) -> M:
    """Change every BatchNorm of the model, or the layer passed, to one with a span; return it.

    The class of each layer changes in place, so parameters, buffers, hooks, attributes and
    references to it stay; a span set before is replaced. With a span over several workers, or on a
    GPU, the model can be differentiated only once: a loss that contains gradients (a gradient
    penalty) needs plain BatchNorm.

    Raises ValueError, naming the layer and before any change, for a type of BatchNorm that does
    more than normalise and apply its children in order, or that has a forward pass of its own; for
    modules of torch.jit.script, whose layers cannot change; for a span that is not a positive int.

    >>> layer = with_span(nn.BatchNorm2d(1), 2)
    >>> layer(torch.tensor([1.0, 3, 10, 30]).view(4, 1, 1, 1)).flatten().round().tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """
    if type(span) is not int or span < 1:
        raise ValueError(f"span is a number of samples, an int above 0, got {span!r}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(  # noqa: TRY004 -- the content of the model is wrong, not its type
                f"{describe_layer(name)} is scripted; give it a span before that"
            )
    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    }
    # All are checked before the first one changes.
    for name, layer in layers.items():
        if type(layer) not in {*_PLAIN, SpanBatchNorm} and not _is_timms_with_activation(layer):
            raise ValueError(
                f"{describe_layer(name)} is a {type(layer).__name__}; only torch's and timm's "
                "BatchNorm can be given a span"
            )
        if not layer.track_running_stats:
            raise ValueError(
                f"{describe_layer(name)} keeps no running statistics; it cannot be given a span"
            )
        if "forward" in vars(layer):
            raise ValueError(
                f"{describe_layer(name)} has its own forward pass; delete its attribute `forward`"
            )
    for layer in layers.values():
        layer.__class__ = SpanBatchNorm
        layer.span = span
    return model


def by_spans(images: Tensor, model: nn.Module, *, together: bool) -> list[Tensor]:
    """Divide a batch into the model's spans.

    With `together`, only a last span of one sample is separated: in training, a layer with one
    value per channel in any span raises an error.
    """
    spans = {layer.span for layer in model.modules() if isinstance(layer, SpanBatchNorm)}
    if not together and len(spans) == 1:
        return list(images.split(spans.pop()))
    if any(len(images) > span and len(images) % span == 1 for span in spans):
        return [images[:-1], images[-1:]]
    return [images]


def _is_timms_with_activation(layer: _BatchNorm) -> bool:
    """Return True for timm's BatchNorm with `drop` and `act`, by name: timm may be missing."""
    kind = type(layer)
    return kind.__name__ == "BatchNormAct2d" and kind.__module__.partition(".")[0] == "timm"


class Spans:
    """The moments of every BatchNorm layer in one flat tensor, averaged with one all-reduce.

    Once created, only `update` changes the model's running statistics. With `sync_workers` > 1,
    each span is shared by that number of consecutive workers.

    >>> from largebatch.distributed.serial import Serial
    >>> layer = with_span(nn.BatchNorm2d(1), 2)
    >>> spans = Spans(layer, Serial(torch.device("cpu")))
    >>> for images in torch.tensor([[1.0, 3], [5, 7]]):  # two micro-batches
    ...     _ = layer(images.view(2, 1, 1, 1))
    >>> spans.reduce()
    >>> spans.update()
    >>> layer.running_mean  # 0.9 * 0 + 0.1 * 4
    tensor([0.4000])
    """

    def __init__(self, model: nn.Module, backend: Backend, *, sync_workers: int = 1) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, SpanBatchNorm)]
        self.backend = backend
        self._group = _neighbours(backend, sync_workers) if self.layers else None
        self._work: Work | None = None
        self.is_summed = False
        """True from `wait` to `update`."""

        dtypes = {layer.running_mean.dtype for layer in self.layers}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        sizes = [2 * layer.num_features for layer in self.layers]
        stride = _ALIGNMENT // dtype.itemsize
        counters = stride * len(sizes)
        self._kept = torch.zeros(counters + sum(sizes), dtype=dtype, device=backend.device)
        in_graphs, self._moments = self._kept.split([counters, sum(sizes)])
        self._in_graphs = in_graphs[::stride]
        self._sums = self._moments.new_zeros(sum(sizes) + len(sizes))
        """Buffer of the all-reduce: sums of moments, and the number of spans per layer."""

        self._spans: dict[tuple[int, ...], Tensor] = {}
        """Numbers of spans per layer in a step, on the device too: graphs read them there."""

        owners = np.repeat(np.arange(len(sizes)), sizes)
        self._owners = torch.tensor(owners, device=backend.device)
        """Number of the layer that each of the moments belongs to."""

        momenta = [math.nan if m.momentum is None else m.momentum for m in self.layers]
        self._momentum = torch.tensor(momenta, dtype=dtype, device=backend.device)
        self._cumulative = any(layer.momentum is None for layer in self.layers)
        # Autograd saves the arguments of batch_norm and would raise an error when the buffer is
        # zeroed: tensors of `.data` have their own version counters.
        parts = [part.data for part in self._moments.split(sizes)]
        numbers = [number.data for number in self._in_graphs.unbind()]
        for layer, part, number in zip(self.layers, parts, numbers, strict=True):
            layer.moments, layer.group = part.view(2, -1), self._group
            layer.num_in_graphs = number
        self._forget()

    @property
    def groups(self) -> list[Group]:
        """The workers that share this worker's spans, if it shares them."""
        return [] if self._group is None else [self._group]

    def refusal(self) -> str | None:
        """Return why a graph cannot repeat the sums over workers; None if it can."""
        groups = [self.backend, *self.groups]
        return None if all(map(in_graphs, groups)) else "only NCCL's sums can be recorded"

    def reads(self) -> object:
        """Return what a graph has fixed: the addresses of the running statistics."""
        buffers = [buffer for layer in self.layers for buffer in layer.buffers(recurse=False)]
        return [buffer.data_ptr() for buffer in buffers]

    def refresh(self) -> None:
        """Do nothing: the numbers of a replay are on the device."""

    @property
    def counts(self) -> list[int]:
        """Number of spans of this step so far, by layer. A replay counts nothing: set it then."""
        return [layer.num_spans for layer in self.layers]

    @counts.setter
    def counts(self, counts: list[int]) -> None:
        for layer, number in zip(self.layers, counts, strict=True):
            layer.num_spans = number

    def reduce(self) -> None:
        """Start to sum the moments over all workers; call it after the step's last forward.

        A forward pass between this and `update` counts for the next step.
        """
        if not self.layers:
            return
        counts = tuple(self.counts)
        if counts not in self._spans:  # rare: steps are equal
            self._spans[counts] = torch.tensor(counts, dtype=self._sums.dtype).to(self._sums.device)
        spans = self._spans[counts]
        if not all(counts):  # layers in compiled graphs, and unused layers
            spans = spans + self._in_graphs
        self._sums[: len(self._moments)].copy_(self._moments)
        self._sums[len(self._moments) :].copy_(spans)
        self._forget()
        self._work = self.backend.all_reduce(self._sums)

    @property
    def moments(self) -> Tensor:
        """Moments of every layer, flat, summed over this worker's spans of the step so far."""
        moments: Tensor = self._moments  # a part of a split, whose type torch does not state
        return moments

    def save(self) -> Callable[[], None]:
        """Return a function that restores the moments and counts as they are now."""
        before = self._kept.clone()
        counts = self.counts

        def restore() -> None:
            self._kept.copy_(before)
            self.counts = counts

        return restore

    def wait(self) -> None:
        """Block until the moments are summed; `update` does that too."""
        if self._work is not None:
            self._work.wait()
            self._work, self.is_summed = None, True

    @torch.no_grad()
    def update(self, skipped: Tensor | None = None) -> None:
        """Update every running buffer once with the mean over the step's spans.

        Each layer counts its own spans: a layer used twice has twice as many, and an unused one is
        not updated. Nothing is updated if `skipped`, a bool on the device, is true.
        """
        self.wait()
        if not self.is_summed:
            return
        self.is_summed = False
        layers = self.layers
        sums, spans = self._sums.split([len(self._moments), len(layers)])
        used = spans.clamp(max=1)  # 1, or 0 if the step did not use the layer
        if skipped is not None:
            used = used * ~skipped
        tracked = [layer.num_batches_tracked for layer in layers]
        torch._foreach_add_(tracked, list(used.long().unbind()))
        momentum = self._momentum
        if self._cumulative:
            average = 1 / torch.stack(tracked).clamp(min=1)  # PyTorch's rule for no momentum
            momentum = torch.where(momentum.isnan(), average.to(momentum.dtype), momentum)
        weights, means = (used * momentum)[self._owners], sums / spans.clamp(min=1)[self._owners]
        buffers = [b for layer in layers for b in (layer.running_mean, layer.running_var)]
        before = torch.cat(buffers)
        moved = before.to(means.dtype).lerp(means, weights)
        if skipped is not None:
            moved = torch.where(skipped, before, moved)
        torch._foreach_copy_(buffers, list(moved.split([len(buffer) for buffer in buffers])))

    def _forget(self) -> None:
        self._kept.zero_()  # multiplying by 0 would keep a NaN
        for layer in self.layers:
            layer.num_spans = 0


def _neighbours(backend: Backend, num: int) -> Group | None:
    """Return this worker's group of `num` consecutive workers; None if it is alone."""
    if backend.world_size % num:
        raise ValueError(
            f"{backend.world_size} workers cannot share BatchNorm spans in groups of {num}"
        )
    if num == 1:
        return None
    firsts = range(0, backend.world_size, num)
    return backend.split([range(first, first + num) for first in firsts])

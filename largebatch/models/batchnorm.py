"""BatchNorm with a span: how many samples share statistics is part of the recipe.

Plain BatchNorm normalises over whatever a device holds, so the same recipe trains another network
on another machine. Here the global batch is divided into contiguous groups of `span` samples, each
normalised by itself: several groups in a device batch ("ghost batches", Hoffer et al. 2017,
arXiv:1705.08741, section 4), or one over several workers, who then train with common statistics.

With `Spans`, the running statistics move once per optimizer step, towards the mean over all spans
of the global batch: over groups, micro-batches and workers. Without it a model moves them as
PyTorch does, once per forward pass, so that accumulation changes them and every worker keeps its
own.

Every forward pass in training mode counts once, as in PyTorch. What a backward pass computes again
(activation checkpointing: torch.utils.checkpoint, a network's `memory_efficient`) does not.

Only training communicates. Where a layer normalises by its batch without keeping statistics, as
Final Polishing makes it do, workers may hold different numbers of samples or none, and each
normalises the spans it holds by itself.
"""

import math
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.distributed.backend import Backend, Group, Work
from largebatch.models.batchnorm_functional import normalise

M = TypeVar("M", bound=nn.Module)

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SpanBatchNorm(_BatchNorm):
    """BatchNorm over contiguous groups of `span` samples; 1d, 2d and 3d inputs (N x C x ...).

    A forward pass in training mode moves the running buffers towards the mean over its groups.
    Where `Spans` moves them, each group's mean, unbiased variance and a one are added to `moments`
    instead. Children of the layer it stands for (an activation) are kept under their names and come
    after it, in their order.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, like: _BatchNorm, *, span: int) -> None:
        super().__init__(
            like.num_features, eps=like.eps, momentum=like.momentum, affine=like.affine
        )
        self.weight, self.bias = like.weight, like.bias
        for name, buffer in like.named_buffers(recurse=False):
            setattr(self, name, buffer)
        for name, child in like.named_children():
            self.add_module(name, child)
        self.training = like.training
        self.span = span
        self.group: Group | None = None
        """The workers that share each span while training, or None: this one holds whole spans."""

        self.moments: Tensor | None = None
        """Sums over the spans of a step (C + C + 1), where `Spans` moves the buffers."""

    def forward(self, images: Tensor) -> Tensor:
        """Normalise N x C x ...; in training, N is this worker's part of a span or whole spans."""
        out = self._normalise(images) if self.training else super().forward(images)
        for child in self.children():
            out = child(out)
        return out

    def _normalise(self, images: Tensor) -> Tensor:
        self._check_input_dim(images)
        group = self.group if self.track_running_stats else None
        out, moments = normalise(
            images, self.weight, self.bias, eps=self.eps, span=self.span, group=group
        )
        if self.track_running_stats and not _in_backward():
            # A span over several workers counts once: for the first of them.
            self._count(moments, first=group is None or group.rank == 0)
        return out

    @torch.no_grad()
    def _count(self, moments: Tensor, *, first: bool) -> None:
        """Take the moments of S spans, S x 2 x C: add them up, or move the buffers."""
        if self.moments is None:
            self._move_buffers(moments.mean(0))
        elif first:
            self.moments[:-1] += moments.sum(0).flatten()
            self.moments[-1] += len(moments)

    def _move_buffers(self, means: Tensor) -> None:
        """Move the buffers once towards the spans' mean mean and variance, 2 x C, as PyTorch."""
        self.num_batches_tracked += 1
        average = (1 / self.num_batches_tracked).to(means.dtype)  # PyTorch's, without momentum
        weight = average if self.momentum is None else self.momentum
        for buffer, mean in zip((self.running_mean, self.running_var), means, strict=True):
            buffer.copy_(buffer.to(mean.dtype).lerp(mean, weight))

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 -- PyTorch's signature
        if input.dim() < 2:
            raise ValueError(f"expected N x C x ..., got {input.dim()} dimensions")


def _in_backward() -> bool:
    """Tell whether this thread runs a backward pass: a forward pass then is a recomputed one."""
    return torch._C._current_graph_task_id() != -1


def with_span(model: M, span: int) -> M:
    """Replace every BatchNorm of the model, in place, by one with a span; return the model.

    Parameters and buffers keep their names and values. While it trains, the model can be
    differentiated once only: a loss with gradients of its own (a gradient penalty) needs plain
    BatchNorm. Raises ValueError for a kind of BatchNorm that does more than normalise and then
    apply its children in turn, naming the layer.
    """
    replaced: dict[nn.Module, SpanBatchNorm] = {}  # a layer may stand in a model under two names
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(layer, _BatchNorm) or isinstance(layer, SpanBatchNorm):
            continue
        if type(layer) not in _PLAIN and not _is_timms_with_activation(layer):
            raise ValueError(
                f"layer {name} is a {type(layer).__name__}; only nn.BatchNorm1d, 2d and 3d and "
                "timm's BatchNormAct2d can be given a span"
            )
        if not layer.track_running_stats:
            raise ValueError(f"layer {name} keeps no running statistics; it cannot be given a span")
        parent, _, attribute = name.rpartition(".")
        if layer not in replaced:
            replaced[layer] = SpanBatchNorm(layer, span=span)
        setattr(model.get_submodule(parent), attribute, replaced[layer])
    return model


def by_spans(images: Tensor, model: nn.Module, *, together: bool) -> list[Tensor]:
    """Divide a batch into the model's spans.

    `together`: divide only what has to be. That is a last span of one sample: a layer that sees one
    value of it per channel refuses it in training, whatever is beside it.
    """
    spans = {layer.span for layer in model.modules() if isinstance(layer, SpanBatchNorm)}
    if not together and len(spans) == 1:
        return list(images.split(spans.pop()))
    if any(len(images) > span and len(images) % span == 1 for span in spans):
        return [images[:-1], images[-1:]]
    return [images]


def _is_timms_with_activation(layer: _BatchNorm) -> bool:
    """Tell timm's BatchNorm with `drop` and `act` after it, by name: timm may not be installed."""
    kind = type(layer)
    return kind.__name__ == "BatchNormAct2d" and kind.__module__.partition(".")[0] == "timm"


class Spans:
    """The moments of every BatchNorm layer in one flat tensor, averaged with one all-reduce.

    From now on the model's running statistics move by `update` alone.

    With `sync_workers` > 1, so many workers side by side share each span from now on.
    """

    def __init__(self, model: nn.Module, backend: Backend, *, sync_workers: int = 1) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, SpanBatchNorm)]
        sizes = [2 * layer.num_features + 1 for layer in self._layers]
        dtypes = {layer.running_mean.dtype for layer in self._layers}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self._moments = torch.zeros(sum(sizes), dtype=dtype, device=backend.device)
        self._sums = torch.zeros_like(self._moments)  # what has been sent, while more is added
        self._group = _neighbours(backend, sync_workers) if self._layers else None
        self.attach()
        self._backend = backend
        self._work: Work | None = None
        self._lay_out()

    def attach(self) -> None:
        """Let the model's layers count here from now on, after other Spans had them."""
        sizes = [2 * layer.num_features + 1 for layer in self._layers]
        for layer, part in zip(self._layers, self._moments.split(sizes), strict=True):
            layer.moments = part
            layer.group = self._group

    def reduce(self) -> None:
        """Start to sum the moments over all workers; call it after the step's last forward.

        A forward pass between this and `update` counts for the step after.
        """
        if self._layers:
            self._sums.copy_(self._moments)
            self._moments.zero_()
            self._work = self._backend.all_reduce(self._sums)

    @torch.no_grad()
    def update(self) -> None:
        """Move every running buffer once towards the mean over the step's spans.

        A layer counts its own spans: used twice it has twice as many, not used it stays.
        """
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        layers = self._layers
        spans = self._sums[self._counts]
        used = spans.clamp(max=1)  # 1, or 0 if the step's forward passes left the layer out
        tracked = [layer.num_batches_tracked for layer in layers]
        torch._foreach_add_(tracked, list(used.long().unbind()))
        average = used / torch.stack(tracked).clamp(min=1)  # PyTorch's, without momentum
        weights = torch.where(self._momentum.isnan(), average, used * self._momentum)
        buffers = [b for layer in layers for b in (layer.running_mean, layer.running_var)]
        means = self._sums[self._values] / spans.clamp(min=1)[self._owners]
        moved = torch.cat(buffers).to(means.dtype).lerp(means, weights[self._owners])
        torch._foreach_copy_(buffers, list(moved.split([len(buffer) for buffer in buffers])))

    def discard(self) -> None:
        """Forget the step's moments; the running buffers stay as they are."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._moments.zero_()

    def _lay_out(self) -> None:
        """Note where in the flat tensor the counts and the moments of each layer are.

        With these, all running buffers move in a few operations, however many layers there are.
        """
        device, dtype = self._moments.device, self._moments.dtype
        channels = np.array([layer.num_features for layer in self._layers], dtype=np.int64)
        counts = (2 * channels + 1).cumsum() - 1
        is_value = np.ones(len(self._moments), dtype=np.bool_)
        is_value[counts] = False
        owners = np.repeat(np.arange(len(channels)), 2 * channels)
        numbers = [math.nan if m.momentum is None else m.momentum for m in self._layers]
        self._counts = torch.tensor(counts, device=device)
        self._values = torch.tensor(np.flatnonzero(is_value), device=device)
        self._owners = torch.tensor(owners, device=device)
        self._momentum = torch.tensor(numbers, dtype=dtype, device=device)


def _neighbours(backend: Backend, num: int) -> Group | None:
    """Return the group of `num` workers side by side that this one is in; None if it is alone."""
    if backend.world_size % num:
        raise ValueError(
            f"{backend.world_size} workers cannot be divided into groups of {num} that share "
            "BatchNorm statistics"
        )
    if num == 1:
        return None
    firsts = range(0, backend.world_size, num)
    return backend.split([range(first, first + num) for first in firsts])

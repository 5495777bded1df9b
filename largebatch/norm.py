"""BatchNorm with a span: how many samples share statistics is part of the recipe.

Plain BatchNorm normalises over whatever a device holds, so the same recipe trains another network
on another machine. Here a device batch is split into contiguous groups of `span` samples ("ghost
batches", Hoffer et al. 2017, arXiv:1705.08741, section 4), each normalised by itself.

The running statistics move once per optimizer step, towards the mean over all spans of the global
batch: over groups, micro-batches and workers. PyTorch moves them once per forward pass, so that
accumulation changes them and every worker keeps its own.
"""

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.contracts import Backend, Work

M = TypeVar("M", bound=nn.Module)


class SpanBatchNorm(_BatchNorm):
    """BatchNorm over contiguous groups of `span` samples; 1d, 2d and 3d inputs (N x C x ...).

    In training mode the running buffers stay as they are; each group's mean, unbiased variance and
    a one are added to `moments` (C + C + 1) until `Spans` moves the buffers.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, like: _BatchNorm, *, span: int) -> None:
        super().__init__(
            like.num_features, eps=like.eps, momentum=like.momentum, affine=like.affine
        )
        self.weight, self.bias = like.weight, like.bias
        for name, buffer in like.named_buffers():
            setattr(self, name, buffer)
        self.train(like.training)
        self.span = span
        self.moments = self.running_mean.new_zeros(2 * like.num_features + 1)

    def forward(self, images: Tensor) -> Tensor:
        """Normalise N x C x ..., N a multiple of the span while training or a smaller last part."""
        if not self.training:
            return super().forward(images)
        parts = [self._normalise(part) for part in images.split(self.span)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _normalise(self, part: Tensor) -> Tensor:
        # Momentum 1 makes PyTorch's own kernel hand out the moments it normalises with.
        mean, var = torch.zeros_like(self.running_mean), torch.ones_like(self.running_var)
        out = F.batch_norm(
            part, mean, var, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps
        )
        if self.track_running_stats:
            self.moments += torch.cat([mean, var, mean.new_ones(1)])
        return out

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 -- PyTorch's signature
        if input.dim() < 2:
            raise ValueError(f"expected N x C x ..., got {input.dim()} dimensions")


def with_span(model: M, span: int) -> M:
    """Replace every BatchNorm of the model, in place, by one with a span; return the model.

    Parameters and buffers keep their names and values. Raises ValueError for a kind of BatchNorm
    that does more than normalise, naming the layer.
    """
    replaced: dict[nn.Module, SpanBatchNorm] = {}  # a layer may stand in a model under two names
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(layer, _BatchNorm) or isinstance(layer, SpanBatchNorm):
            continue
        if type(layer) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            raise ValueError(
                f"layer {name} is a {type(layer).__name__}; only nn.BatchNorm1d, 2d and 3d can be "
                "given a span"
            )
        if not layer.track_running_stats:
            raise ValueError(f"layer {name} keeps no running statistics; it cannot be given a span")
        parent, _, attribute = name.rpartition(".")
        if layer not in replaced:
            replaced[layer] = SpanBatchNorm(layer, span=span)
        setattr(model.get_submodule(parent), attribute, replaced[layer])
    return model


class Spans:
    """The moments of every BatchNorm layer in one flat tensor, averaged with one all-reduce."""

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, SpanBatchNorm)]
        sizes = [layer.moments.numel() for layer in self._layers]
        dtypes = {layer.moments.dtype for layer in self._layers} or {torch.float32}
        assert len(dtypes) == 1, dtypes
        self._moments = torch.zeros(sum(sizes), dtype=dtypes.pop(), device=backend.device)
        for layer, part in zip(self._layers, self._moments.split(sizes), strict=True):
            layer.moments = part
        self._backend = backend
        self._work: Work | None = None

    def reduce(self) -> None:
        """Start to sum the moments over all workers; call it after the step's last forward."""
        if self._layers:
            self._work = self._backend.all_reduce(self._moments)

    @torch.no_grad()
    def update(self) -> None:
        """Move every running buffer once towards the mean over the step's spans.

        A layer counts its own spans: used twice it has twice as many, not used it stays.
        """
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        for layer in self._layers:
            spans = layer.moments[-1]
            used = spans.clamp(max=1)  # 1, or 0 if the step's forward passes left the layer out
            layer.num_batches_tracked += used.long()
            mean, var = (layer.moments[:-1] / spans.clamp(min=1)).view(2, -1)
            if layer.momentum is None:  # the cumulative average of PyTorch
                weight = used / layer.num_batches_tracked.clamp(min=1)
            else:
                weight = used * layer.momentum
            layer.running_mean.lerp_(mean, weight)
            layer.running_var.lerp_(var, weight)
        self._moments.zero_()

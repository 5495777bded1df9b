"""Final Polishing: running statistics measured exactly on clean training data.

Augmented training images have another distribution than the clean images of validation, and running
averages lag behind the weights (Kasagi et al., HPDC 2020, doi 10.1145/3369583.3392687). The
statistics pass runs the model forward on clean training images and replaces every running mean and
variance with the moments over all of them, on all workers: counts, means and sums of squares are
pooled (`moments.py`), never averaged. A layer's moments are exact over all its inputs. These inputs
depend on how the previous layers normalise, in one of two ways:

- One pass, the default: each layer normalises by the statistics of its batch, as in training, so
  that the later layers get the inputs they were trained on. With a span (`batchnorm.py`) the result
  does not depend on the batch size or the number of workers; plain BatchNorm normalises by the
  whole batch. One value per channel, an error in training, is normalised to zero.
- `sequential`: each layer normalises by polished statistics, as in evaluation, so that each layer
  gets the moments of its inputs in evaluation. The result does not depend on the order and size of
  the batches, nor on the span. It needs several passes.

The first layer has the same statistics in both. In later layers they differ as much as the
statistics of batches differ from those of all data: much for small batches, little for large ones.

InstanceNorm with running statistics normalises each sample by its own moments in training. Its
running statistics become the mean over all samples of these moments, as PyTorch defines them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from largebatch import accelerator
from largebatch.distributed.backend import Backend, sum_over_workers
from largebatch.distributed.connection import running_backend
from largebatch.errors import DataError
from largebatch.models.batchnorm import SpanBatchNorm, by_spans
from largebatch.models.inputs import AnyBatch, images_of
from largebatch.models.wrappers import (
    describe_layer,
    device_of,
    evaluation_mode,
    input_of,
    local_model,
    uncompiled,
    unsharded,
)
from largebatch.polish.moments import Moments, of_samples, pool
from largebatch.tracking.events import LayerDrift

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles over the channels of a layer in a drift."""

_SIZES = {nn.InstanceNorm1d: "L", nn.InstanceNorm2d: "HW", nn.InstanceNorm3d: "DHW"}
"""Sizes of a sample in each channel. Torch's InstanceNorm takes inputs without a batch dimension
too, which would be misread; its BatchNorm refuses them itself."""

_SPARE_PASSES = 20
"""Additional passes beyond one per layer, for layers used several times in a forward pass."""


class Drift(tuple[LayerDrift, ...]):
    """Changes by polishing, of the layers that it reached, in the order of the model."""

    passes = 1
    """Number of passes over the data."""

    settling = 0.0
    """Largest change in the last sequential pass, in standard deviations or ln(variance)."""

    settled = True
    """True unless the sequential passes ended before they converged."""


@dataclass(slots=True)
class _Statistics:
    """A running mean and variance, and the one or more layers that use them."""

    name: str
    mean: Tensor
    var: Tensor
    eps: float
    by_sample: bool
    """True for InstanceNorm, whose moments are those of `of_samples`."""

    layers: list[_NormBase] = field(default_factory=list)

    def pair(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Return the mean and variance measured, in float64."""
        if self.by_sample:
            return moments.mean[: len(self.mean)], moments.mean[len(self.mean) :]
        return moments.mean, moments.variance

    def measured(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Return the mean and variance measured, in float64, on the device of these."""
        mean, var = (tensor.to(self.mean.device) for tensor in self.pair(moments))
        return mean, var

    def drift(self, moments: Moments) -> LayerDrift:
        """Return the change from these statistics to the measured ones."""
        old = self.mean, self.var
        changes = _change(old, self.measured(moments), eps=self.eps)
        shift, ratio = torch.stack(changes).cpu()  # sync: once per layer, for the report
        quantiles = shift.new_tensor(QUANTILES)
        return LayerDrift(
            name=self.name,
            channels=len(self.mean),
            mean_shift=shift.square().mean().sqrt().item(),
            log_variance_ratio=ratio.square().mean().sqrt().item(),
            shift_quantiles=tuple(shift.quantile(quantiles).tolist()),
            ratio_quantiles=tuple(ratio.quantile(quantiles).tolist()),
        )


@torch.no_grad()
def polish(
    model: nn.Module,
    batches: Iterable[AnyBatch],
    backend: Backend | None = None,
    *,
    sequential: bool = False,
    tolerance: float = 1e-6,
) -> Drift:
    """Set the running statistics of every normalisation layer to the moments over all batches.

    A batch is images (N x C x ..., on any device), a tuple that starts with images, or a mapping
    (see `models/inputs.py`); N may vary. Every worker passes its own batches of clean training
    data, or none; all get the same statistics if their weights are the same. The default `backend`
    is that of the workers connected by torch.distributed or Horovod (`running_backend`).

    Nothing else changes, and nothing at all if the pass fails; layers that the forward pass does
    not use keep their statistics. Layers that share buffers are measured together. The model may be
    wrapped (DistributedDataParallel, DataParallel, AveragedModel, torch.compile); it runs
    uncompiled and without communication, also in SyncBatchNorm layers. With FSDP2 (`fully_shard`)
    every worker holds the complete weights during the call.

    Layers are torch's BatchNorm and InstanceNorm and their subclasses; frozen ones (`Frozen...`)
    stay as they are. Statistics are rounded once to the type of the buffers. Images in float32 are
    converted if all convolutions and linear layers are bf16, or all fp16.

    `sequential` iterates over `batches` in each pass: pass a list or a loader, not an iterator. A
    pass converges every layer whose predecessors have converged, so there is one pass per BatchNorm
    on the longest path through the model, and a last one without changes. The passes end when no
    mean changes by more than `tolerance` standard deviations and no ln(variance) by more than
    `tolerance`; 0 is exact.

    Returns the drift of each layer, in the order of the model. Raises DataError if no worker had a
    batch, if a layer had a single value per channel, or if moments are not finite, also after they
    are rounded to the type of the buffers; BackendError if workers are not connected; ValueError if
    the model is sharded (FSDP1, tensor parallelism), has no running statistics or those of an
    unknown layer, if an input has no batch dimension, if a batch has no images, or if `batches` can
    be used only once.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"polish takes a model first, then batches; got a {type(model).__name__}")
    model = local_model(model)
    if backend is None:
        backend = running_backend(device_of(model))
    owners = _owners(model)
    if not owners:
        raise ValueError(
            "the model has no running statistics, so there is nothing to polish: no BatchNorm, "
            "and no InstanceNorm with track_running_stats"
        )
    if sequential and isinstance(batches, Iterator):
        raise ValueError(
            f"sequential polishing needs the batches again for every pass, and a "
            f"{type(batches).__name__} yields them once; pass a list, a loader or another iterable"
        )
    passes, settling = 1, 0.0
    with unsharded(model), _temporarily_in_eval(model, owners), uncompiled():
        if sequential:
            pooled, passes, settling = _settle(model, owners, batches, backend, tolerance=tolerance)
        else:
            pooled = _measure(model, owners, batches, backend, as_in_training=True)
    reached = [pair for pair in zip(owners, pooled, strict=True) if pair[1].count]
    drift = Drift(owner.drift(moments) for owner, moments in reached)
    for owner, moments in reached:
        mean, var = owner.measured(moments)
        owner.mean.copy_(mean)
        owner.var.copy_(var)
    drift.passes, drift.settling, drift.settled = passes, settling, settling <= tolerance
    return drift


def _owners(model: nn.Module) -> list[_Statistics]:
    """Return the running statistics of the model, each once, in the order of the model.

    Raises ValueError, naming the layer, for statistics that cannot be measured.
    """
    owners: dict[int, _Statistics] = {}
    for name, layer in model.named_modules():
        buffers = dict(layer.named_buffers(recurse=False))
        if not buffers.keys() & {"running_mean", "running_var"} or _is_frozen(layer):
            continue
        if not isinstance(layer, _NormBase):
            raise ValueError(  # noqa: TRY004 -- the model's content is wrong, not its type
                f"{describe_layer(name)} is of type {type(layer).__name__}, whose running "
                "statistics cannot be measured; expected subclasses of torch's BatchNorm and "
                "InstanceNorm"
            )
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
            raise ValueError(
                f"{describe_layer(name)} is not initialised; run the model on a batch first"
            )
        mean, var = buffers["running_mean"], buffers["running_var"]
        fresh = _Statistics(name, mean, var, layer.eps, isinstance(layer, _InstanceNorm))
        owners.setdefault(mean.data_ptr(), fresh).layers.append(layer)
    return list(owners.values())


def _is_frozen(layer: nn.Module) -> bool:
    """Return True for timm's, torchvision's and detectron2's frozen BatchNorm, by its name."""
    return type(layer).__name__.startswith("Frozen")


@contextmanager
def _temporarily_in_eval(model: nn.Module, owners: list[_Statistics]) -> Iterator[None]:
    """Set the model to evaluation mode, and restore modes and buffers on exit, also on errors."""
    tracks = {layer: layer.track_running_stats for owner in owners for layer in owner.layers}
    with evaluation_mode(model):
        try:
            yield
        finally:
            _restore_buffers(owners)
            for layer, track in tracks.items():
                layer.track_running_stats = track


def _settle(
    model: nn.Module,
    owners: list[_Statistics],
    batches: Iterable[AnyBatch],
    backend: Backend,
    *,
    tolerance: float,
) -> tuple[list[Moments], int, float]:
    """Repeat the pass with the previous pass's statistics until they converge.

    Returns the moments, the number of passes and the largest change in the last one.
    """
    passes, settling = 0, float("inf")
    pooled: list[Moments] = []
    while not settling <= tolerance and passes < len(owners) + _SPARE_PASSES:  # also for NaN
        pooled = []  # frees the memory before the next pass allocates
        pooled = _measure(model, owners, batches, backend, as_in_training=False)
        passes += 1
        reached = (pair for pair in zip(owners, pooled, strict=True) if pair[1].count)
        changes = [_replace(owner, moments) for owner, moments in reached]
        change = torch.stack(changes).max() / backend.world_size
        sum_over_workers(change, backend)  # statistics may differ before the first pass
        settling = change.item()  # sync: whether another pass is needed
    return pooled, passes, settling


def _replace(owner: _Statistics, moments: Moments) -> Tensor:
    """Normalise the layers by the measured moments, and return the largest change."""
    mean, var = (tensor.to(owner.mean.dtype) for tensor in owner.measured(moments))
    layer = owner.layers[0]
    used = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
    change = _change(used, (mean, var), eps=owner.eps)
    for layer in owner.layers:
        layer.running_mean, layer.running_var = mean, var
    return torch.stack(change).abs().max().to(moments.mean.device)


def _measure(
    model: nn.Module,
    owners: list[_Statistics],
    batches: Iterable[AnyBatch],
    backend: Backend,
    *,
    as_in_training: bool,
) -> list[Moments]:
    """Run the model on the batches once and return the pooled moments of each layer's inputs."""
    parts = [
        Moments.of_nothing((1 + owner.by_sample) * len(owner.mean), device=owner.mean.device)
        for owner in owners
    ]
    hooks = []
    try:
        for owner, part in zip(owners, parts, strict=True):
            watch = _watch(owner, part, as_in_training=as_in_training)
            for layer in owner.layers:
                hooks += [layer.register_forward_pre_hook(watch, with_kwargs=True)]
        as_input = input_of(model)
        together = accelerator.is_remote(device_of(model)) or not as_in_training
        for batch in batches:
            for part_of_batch in by_spans(as_input(images_of(batch)), model, together=together):
                model(part_of_batch)
    finally:
        for hook in hooks:
            hook.remove()
    if as_in_training:
        _restore_buffers(owners)  # frees the last batch's moments
    pooled = pool(parts, dtypes=[owner.mean.dtype for owner in owners], backend=backend)
    _check(owners, pooled)
    return pooled


def _restore_buffers(owners: list[_Statistics]) -> None:
    """Restore the layers' own buffers."""
    for owner in owners:
        for layer in owner.layers:
            layer.running_mean, layer.running_var = owner.mean, owner.var


def _watch(owner: _Statistics, part: Moments, *, as_in_training: bool) -> Callable[..., None]:
    """Return a forward pre-hook that measures a layer's input.

    To normalise as in training, the layer stays in evaluation mode and temporarily gets the batch's
    moments as running statistics: the same numbers, measured once instead of twice, without dropout
    inside a layer, and without changing other flags. On a GPU several spans are processed at once,
    which is still faster; the layer then normalises them itself, without updating statistics. So
    does InstanceNorm, which has no running statistics during the pass. On a GPU these tensors are
    merged into the sums later, so nothing may write to them.
    """

    def watch(layer: _NormBase, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        values = [*args, *kwargs.values()][0]
        if not values.numel():
            return
        _check_shape(owner, layer, values)
        if owner.by_sample:
            part.add(of_samples(values))
            if as_in_training:
                layer.track_running_stats = False
                layer.running_mean = layer.running_var = None
            return
        mean, var = part.add(values)
        if not as_in_training:
            return
        if isinstance(layer, SpanBatchNorm):
            layer.track_running_stats = False
            layer.training = len(values) > layer.span
        mean, var = mean.to(owner.mean), var.to(owner.var)
        layer.running_mean, layer.running_var = mean, var
        if mean.dtype == torch.float16 and not layer.training:
            overflows = ~(mean.isfinite() & var.isfinite())
            part.deviations.masked_fill_(overflows, float("inf"))  # so all workers fail in `_check`

    return watch


def _check_shape(owner: _Statistics, layer: _NormBase, values: Tensor) -> None:
    """Raise ValueError if the input of a layer is not N x C x ..."""
    sizes = next((_SIZES[kind] for kind in _SIZES if isinstance(layer, kind)), "")
    fits = values.ndim == 2 + len(sizes) if sizes else values.ndim >= 2 + owner.by_sample
    if not fits or values.shape[1] != len(owner.mean):
        shape = " x ".join(map(str, values.shape))
        expected = " x ".join(["N", str(len(owner.mean)), *sizes])
        raise ValueError(
            f"the input of {describe_layer(owner.name)} is {shape}; expected {expected}"
        )


def _change(
    old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], *, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the shift of means, in old standard deviations, and the change of ln(variance)."""
    (mean, var), (new_mean, new_var) = old, new
    shift = (new_mean.double() - mean) / (var.double() + eps).sqrt()
    return shift, torch.log((new_var.double() + eps) / (var.double() + eps))


def _check(owners: list[_Statistics], pooled: list[Moments]) -> None:
    """Raise DataError if the moments cannot be running statistics."""
    if not any(moments.count for moments in pooled):
        raise DataError("polishing needs clean training images, but no worker has any")
    rounded = [
        torch.cat(owner.pair(moments)).to(owner.mean.dtype).isfinite().all()
        for owner, moments in zip(owners, pooled, strict=True)
    ]
    are_finite = torch.stack(rounded).tolist()  # sync: once for all layers
    for owner, moments, is_finite in zip(owners, pooled, are_finite, strict=True):
        if moments.count == 1 and not owner.by_sample:
            raise DataError(
                f"{describe_layer(owner.name)} got a single value per channel, which has no "
                "variance; polish with more images"
            )
        if not is_finite:
            hint = "check the images, the weights and the precision of the model"
            if owner.mean.dtype == torch.float16:
                hint = "use bf16 or float32 BatchNorm, or check the images and the weights"
            most = torch.finfo(owner.mean.dtype).max
            raise DataError(
                f"the inputs of {describe_layer(owner.name)} are infinite or NaN, or their mean or "
                f"variance is above {most:,.6g}, the most that its buffers hold; {hint}"
            )

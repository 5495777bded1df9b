"""Final Polishing: BatchNorm statistics measured exactly on clean training data.

Augmented training images are distributed differently from the clean ones that a model is
validated on, and running averages lag behind the weights (Kasagi et al., HPDC 2020, doi
10.1145/3369583.3392687). The statistics pass shows the model clean training images, forward only,
and replaces every running mean and variance by the moments over all of them, on all workers:
counts, means and sums of squares are pooled (`moments.py`), never averaged. What is exact is a
layer's moments over every value that it was given; what it is given depends on how the layers
before it normalise, and there are two answers:

- In one pass, the default, each layer normalises by the statistics of its batch, as in training, so
  that the layers above see what they were trained on. With a span (`batchnorm.py`) those are the
  recipe's, and neither batch size nor number of workers shows in the result; a plain BatchNorm's
  are the whole batch's. One value per channel, which training refuses, is normalised to zero.
- `sequential`, each layer normalises by statistics that are polished already, as in evaluation, so
  that each gets the moments of what it will see from then on. The order and the size of the
  batches do not matter, nor does a span. It costs several passes.

The first layer of a model has the same statistics either way. Further up the two come apart as far
as statistics of batches differ from those of all data: much for small batches, little for large.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch import accelerator
from largebatch.distributed.backend import Backend, sum_over_workers
from largebatch.distributed.connection import running_backend
from largebatch.errors import DataError
from largebatch.models.batchnorm import SpanBatchNorm, by_spans
from largebatch.models.inputs import AnyBatch, images_of
from largebatch.models.wrappers import device_of, evaluation_mode, local_model, uncompiled
from largebatch.polish.moments import Moments, pool
from largebatch.tracking.events import LayerDrift

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Parts of the channels of a layer; a drift gives the changes below which they lie."""

_SPARE_PASSES = 20
"""Passes beyond one per layer, for layers that are used several times in a forward pass."""


class Drift(tuple[LayerDrift, ...]):
    """What polishing changed: the layers it reached, in the order of the model."""

    passes = 1
    """How often the data was gone through."""

    settling = 0.0
    """Sequential: the largest change of the last pass, in standard deviations or ln(variance)."""

    settled = True
    """Sequential: false where passes were given up though the last one changed too much."""


@dataclass(slots=True)
class _Statistics:
    """A running mean and variance, and the layers that own them: one, or several that are tied."""

    name: str
    mean: Tensor
    var: Tensor
    eps: float
    layers: list[_BatchNorm] = field(default_factory=list)

    def drift(self, found: Moments) -> LayerDrift:
        """Compare with what was found."""
        old = self.mean, self.var
        shift, ratio = _change(old, (found.mean, found.variance), eps=self.eps)
        parts = shift.new_tensor(QUANTILES)
        return LayerDrift(
            name=self.name,
            channels=len(self.mean),
            mean_shift=shift.square().mean().sqrt().item(),  # sync: wanted in the report
            log_variance_ratio=ratio.square().mean().sqrt().item(),  # sync: wanted in the report
            shift_quantiles=tuple(shift.quantile(parts).tolist()),  # sync: wanted in the report
            ratio_quantiles=tuple(ratio.quantile(parts).tolist()),  # sync: wanted in the report
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
    """Set the running statistics of every BatchNorm layer to the moments over all batches.

    A batch is images (N x C x ..., on any device), a tuple that begins with them, or a mapping (see
    `models/inputs.py`); N may differ. Every worker gives its own batches of clean training data, or
    none; all get the same statistics if their weights are the same. Without a `backend`, those that
    torch.distributed or Horovod has connected are asked for (`running_backend`).

    Nothing else changes, and nothing at all if the pass fails; a layer that the forward pass does
    not use keeps its statistics. Layers with the same buffers are measured together. The model may
    be wrapped (DistributedDataParallel, AveragedModel, torch.compile); it runs uncompiled and
    without communicating, whatever its layers are (SyncBatchNorm).

    `sequential` goes through `batches` anew for each pass: a list or a loader, not an iterator. A
    pass settles every layer all of whose predecessors are settled: there is one for each BatchNorm
    on the longest way through the model, and one that finds nothing moved. It stops once no mean
    moves by more than `tolerance` standard deviations nor a ln(variance) by that; 0 is exact.

    Returns the drift of each layer, in the order of the model. Raises DataError if no worker had a
    batch, if a layer had a single value per channel, or if moments are not finite; BackendError if
    workers are not connected; ValueError if the model is sharded (FSDP) or has no such layer with
    running statistics, if a batch has no images, or if `batches` can be used only once.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"polish takes a model first, then batches; got a {type(model).__name__}")
    model = local_model(model)
    if backend is None:
        backend = running_backend(device_of(model))
    owners = _owners(model)
    if not owners:
        raise ValueError("the model has no BatchNorm layer with running statistics to polish")
    if sequential and isinstance(batches, Iterator):
        raise ValueError(
            f"sequential polishing needs the batches again for every pass, and a "
            f"{type(batches).__name__} gives them once; pass a list, a loader or another iterable"
        )
    passes, settling = 1, 0.0
    with _borrowed(model, owners), uncompiled():
        if sequential:
            found, passes, settling = _settle(model, owners, batches, backend, tolerance=tolerance)
        else:
            found = _measure(model, owners, batches, backend, as_in_training=True)
    reached = [pair for pair in zip(owners, found, strict=True) if pair[1].count]
    drift = Drift(owner.drift(part) for owner, part in reached)
    for owner, part in reached:
        owner.mean.copy_(part.mean)
        owner.var.copy_(part.variance)
    drift.passes, drift.settling, drift.settled = passes, settling, settling <= tolerance
    return drift


def _owners(model: nn.Module) -> list[_Statistics]:
    """Return the running statistics of the model, each once, in its order."""
    owners: dict[int, _Statistics] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            mean, var = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
            fresh = _Statistics(name, mean, var, layer.eps)
            owners.setdefault(mean.data_ptr(), fresh).layers.append(layer)
    return list(owners.values())


@contextmanager
def _borrowed(model: nn.Module, owners: list[_Statistics]) -> Iterator[None]:
    """Let everything be in evaluation mode, and give everything back on exit, whatever happens."""
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
    """Repeat the pass with the statistics of the one before; return also how often, how settled."""
    passes, settling = 0, float("inf")
    found: list[Moments] = []
    while not settling <= tolerance and passes < len(owners) + _SPARE_PASSES:  # NaN goes on
        found = []  # frees the last pass's before there are others
        found = _measure(model, owners, batches, backend, as_in_training=False)
        passes += 1
        reached = (pair for pair in zip(owners, found, strict=True) if pair[1].count)
        moved = [_replace(owner, part) for owner, part in reached]
        change = torch.stack(moved).max() / backend.world_size
        sum_over_workers(change, backend)  # their statistics may differ before the first pass
        settling = change.item()  # sync: whether another pass is needed
    return found, passes, settling


def _replace(owner: _Statistics, found: Moments) -> Tensor:
    """Let the layers normalise by what was found, and return by how much that differs at most."""
    mean, var = found.mean.to(owner.mean), found.variance.to(owner.var)
    layer = owner.layers[0]
    used = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
    change = _change(used, (mean, var), eps=owner.eps)
    for layer in owner.layers:
        layer.running_mean, layer.running_var = mean, var
    return torch.stack(change).abs().max()


def _measure(
    model: nn.Module,
    owners: list[_Statistics],
    batches: Iterable[AnyBatch],
    backend: Backend,
    *,
    as_in_training: bool,
) -> list[Moments]:
    """Go through the batches once and return the moments of what each layer was given, pooled."""
    parts = [Moments.of_nothing(len(owner.mean), device=owner.mean.device) for owner in owners]
    hooks = []
    try:
        for owner, part in zip(owners, parts, strict=True):
            watch = _watch(part, as_in_training=as_in_training)
            for layer in owner.layers:
                hooks += [layer.register_forward_pre_hook(watch, with_kwargs=True)]
        device = device_of(model)
        for batch in batches:
            images = images_of(batch).to(device, non_blocking=True)
            for some in by_spans(
                images, model, together=accelerator.is_remote(device) or not as_in_training
            ):
                model(some)
    finally:
        for hook in hooks:
            hook.remove()
    if as_in_training:
        _restore_buffers(owners)  # frees what the last batch's moments occupy
    found = pool(parts, dtypes=[owner.mean.dtype for owner in owners], backend=backend)
    _check(owners, found)
    return found


def _restore_buffers(owners: list[_Statistics]) -> None:
    """Give the layers their own buffers again."""
    for owner in owners:
        for layer in owner.layers:
            layer.running_mean, layer.running_var = owner.mean, owner.var


def _watch(part: Moments, *, as_in_training: bool) -> Callable[..., None]:
    """Return what looks at a layer's input before the layer does.

    To normalise as in training, the layer stays in evaluation mode and is lent the batch's own
    moments as running statistics: the same numbers, measured once instead of twice, no dropout
    inside a layer, and no other flag to change. A GPU is given several spans at once, which is
    faster all the same; they take a layer's own way, which counts nothing then.
    """

    def watch(layer: _BatchNorm, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        values = [*args, *kwargs.values()][0]
        if not values.numel():
            return
        mean, var = part.add(values)
        if not as_in_training:
            return
        if isinstance(layer, SpanBatchNorm):
            layer.track_running_stats = False
            layer.training = len(values) > layer.span
        layer.running_mean = mean.to(layer.running_mean)
        layer.running_var = var.to(layer.running_var)

    return watch


def _change(
    old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], *, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the shift of means, in old standard deviations, and the change of ln(variance)."""
    (mean, var), (new_mean, new_var) = old, new
    shift = (new_mean.double() - mean) / (var.double() + eps).sqrt()
    return shift, torch.log((new_var.double() + eps) / (var.double() + eps))


def _check(owners: list[_Statistics], found: list[Moments]) -> None:
    """Refuse moments that cannot be running statistics."""
    if not any(part.count for part in found):
        raise DataError("polishing needs clean training images, and no worker was given any")
    sums = torch.stack([part.mean.sum() + part.deviations.sum() for part in found])
    finite = sums.isfinite().tolist()  # sync: once for all layers
    for owner, part, usable in zip(owners, found, finite, strict=True):
        if part.count == 1:
            raise DataError(
                f"layer {owner.name} was given a single value per channel, which has no variance; "
                "polish with more images"
            )
        if not usable:
            raise DataError(
                f"layer {owner.name} was given infinite values or not numbers; look at the "
                "images, at the weights and at the precision that the model computes in"
            )

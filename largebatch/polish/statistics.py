"""Final Polishing: running statistics measured exactly on clean training data.

The pass runs the model forward on clean training images (Kasagi et al., HPDC 2020, doi
10.1145/3369583.3392687) and replaces every running mean and variance with the moments over all of
them, on all workers: counts, means and sums of squares are pooled, never averaged. Each layer
normalises by the statistics of its batch, as in training; with a span (`batchnorm.py`) the result
does not depend on the batch size or the number of workers.

Measured is what torch's functions normalise with a layer's buffers, wherever these are called: a
layer may change its input first, and a block may use the buffers of a layer inside. The model is in
evaluation mode, and these functions get the batch's moments; the buffers stay as they are.
"""

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from largebatch import accelerator, proof
from largebatch.distributed.agreement import require_agreement, sum_of_bits
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import running_backend
from largebatch.errors import DataError, shorten
from largebatch.formatting import MISSING, Tabular, plural
from largebatch.models import kernels
from largebatch.models.batchnorm import SpanBatchNorm, by_spans
from largebatch.models.batchnorm_functional import normalise
from largebatch.models.inputs import images_of
from largebatch.models.wrappers import (
    describe_layer,
    device_of,
    input_of,
    local_model,
    mode,
    needs_host,
    uncompiled,
    watch_host,
)
from largebatch.polish.moments import TOGETHER, Moments, pool
from largebatch.replacing import replaced
from largebatch.tracking.events import LayerDrift

_LOG = logging.getLogger(__name__)

_NATIVE = (
    *("input", "weight", "bias", "running_mean", "running_var"),
    *("training", "momentum", "eps", "cudnn_enabled"),
)
"""Arguments of torch.batch_norm in their order."""

_KEYS = {"running_mean", "running_var"}

_Buffer = tuple[nn.Module, str, Tensor, Tensor]
"""A module, a name in it, its buffer, and a copy of the content."""


class Drift(Tabular, tuple[LayerDrift, ...]):
    """Changes by polishing, of the layers that it reached, in the order of the model.

    Prints as a table.
    """

    notes: Mapping[str, str] = {}
    """Layers that kept their statistics, by name, and why."""

    def _caption(self) -> str:
        return f"polished {plural(len(self), 'BatchNorm layer')}, {len(self.notes):,} kept"

    def _rows(self) -> list[list[str]]:
        head = ["layer", "channels", "means moved by (std)", "variances by a factor of"]
        rows = [
            [
                *(it.name or "(the model)", f"{it.channels:,}"),
                *(f"{it.mean_shift:.3g}", f"{math.exp(it.log_variance_ratio):.3g}"),
            ]
            for it in self
        ]
        return [head, *rows, *([name, MISSING, MISSING, why] for name, why in self.notes.items())]


@dataclass(slots=True)
class _Statistics:
    """A running mean and variance, and the one or more layers that use them."""

    name: str
    mean: Tensor
    var: Tensor
    eps: float
    span: int | None
    """Number of samples that the layer normalises together in training; None for a whole batch."""

    measured: Moments
    """Moments of this worker's inputs."""

    layers: list[_BatchNorm] = field(default_factory=list)

    calls: int = 0
    """Number of times that torch's functions were called with these statistics."""

    has_single: bool = False
    """True if a span had a single value per channel."""

    def replace(self, moments: Moments) -> LayerDrift:
        """Change the statistics to the moments, and return the change."""
        mean, var = (it.to(self.mean.device) for it in (moments.mean, moments.variance))
        shift = (mean - self.mean.double()) / (self.var.double() + self.eps).sqrt()
        ratio = torch.log((var + self.eps) / (self.var.double() + self.eps))
        shift, ratio = torch.stack([shift, ratio]).cpu()  # sync: once per layer, for the report
        self.mean.copy_(mean)
        self.var.copy_(var)
        return LayerDrift(
            name=self.name,
            channels=len(self.mean),
            mean_shift=shift.square().mean().sqrt().item(),
            log_variance_ratio=ratio.square().mean().sqrt().item(),
        )


@torch.no_grad()
def polish(
    model: nn.Module,
    batches: Iterable[Any],
    backend: Backend | None = None,
    *,
    skip: Iterable[str] = (),
    forward: Callable[[nn.Module, Any], object] | None = None,
    graph: bool = False,
) -> Drift:
    """Set the running statistics of every BatchNorm layer to the moments over all batches.

    A batch is images (N x C x ..., on any device), a tuple that starts with images, or a mapping
    (see `models/inputs.py`); N may vary. For other batches and models of several inputs,
    `forward(model, batch)` runs the model; it gets the batch as it is and the module inside
    wrappers. Every worker passes its own batches of clean training data, or none; all get the same
    statistics, and their weights must be equal. The default `backend` is that of the workers
    connected by torch.distributed or Horovod (`running_backend`). With `graph` passes over batches
    of one size are recorded in a CUDA graph and replayed, where that is possible: the same bits.

    If some layers with weights are in training mode, a layer in evaluation mode is frozen: it keeps
    its statistics and normalises by them, as in training. `skip` has names of layers, or of modules
    with layers inside, to freeze as well. The drift's `notes` name every layer that kept its
    statistics, also those that the forward pass does not reach.

    Nothing else changes, and nothing at all if the pass fails. The model may be wrapped
    (DistributedDataParallel, DataParallel, AveragedModel, torch.compile); it runs uncompiled and
    without communication. Layers are torch's BatchNorm and its subclasses, with one argument, also
    those that share buffers; classes named `Frozen...` stay as they are. Statistics are rounded
    once to the type of the buffers, images converted to that of the convolutions. A batch, or span,
    with a single value per channel is normalised to 0, as PyTorch's kernels would: a warning is
    logged. Layers that normalise by a part of their buffers, as ghost batches of other libraries,
    are refused.

    Returns the drift of each layer, in the order of the model. Raises DataError if no worker had a
    batch, if no layer was reached, if a layer had a single value per channel, or if moments are not
    finite, also after they are rounded to the type of the buffers; BackendError if workers are not
    connected; MismatchError if workers have other weights or frozen layers; ValueError if the model
    is sharded (FSDP, tensor parallelism), has no running statistics to measure or those of an
    unknown layer, if a name in `skip` is unknown, if a layer takes several arguments or normalises
    in another way, or if a batch has no images.

    >>> from torch import nn, randn
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    >>> drift = polish(model, [randn(8, 3, 9, 9), randn(5, 3, 9, 9)])
    >>> [(layer.name, layer.channels) for layer in drift]
    [('1', 4)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"polish takes a model first, then batches; got a {type(model).__name__}")
    model = local_model(model)
    if backend is None:
        backend = running_backend(device_of(model))
    left = _left_out(model, [skip] if isinstance(skip, str) else skip)
    owners = _owners(model, left)
    notes = {name: left[layer] for name, layer in _layers(model) if layer in left}
    _require_some(owners, notes, model)
    with mode(model, training=False), uncompiled():
        _require_same_network(model, owners, backend, kept=notes)
        pooled = _measure(model, owners, batches, backend, forward, graph=graph)
    pairs = list(zip(owners, pooled, strict=True))
    drift = Drift(owner.replace(moments) for owner, moments in pairs if moments.count)
    unused = "kept: the forward pass in evaluation mode does not use it"
    drift.notes = notes | {owner.name: unused for owner, moments in pairs if not moments.count}
    return drift


def _left_out(model: nn.Module, skip: Iterable[str]) -> dict[nn.Module, str]:
    left = {}
    leaves = [it for it in model.modules() if not [*it.children()]]
    if any(it.training and {*it.parameters(), *it.buffers()} for it in leaves):
        why = "kept: it is in evaluation mode, and other layers are in training mode"
        left = {it: why for it in model.modules() if not it.training}
    for it in model.modules():  # timm's, torchvision's and detectron2's
        if type(it).__name__.startswith("Frozen"):
            left[it] = f"kept: it is a {type(it).__name__}"
    named = dict(model.named_modules(remove_duplicate=False))
    for name in skip:
        inside = [*named[name].modules()] if name in named else []
        if not any(map(_layers, inside)):
            raise ValueError(
                f"skip: {name!r} is not a layer with running statistics, nor a module with one "
                f"inside; the model has {shorten([it for it, _ in _layers(model)])}"
            )
        left |= dict.fromkeys(inside, "kept: it is in `skip`")
    return left


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if _KEYS & {key for key, _ in layer.named_buffers(recurse=False)}
    ]


def _owners(model: nn.Module, left: Mapping[nn.Module, str]) -> list[_Statistics]:
    """Return the running statistics to measure, each once; ValueError if one cannot be."""
    owners: dict[int, _Statistics] = {}
    for name, layer in _layers(model):
        if layer in left:
            continue
        if not isinstance(layer, _BatchNorm):
            raise ValueError(  # noqa: TRY004 -- the model's content is wrong, not its type
                f"{describe_layer(name)} is of type {type(layer).__name__}, whose running "
                "statistics cannot be measured; expected subclasses of torch's BatchNorm, or a "
                "name in `skip`"
            )
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
            raise ValueError(f"{describe_layer(name)} is not initialised; run it on a batch first")
        mean = layer.get_buffer("running_mean")
        var = layer.get_buffer("running_var")
        span = layer.span if isinstance(layer, SpanBatchNorm) else None
        zeros = torch.zeros(len(mean), dtype=torch.float64, device=mean.device)
        nothing = Moments(0.0, zeros, zeros.clone())
        fresh = _Statistics(name, mean, var, layer.eps, span, nothing)
        # Layers that share a buffer, as in a model with a layer used twice, are measured as one.
        owners.setdefault(mean.data_ptr(), fresh).layers.append(layer)
    return list(owners.values())


def _require_some(owners: list[_Statistics], kept: Mapping[str, str], model: nn.Module) -> None:
    if not owners and not kept:
        raise ValueError("the model has no BatchNorm with running statistics: nothing to polish")
    if not owners:
        name, why = next(iter(kept.items()))
        raise ValueError(f"no layer is left to polish: {describe_layer(name)} is {why}")
    names = {owner.mean.data_ptr(): owner.name for owner in owners}
    for name in kept:
        for buffer in model.get_submodule(name).buffers(recurse=False):
            if buffer.data_ptr() in names:
                raise ValueError(
                    f"{describe_layer(name)} keeps its statistics, which it shares with "
                    f"{describe_layer(names[buffer.data_ptr()])}; leave out both or none"
                )


def _other_buffers(model: nn.Module) -> list[_Buffer]:
    """Return the other buffers that a forward pass may change, with copies."""
    return [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in {*_KEYS, "num_batches_tracked"}
    ]


@contextmanager
def _kept(buffers: list[_Buffer]) -> Iterator[None]:
    """Restore buffers after a batch: else the statistics would depend on the order of batches."""
    try:
        yield
    finally:
        for module, name, buffer, content in buffers:
            module._buffers[name] = buffer
            if not buffer.equal(content):
                buffer.resize_(content.shape).copy_(content)


def _require_same_network(
    model: nn.Module, owners: list[_Statistics], backend: Backend, *, kept: Mapping[str, str]
) -> None:
    if backend.world_size == 1:
        return
    layers = [model.get_submodule(name) for name in kept]
    tensors = [*model.parameters(), *(it for layer in layers for it in layer.buffers())]
    names = [owner.name for owner in owners]
    facts = {"layers to measure": names, "checksum of the weights": sum_of_bits(tensors)}
    remedy = "send one worker's weights to all, and set the same layers to evaluation mode"
    require_agreement(facts, backend, backend.device, remedy=remedy)


def _measure(
    model: nn.Module,
    owners: list[_Statistics],
    batches: Iterable[Any],
    backend: Backend,
    forward: Callable[[nn.Module, Any], object] | None,
    *,
    graph: bool,
) -> list[Moments]:
    as_input = input_of(model)
    num_batches = 0
    others = _other_buffers(model)
    together = accelerator.is_remote(device_of(model))
    # Other buffers are restored by the host after each batch, which a graph would not repeat.
    graph = graph and together and not others and needs_host(model) is None
    graph = graph and proof.uses(proof.GRAPH, device_of(model))
    replayed: Callable[[Tensor], None] | None = None
    with ExitStack() as stack:
        for owner in owners:
            for layer in owner.layers:
                checked = _checked(owner, layer, layer.forward)
                stack.enter_context(replaced(layer, "forward", checked))
        for batch in batches:
            num_batches += 1
            if forward:
                with _FunctionWatch(owners), _kept(others):
                    forward(model, batch)
                continue
            for part in by_spans(as_input(images_of(batch)), model, together=together):
                if replayed is not None:
                    replayed(part)
                    continue
                with _FunctionWatch(owners), _kept(others):
                    model(part)
                # A pass that fills the list of pending batches would merge it inside the graph.
                if graph and max(owner.calls for owner in owners) < TOGETHER:
                    replayed = _replayed(model, owners)
    pooled = pool([owner.measured for owner in owners], backend=backend)
    if not any(moments.count for moments in pooled):
        total = torch.tensor(num_batches, device=backend.device)
        backend.all_reduce(total).wait()
        if not total.item():  # sync: for the message
            raise DataError("polishing needs clean training images, but no worker has any")
        raise DataError(
            f"no layer with running statistics was reached in {total} batches, such as "
            f"{describe_layer(owners[0].name)}, which its evaluation mode does not use"
        )
    _check(owners, pooled)
    return pooled


def _replayed(model: nn.Module, owners: list[_Statistics]) -> Callable[[Tensor], None]:
    """Return a function that measures images, replayed from a graph for images of one shape."""
    counts: dict[torch.Size, list[list[list[int]]]] = {}

    def moments_of(images: Tensor) -> Tensor:
        before = [owner.measured.swap_pending([]) for owner in owners]
        try:
            with _FunctionWatch(owners):
                model(images)
        finally:
            added = [
                owner.measured.swap_pending(pending)
                for owner, pending in zip(owners, before, strict=True)
            ]
        counts[images.shape] = [[spans for spans, *_ in calls] for calls in added]
        # One tensor, which a replay overwrites: means and variances, call by call.
        moments = [tensor for calls in added for call in calls for tensor in call[1:]]
        return torch.cat([tensor.double().flatten() for tensor in moments])

    replayed = accelerator.Replayed(moments_of, device_of(model), partial(watch_host, model))

    def measure(images: Tensor) -> None:
        values = replayed(images)
        for owner, calls in zip(owners, counts[images.shape], strict=True):
            for spans in calls:
                size = len(spans) * len(owner.mean)
                mean, var, values = values.tensor_split([size, 2 * size])
                owner.measured.add_later(spans, mean.view(len(spans), -1), var.view(len(spans), -1))

    return measure


def _checked(
    owner: _Statistics, layer: _BatchNorm, forward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a layer's forward pass that refuses several arguments and formulas of its own."""

    def call(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 -- of any layer
        given = [it for it in (*args, *kwargs.values()) if it is not None]
        if len(given) != 1 or not isinstance(given[0], Tensor):
            kinds = ", ".join(type(it).__name__ for it in given)
            raise ValueError(
                f"{describe_layer(owner.name)} takes ({kinds}), so it is not known which "
                "values count, for example with a mask; leave it out with `skip`"
            )
        calls = owner.calls
        output = forward(*args, **kwargs)
        if owner.calls == calls:
            raise ValueError(
                f"{describe_layer(owner.name)} is a {type(layer).__name__}, which does not call "
                "torch's batch_norm with its statistics; leave it out with `skip`"
            )
        return output

    return call


class _FunctionWatch(TorchFunctionMode):
    """Measures what torch's functions normalise, and normalises it as in training.

    A function gets the batch's moments as running statistics, measured once. On a GPU they are
    merged into the sums later, so nothing may write to them.
    """

    def __init__(self, owners: list[_Statistics]) -> None:
        super().__init__()
        self._by_address = {owner.mean.data_ptr(): owner for owner in owners}

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 -- of any function
        del types
        if function is torch.batch_norm:  # called directly: F.batch_norm is not traced inside
            kwargs = {**dict(zip(_NATIVE, args, strict=False)), **(kwargs or {})}
            kwargs.pop("cudnn_enabled", None)
            function = F.batch_norm
            args = ()
        if function is F.batch_norm:
            given = inspect.signature(function).bind(*args, **kwargs or {}).arguments
            mean = given.get("running_mean")
            if mean is not None and mean.data_ptr() in self._by_address:
                return _normalised(self._by_address[mean.data_ptr()], given)
        return function(*args, **kwargs or {})


def _normalised(owner: _Statistics, given: dict[str, Any]) -> Tensor:
    values = given["input"]
    owner.calls += 1
    if torch._C._functorch.is_functorch_wrapped_tensor(values):
        raise ValueError(
            f"{describe_layer(owner.name)} is inside a transform of torch.func, where its input "
            "cannot be measured; leave it out with `skip`"
        )
    if not values.numel():
        return F.batch_norm(**given)
    channels = values.shape[1]
    if channels != len(owner.mean):
        raise ValueError(
            f"{describe_layer(owner.name)} normalises {channels} channels by a part of "
            f"{len(owner.mean)} statistics, as ghost batches of other libraries do; use "
            "largebatch.models.with_span for ghost batches, or leave it out with `skip`"
        )
    span = owner.span or len(values)
    affine = (given.get("weight"), given.get("bias"))
    settings: dict[str, Any] = {"eps": given.get("eps", 1e-5), "span": span}
    last = len(values) % span or span  # images in the last span
    if last * values[0].numel() == channels and not owner.has_single:
        owner.has_single = True
        _LOG.warning(
            "%s got a single value per channel in a batch, which becomes 0 whatever the image; "
            "polish in batches, or spans, without a last one of one image",
            describe_layer(owner.name),
        )
    if kernels.take(values, span=span):
        out, stat = kernels.batchnorm().normalise(values, None, *affine, relu=False, **settings)
        owner.measured.add_spans(values.detach(), stat, span=span)
        return out  # type: ignore[no-any-return]  # a module by its kind
    mean, var = (it.to(owner.mean) for it in owner.measured.add(values.detach()))
    if len(values) > span:
        return normalise(values, *affine, **settings)
    if mean.dtype == torch.float16:
        overflows = ~(mean.isfinite() & var.isfinite())
        owner.measured.deviations.masked_fill_(overflows, float("inf"))  # all fail in `_check`
    if torch.is_grad_enabled() and values.requires_grad:
        return F.batch_norm(**given | {"running_mean": None, "running_var": None, "training": True})
    return F.batch_norm(**given | {"running_mean": mean, "running_var": var, "training": False})


def _check(owners: list[_Statistics], pooled: list[Moments]) -> None:
    rounded = [
        torch.cat([moments.mean, moments.variance]).to(owner.mean.dtype).isfinite().all()
        for owner, moments in zip(owners, pooled, strict=True)
    ]
    are_finite = torch.stack(rounded).tolist()  # sync: once for all layers
    for owner, moments, is_finite in zip(owners, pooled, are_finite, strict=True):
        if moments.count == 1:
            name = describe_layer(owner.name)
            raise DataError(f"{name} got a single value per channel; polish with more images")
        if moments.count and not is_finite:
            most = torch.finfo(owner.mean.dtype).max
            raise DataError(
                f"the inputs of {describe_layer(owner.name)} are infinite or NaN, or their mean or "
                f"variance is above {most:,.6g}, the most that its buffers hold; check the images "
                "and the weights, and use float32 BatchNorm where it is fp16"
            )

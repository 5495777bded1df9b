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

Measured is what torch's functions normalise with a layer's buffers, wherever these are called: a
layer may change its input first, and a block may use the buffers of a layer inside. The model is in
evaluation mode, and in one pass these functions get the moments of the batch instead of buffers,
which stay as they are: a block that reads them does not depend on the order of the batches.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch as _C
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from largebatch import accelerator
from largebatch.distributed.agreement import require_agreement, sum_of_bits
from largebatch.distributed.backend import Backend, sum_over_workers
from largebatch.distributed.connection import running_backend
from largebatch.errors import DataError, shorten
from largebatch.models import kernels
from largebatch.models.batchnorm import SpanBatchNorm, by_spans, in_backward
from largebatch.models.batchnorm_functional import normalise
from largebatch.models.inputs import images_of, sizes
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

_NATIVE = (
    *("input", "weight", "bias", "running_mean", "running_var"),
    *("training", "momentum", "eps", "cudnn_enabled"),
)
"""Arguments of torch.batch_norm in their order."""

_KEYS = {"running_mean", "running_var"}

_SAME = 0.02
"""Relative and absolute difference up to which a layer's own formula is that of BatchNorm."""

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

    notes: Mapping[str, str] = {}
    """Layers that kept their statistics, by name, and why; and layers measured although frozen."""


@dataclass(slots=True)
class _Statistics:
    """A running mean and variance, and the one or more layers that use them."""

    name: str
    mean: Tensor
    var: Tensor
    eps: float
    by_sample: bool
    """True for InstanceNorm, whose moments are those of `of_samples`."""

    span: int | None
    """Number of samples that the layer normalises together in training; None for a whole batch."""

    layers: list[_NormBase] = field(default_factory=list)

    calls: int = 0
    """Number of times that torch's functions were called with these statistics."""

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
        return LayerDrift(
            name=self.name,
            channels=len(self.mean),
            mean_shift=shift.square().mean().sqrt().item(),
            log_variance_ratio=ratio.square().mean().sqrt().item(),
        )


@torch.no_grad()
def polish(  # noqa: PLR0913 -- each option has a default
    model: nn.Module,
    batches: Iterable[Any],
    backend: Backend | None = None,
    *,
    sequential: bool = False,
    tolerance: float = 1e-6,
    skip: Iterable[str] = (),
    forward: Callable[[nn.Module, Any], object] | None = None,
) -> Drift:
    """Set the running statistics of every normalisation layer to the moments over all batches.

    A batch is images (N x C x ..., on any device), a tuple that starts with images, or a mapping
    (see `models/inputs.py`); N may vary. For other batches and models of several inputs,
    `forward(model, batch)` runs the model; it gets the batch as it is and the module inside
    wrappers. Every worker passes its own batches of clean training data, or none; all get the same
    statistics, and their weights must be equal. The default `backend` is that of the workers
    connected by torch.distributed or Horovod (`running_backend`).

    If some layers with weights are in training mode, a layer in evaluation mode is frozen: it keeps
    its statistics and normalises by them during the call, so that the layers behind it get what
    they get in training. A model that is in evaluation mode as a whole is measured as a whole.
    `skip` has names of layers, or of modules with layers inside, to freeze as well. The drift's
    `notes` name every layer that kept its statistics, also those that the forward pass does not
    reach, and layers that are measured although they have momentum 0 and frozen weights.

    Nothing else changes, and nothing at all if the pass fails. Layers that share buffers are
    measured together. The model may be wrapped (DistributedDataParallel, DataParallel,
    AveragedModel, torch.compile); it runs uncompiled and without communication, also in
    SyncBatchNorm layers. With FSDP2 (`fully_shard`) every worker holds the complete weights during
    the call.

    Layers are torch's BatchNorm and InstanceNorm and their subclasses, with one argument; classes
    named `Frozen...` stay as they are. A subclass may change its input before it calls torch's
    function, or have a formula of its own with the same result. Statistics are rounded once to the
    type of the buffers. Images are converted to the type of the convolutions and linear layers if
    these have one.

    `sequential` iterates over `batches` in each pass: pass a list or a loader, not an iterator. A
    pass converges every layer whose predecessors have converged, so there is one pass per BatchNorm
    on the longest path through the model, and a last one without changes. The passes end when no
    mean changes by more than `tolerance` standard deviations and no ln(variance) by more than
    `tolerance`; 0 is exact.

    Returns the drift of each layer, in the order of the model. Raises DataError if no worker had a
    batch, if no layer was reached, if a layer had a single value per channel, or if moments are not
    finite, also after they are rounded to the type of the buffers; BackendError if workers are not
    connected; MismatchError if workers have other weights or frozen layers; ValueError if the model
    is sharded (FSDP1, tensor parallelism), has no running statistics to measure or those of an
    unknown layer, if a name in `skip` is unknown, if a layer takes several arguments or normalises
    in another way, if a batch has no images, or if `batches` can be used only once.
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
    if sequential and isinstance(batches, Iterator):
        raise ValueError(
            f"sequential polishing needs the batches again for every pass, and a "
            f"{type(batches).__name__} yields them once; pass a list, a loader or another iterable"
        )
    run = _Run(model, owners, batches, backend, forward, _Buffers(model))
    passes, settling = 1, 0.0
    with unsharded(model), evaluation_mode(model), uncompiled():
        _require_same_network(run, sequential=sequential, kept=notes)
        if sequential:
            pooled, passes, settling = _settle(run, tolerance=tolerance)
        else:
            pooled = _measure(run, as_in_training=True)
    reached = [pair for pair in zip(owners, pooled, strict=True) if pair[1].count]
    drift = Drift(owner.drift(moments) for owner, moments in reached)
    for owner, moments in reached:
        mean, var = owner.measured(moments)
        owner.mean.copy_(mean)
        owner.var.copy_(var)
    drift.passes, drift.settling, drift.settled = passes, settling, settling <= tolerance
    drift.notes = notes | _notes(owners, pooled)
    return drift


def _notes(owners: list[_Statistics], pooled: list[Moments]) -> dict[str, str]:
    unused = "kept: the forward pass in evaluation mode does not use it"
    frozen = "measured, although its momentum is 0 and no weight of it requires a gradient"
    notes = {}
    for owner, moments in zip(owners, pooled, strict=True):
        weights = [it for layer in owner.layers for it in layer.parameters(recurse=False)]
        still = not any(it.momentum != 0 for it in owner.layers)
        if not moments.count:
            notes[owner.name] = unused
        elif still and not any(it.requires_grad for it in weights):
            notes[owner.name] = frozen
    return notes


def _left_out(model: nn.Module, skip: Iterable[str]) -> dict[nn.Module, str]:
    """Return why modules keep their statistics: by mode, by class, by name."""
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
    """Return the layers with running statistics, with their names."""
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if _KEYS & {key for key, _ in layer.named_buffers(recurse=False)}
    ]


def _owners(model: nn.Module, left: Mapping[nn.Module, str]) -> list[_Statistics]:
    """Return the running statistics to measure, each once, in the model's order.

    Raises ValueError, naming the layer, for statistics that cannot be measured.
    """
    owners: dict[int, _Statistics] = {}
    for name, layer in _layers(model):
        if layer in left:
            continue
        if not isinstance(layer, _NormBase):
            raise ValueError(  # noqa: TRY004 -- the model's content is wrong, not its type
                f"{describe_layer(name)} is of type {type(layer).__name__}, whose running "
                "statistics cannot be measured; expected subclasses of torch's BatchNorm and "
                "InstanceNorm, or a name in `skip`"
            )
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
            raise ValueError(
                f"{describe_layer(name)} is not initialised; run the model on a batch first"
            )
        mean, var = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
        span = layer.span if isinstance(layer, SpanBatchNorm) else None
        fresh = _Statistics(name, mean, var, layer.eps, isinstance(layer, _InstanceNorm), span)
        owners.setdefault(mean.data_ptr(), fresh).layers.append(layer)
    return list(owners.values())


def _require_some(owners: list[_Statistics], kept: Mapping[str, str], model: nn.Module) -> None:
    """Raise ValueError unless there are statistics to measure, and none of them to keep too."""
    if not owners and not kept:
        raise ValueError(
            "the model has no running statistics, so there is nothing to polish: no BatchNorm, "
            "and no InstanceNorm with track_running_stats"
        )
    if not owners:
        name, why = next(iter(kept.items()))
        raise ValueError(
            f"no layer is left to polish: {describe_layer(name)} is {why}; to measure the whole "
            "model call model.eval() first"
        )
    names = {owner.mean.data_ptr(): owner.name for owner in owners}
    for name in kept:
        for buffer in model.get_submodule(name).buffers(recurse=False):
            if buffer.data_ptr() in names:
                raise ValueError(
                    f"{describe_layer(name)} keeps its statistics, which it shares with "
                    f"{describe_layer(names[buffer.data_ptr()])}; leave out both or none"
                )


@dataclass(frozen=True, slots=True)
class _Run:
    """What passes have in common."""

    model: nn.Module
    owners: list[_Statistics]
    batches: Iterable[Any]
    backend: Backend
    forward: Callable[[nn.Module, Any], object] | None
    buffers: "_Buffers"


class _Buffers:
    """Buffers that a forward pass may change or replace, also in evaluation: restored after each.

    Such are the ranges that quantisation-aware training observes. Without this the statistics would
    depend on the order of the batches.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in {*_KEYS, "num_batches_tracked"} and _may_change(buffer)
        ]

    def __enter__(self) -> None:
        """Do nothing: the buffers are known."""

    def __exit__(self, *_: object) -> None:
        """Restore the buffers. Version counters do not tell which: observers change them in C++."""
        for module, name, buffer, content in self._kept:
            module._buffers[name] = buffer
            buffer.resize_(content.shape).copy_(content)


def _may_change(buffer: Tensor) -> bool:
    """Return True if a forward pass could write to a buffer: one number at each address."""
    is_plain = buffer.layout == torch.strided and not is_lazy(buffer) and not buffer.is_inference()
    return is_plain and torch._debug_has_internal_overlap(buffer) != 1


def _require_same_network(run: _Run, *, sequential: bool, kept: Mapping[str, str]) -> None:
    """Raise MismatchError if workers would pool the statistics of different networks."""
    backend = run.backend
    if backend.world_size == 1:
        return
    layers = [run.model.get_submodule(name) for name in kept]
    tensors = [*run.model.parameters(), *(it for layer in layers for it in layer.buffers())]
    sums = (sum_of_bits(it).to(backend.device) for it in tensors if not is_lazy(it))
    require_agreement(
        {
            "layers to measure": [owner.name for owner in run.owners],
            "sequential": sequential,
            "checksum of the weights": int(sum(sums)),  # sync: once
        },
        backend,
        backend.device,
        remedy="polish pools statistics of one network: send one worker's weights to all, and set "
        "the same layers to evaluation mode",
    )


def _settle(run: _Run, *, tolerance: float) -> tuple[list[Moments], int, float]:
    """Repeat the pass with the previous pass's statistics until they converge.

    Returns the moments, the number of passes and the largest change in the last one.
    """
    passes, settling = 0, float("inf")
    pooled: list[Moments] = []
    before = [(owner.mean.clone(), owner.var.clone()) for owner in run.owners]
    try:
        while not settling <= tolerance and passes < len(run.owners) + _SPARE_PASSES:  # also NaN
            pooled = []  # frees the memory before the next pass allocates
            pooled = _measure(run, as_in_training=False)
            passes += 1
            reached = (pair for pair in zip(run.owners, pooled, strict=True) if pair[1].count)
            changes = [_replace(owner, moments) for owner, moments in reached]
            change = torch.stack(changes).max() / run.backend.world_size
            sum_over_workers(change, run.backend)  # statistics may differ before the first pass
            settling = change.item()  # sync: whether another pass is needed
    finally:
        for owner, (mean, var) in zip(run.owners, before, strict=True):
            owner.mean.copy_(mean)
            owner.var.copy_(var)
    return pooled, passes, settling


def _replace(owner: _Statistics, moments: Moments) -> Tensor:
    """Normalise the layers by the measured moments, and return the largest change."""
    mean, var = (tensor.to(owner.mean.dtype) for tensor in owner.measured(moments))
    change = _change((owner.mean, owner.var), (mean, var), eps=owner.eps)
    owner.mean.copy_(mean)
    owner.var.copy_(var)
    return torch.stack(change).abs().max().to(moments.mean.device)


def _measure(run: _Run, *, as_in_training: bool) -> list[Moments]:
    """Run the model on the batches once and return the pooled moments of each layer's inputs."""
    model, owners = run.model, run.owners
    watch = _Watch(owners, as_in_training=as_in_training)
    as_input, num_batches = input_of(model), 0
    together = accelerator.is_remote(device_of(model)) or not as_in_training
    with ExitStack() as stack:
        for owner in owners:
            for layer in owner.layers:
                around = watch.around(owner, layer, layer.forward)
                stack.enter_context(mock.patch.object(layer, "forward", around))
        for batch in run.batches:
            num_batches += 1
            if run.forward:
                with watch, run.buffers:
                    run.forward(model, batch)
                continue
            for part in by_spans(as_input(images_of(batch)), model, together=together):
                with watch, run.buffers:
                    model(part)
    dtypes = [owner.mean.dtype for owner in owners]
    pooled = pool(watch.parts, dtypes=dtypes, backend=run.backend)
    if not any(moments.count for moments in pooled):
        total = torch.tensor(num_batches, device=run.backend.device)
        run.backend.all_reduce(total).wait()
        if not total.item():  # sync: for the message
            raise DataError("polishing needs clean training images, but no worker has any")
        raise DataError(
            f"no layer with running statistics was reached in {total} batches, such as "
            f"{describe_layer(owners[0].name)}: the forward pass in evaluation mode does not use "
            "them, for example because it folds them into other weights"
        )
    _check(owners, pooled)
    return pooled


class _Watch(TorchFunctionMode):
    """Measures what torch's functions normalise, and normalises it as in training or evaluation.

    As in training, a function gets the batch's moments as running statistics: the same numbers,
    measured once instead of twice. On a GPU several spans are processed together, which is still
    faster. There these tensors are merged into the sums later, so nothing may write to them. With
    gradients inside the forward pass, which depend on the moments, the function measures them
    again, and so it does in recomputation (activation checkpointing), which counts nothing.
    """

    def __init__(self, owners: list[_Statistics], *, as_in_training: bool) -> None:
        super().__init__()
        self.parts = [
            Moments.of_nothing((1 + owner.by_sample) * len(owner.mean), device=owner.mean.device)
            for owner in owners
        ]
        self._as_in_training = as_in_training
        self._by_address = {
            owner.mean.data_ptr(): (owner, part)
            for owner, part in zip(owners, self.parts, strict=True)
        }

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
            function, args = F.batch_norm, ()
        if function in {F.batch_norm, F.instance_norm}:
            given = inspect.signature(function).bind(*args, **kwargs or {}).arguments
            mean = given.get("running_mean")
            if mean is None or _C.is_batchedtensor(mean):  # the latter has no address
                return function(**given)
            if mean.data_ptr() in self._by_address:
                return self._normalised(*self._by_address[mean.data_ptr()], function, given)
        return function(*args, **kwargs or {})

    def _normalised(
        self,
        owner: _Statistics,
        part: Moments,
        function: Callable[..., Tensor],
        given: dict[str, Any],
    ) -> Tensor:
        """Return what a function returns for its arguments, with other statistics."""
        values: Tensor = given["input"]
        owner.calls += 1
        if not values.numel():
            return function(**given)
        _check_shape(owner, values)
        kind = "use_input_stats" if owner.by_sample else "training"
        by_batch = self._as_in_training or given.get(kind)
        itself = {**given, "running_mean": None, "running_var": None, kind: True}
        again = in_backward()
        statistics = None if again else self._add(owner, part, values)
        if owner.by_sample or not by_batch:
            return function(**(itself if by_batch else given))
        if owner.span and len(values) > owner.span:
            affine = given.get("weight"), given.get("bias")
            settings: dict[str, Any] = {"eps": owner.eps, "span": owner.span}
            if not kernels.take(values):
                return normalise(values, *affine, **settings)
            fused = kernels.batchnorm().normalise(values, None, *affine, relu=False, **settings)
            return fused[0]  # type: ignore[no-any-return]  # a module by its kind
        if statistics is None or _needs_gradient(values):
            return function(**itself)
        mean, var = statistics
        return function(**given | {"running_mean": mean, "running_var": var, kind: False})

    def _add(self, owner: _Statistics, part: Moments, values: Tensor) -> tuple[Tensor, Tensor]:
        """Measure a batch and return its moments in the type of the buffers."""
        while _C.is_gradtrackingtensor(values):
            values = _C.get_unwrapped(values)
        if _C.is_batchedtensor(values):
            raise ValueError(
                f"{describe_layer(owner.name)} is inside torch.func.vmap, where samples cannot be "
                "measured together; leave it out with `skip`"
            )
        with temporarily_clear_interpreter_stack():  # outside of torch.func.grad, vjp and jvp
            plain = values.detach()
            mean, var = part.add(of_samples(plain) if owner.by_sample else plain)
            mean, var = mean.to(owner.mean), var.to(owner.mean)
        is_used = self._as_in_training and not (owner.span and len(values) > owner.span)
        if mean.dtype == torch.float16 and is_used and not owner.by_sample:
            overflows = ~(mean.isfinite() & var.isfinite())
            part.deviations.masked_fill_(overflows, float("inf"))  # so all workers fail in `_check`
        return mean, var

    def around(
        self, owner: _Statistics, layer: _NormBase, forward: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        """Return a layer's forward pass with checks.

        A layer of several arguments is refused; one that calls no function of torch is measured at
        its input if its formula is that of BatchNorm.
        """

        def call(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 -- of any layer
            given = [it for it in (*args, *kwargs.values()) if it is not None]
            if len(given) != 1 or not isinstance(given[0], Tensor):
                kinds = ", ".join(type(it).__name__ for it in given)
                raise ValueError(
                    f"{describe_layer(owner.name)} takes ({kinds}), so it is not known which "
                    "values count, for example with a mask; leave it out with `skip`"
                )
            (values,) = given
            again, calls, version = in_backward(), owner.calls, _version(values)
            with self if again else nullcontext():  # the mode is off while autograd runs
                output = forward(*args, **kwargs)
            if again or owner.calls > calls or not values.numel():
                return output
            depends = self._as_in_training and _needs_gradient(values)
            if not owner.by_sample and _version(values) == version >= 0 and not depends:
                buffers = layer.running_mean, layer.running_var
                part = self._by_address[owner.mean.data_ptr()][1]
                _check_shape(owner, values)
                used = self._add(owner, part, values)
                used = used if self._as_in_training else (owner.mean, owner.var)
                layer.running_mean, layer.running_var = used
                try:
                    output = forward(*args, **kwargs)
                finally:
                    layer.running_mean, layer.running_var = buffers
                expected = F.batch_norm(values, *used, layer.weight, layer.bias, eps=layer.eps)
                if _are_alike(output, expected):
                    return output
            raise ValueError(
                f"{describe_layer(owner.name)} is a {type(layer).__name__}, which normalises other "
                "values than its input, or in another way; leave it out with `skip`"
            )

        return call


def _needs_gradient(values: Tensor) -> bool:
    """Return True if a gradient may depend on the moments of the values, also in torch.func."""
    is_transformed: bool = _C.is_gradtrackingtensor(values)
    return is_transformed or (torch.is_grad_enabled() and values.requires_grad)


def _version(tensor: Tensor) -> int:
    """Return the number of changes of a tensor in place; -1 where that is not counted."""
    return -1 if tensor.is_inference() else tensor._version


def _are_alike(found: object, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape or _C.is_batchedtensor(found):
        return False
    # sync: only for layers with a formula of their own
    return torch.allclose(found.float(), expected.float(), rtol=_SAME, atol=_SAME, equal_nan=True)


def _check_shape(owner: _Statistics, values: Tensor) -> None:
    """Raise ValueError if what a layer normalises is not N x C x ..."""
    if values.ndim < 2 + owner.by_sample or values.shape[1] != len(owner.mean):
        raise ValueError(
            f"the input of {describe_layer(owner.name)} is {sizes(values)}; "
            f"expected N x {len(owner.mean)}{' x L' * owner.by_sample}"
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

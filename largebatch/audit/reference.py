"""Gradients of one process with all samples: each worker's share, repeated without its wrapper.

Hooks that may change gradients, and the recomputation of `torch.utils.checkpoint`, are off in these
passes, so that what they change is seen as a difference.
"""

import math
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from largebatch.audit.recording import Micro, first_logits
from largebatch.audit.restoring import Snapshot, generator_state, generators_of
from largebatch.models.inputs import class_numbers
from largebatch.models.wrappers import device_of

LossFunction = Callable[[Any, Any], Tensor]
Gradients = list[Tensor | None]

_FP16_SCALE = 1024.0
"""Factor of the loss while a pass in float16 is repeated, so that its gradients do not underflow
(Micikevicius et al. 2018, arXiv:1710.03740, section 3.2)."""

NOT_CLASSES = "are not class numbers"

_SAME_LOSS = 1e-3
"""Relative difference of two losses that are equal but for rounding; bfloat16 has 8 bits."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One worker's part of the exact gradient of an update."""

    total: Gradients
    """Sum over the samples of the gradients of their losses."""

    mean: Gradients
    """Mean over the micro-batches of the gradients of their mean losses."""

    last: Gradients
    """Gradient of the mean loss of the last micro-batch."""

    reduced: Gradients
    """Sum in which each micro-batch counts as often as the next one times the number of workers, as
    if gradients were summed over workers after each of them."""

    hooked: Gradients
    """`total` with the hooks of layers and of the forward pass, but not those of parameters."""

    loss: float
    """Loss of the last micro-batch."""

    has_hooks: bool
    """True if a hook may change gradients."""

    draws_again: bool
    """True if the backward pass recomputes layers with other random numbers."""

    counts: list[float]
    """Number of samples in each micro-batch, or of labels that are not ignored; with class weights
    the sum of those of the labels."""

    by_weight: bool
    """True if counts are sums of class weights."""

    loss_scales: list[float]
    """Factors of the script's own losses relative to the mean loss, where they were seen."""

    loss_cosine: float
    """Smallest cosine of the script's own gradient of logits with that of the loss function."""

    is_finite: bool


def reference_of(
    micros: Sequence[Micro], model: nn.Module, loss_fn: LossFunction, workers: int = 1
) -> Reference:
    """Repeat forward and backward passes with the present weights, and change nothing.

    Gradients that the parameters hold stay as they are. Raises ValueError if the loss is not a mean
    over samples, nor a sum.
    """
    parameters = [it for it in model.parameters() if it.requires_grad]
    own = [it._backward_hooks for it in parameters if it._backward_hooks]
    kept, restore_random = Snapshot([model], skip=parameters), generators_of(model)
    try:
        with _emptied(own), _without_recomputation(device_of(model)) as drawn:
            with _without_layer_hooks(model) as hooks:
                passes = [_pass(micro, model, loss_fn, parameters, drawn) for micro in micros]
            again = micros if hooks else []
            hooked = [_pass(micro, model, loss_fn, parameters, drawn)[0] for micro in again]
    finally:
        kept.restore()
        restore_random()
    gradients = [it[0] for it in passes]
    counts = [it[1].samples for it in passes]
    scales = [it[2] for it in passes if it[2] is not None]
    number = max(len(passes), 1)
    total = _weighted(gradients, counts, parameters)
    powers = [workers ** -float(it) for it in range(len(passes))]
    return Reference(
        total=total,
        mean=_weighted(gradients, [1 / number] * len(passes), parameters),
        last=gradients[-1] if gradients else [None] * len(parameters),
        reduced=_weighted(gradients, powers, parameters),
        hooked=_weighted(hooked, counts, parameters) if hooks else list(total),
        loss=passes[-1][1].loss if passes else math.nan,
        has_hooks=bool(own or hooks),
        draws_again=any(drawn),
        counts=counts,
        by_weight=any(it[1].by_weight for it in passes),
        loss_scales=[scale for scale, _ in scales],
        loss_cosine=min((cosine for _, cosine in scales), default=1.0),
        is_finite=all(it.isfinite().all() for grads in gradients for it in grads if it is not None),
    )


@contextmanager
def _emptied(hooks: Iterable[dict[int, Any]]) -> Iterator[None]:
    """Take all hooks out of these containers in this block; autograd refers to the containers."""
    contents = [(it, dict(it)) for it in hooks]
    try:
        for container, _ in contents:
            container.clear()
        yield
    finally:
        for container, content in contents:
            container.update(content)


@contextmanager
def _without_layer_hooks(model: nn.Module) -> Iterator[list[object]]:
    """Remove backward hooks of layers, and those that `forward` adds; yield what was removed."""
    removed: list[object] = []

    def register_hook(_: Tensor, hook: object) -> RemovableHandle:
        removed.append(hook)
        return RemovableHandle(OrderedDict())

    containers: list[dict[int, Any]] = [
        hooks
        for layer in model.modules()
        for hooks in (layer._backward_hooks, layer._backward_pre_hooks)
        if hooks
    ]
    removed += containers
    with _emptied(containers), mock.patch.object(Tensor, "register_hook", register_hook):
        yield removed


@contextmanager
def _without_recomputation(device: torch.device) -> Iterator[list[bool]]:
    """Keep all activations where torch.utils.checkpoint would recompute them.

    Yields whether random numbers were drawn that the recomputation would draw again.
    """
    drawn: list[bool] = []

    def recorded(_: object, preserve: bool = True, *__: object, **___: object) -> Iterator[None]:  # noqa: FBT001, FBT002 -- as torch calls it
        before = _random_states(device)
        yield
        drawn.append(before[preserve:] != _random_states(device)[preserve:])

    class Function:
        @staticmethod
        def apply(function: Callable[..., object], preserve: bool, *args: object) -> object:  # noqa: FBT001 -- as torch calls it
            (result,) = [function(*args) for _ in recorded(function, preserve)]
            return result

    names: dict[str, Any] = {
        "_checkpoint_without_reentrant_generator": recorded,
        "CheckpointFunction": Function,
    }
    with mock.patch.multiple(torch.utils.checkpoint, **names):
        yield drawn


def _random_states(device: torch.device) -> list[object]:
    """Return the states of the generators; the first is that which checkpoint restores."""
    own = [random.getstate(), pickle.dumps(np.random.get_state())]
    return [generator_state(device).tolist(), *own]


class _Count(NamedTuple):
    """A loss, and what it is the mean over."""

    loss: float

    samples: float
    """Number of samples, or the sum of their class weights."""

    divisor: float = 1
    """Number by which the loss must be divided to be a mean."""

    by_weight: bool = False


def _pass(
    micro: Micro,
    model: nn.Module,
    loss_fn: LossFunction,
    parameters: Sequence[nn.Parameter],
    drawn: list[bool],
    *,
    again: bool = False,
) -> tuple[Gradients, _Count, tuple[float, float] | None]:
    """Return gradients of the mean loss, the number of samples, and the script's loss.

    If layers are recomputed with other random numbers, the backward pass is repeated with those of
    the forward pass, and `drawn` says so.
    """
    micro.restore_random()
    with torch.no_grad():
        for buffer, content in zip(model.buffers(), micro.buffers, strict=True):
            buffer.copy_(content)
    kind, labels, calls = device_of(model), micro.labels, list[object]()
    with torch.enable_grad(), torch.autocast(kind.type, micro.half, enabled=micro.half is not None):
        output = model(*micro.args, **micro.kwargs)
        logits, first = micro.scores_in(output), first_logits(output)
        if isinstance(labels, Tensor):
            labels = labels.to(kind)
        loss, labels = loss_and_labels(loss_fn, logits, labels)
        count = _samples_of(loss_fn, logits, labels, loss)
    scale = _FP16_SCALE if micro.half == torch.float16 else 1.0
    wanted = list(parameters) if first is None else [*parameters, first]
    if again:
        micro.restore_random()
    before = _random_states(kind)
    with register_module_forward_pre_hook(lambda layer, _: calls.append(layer)):
        found = torch.autograd.grad(
            loss, wanted, torch.full_like(loss, scale / count.divisor), allow_unused=True
        )
    if calls and not again and before != _random_states(kind):
        drawn.append(True)
        return _pass(micro, model, loss_fn, parameters, drawn, again=True)
    gradients: Gradients = [None if it is None else it.detach() / scale for it in found]
    of_logits = None if first is None else gradients.pop()
    return gradients, count, _compare(micro.output_gradient, of_logits)


def loss_and_labels(
    loss_fn: LossFunction,
    scores: Any,  # noqa: ANN401 -- as the model returns them
    labels: Any,  # noqa: ANN401 -- as the loader has them
) -> tuple[Tensor, Any]:
    """Return a loss, and the labels as `loss_fn` takes them: as they are, or as class numbers.

    Raises ValueError if some labels are not classes, and otherwise what `loss_fn` raises.
    """
    try:
        return loss_fn(scores, labels), labels
    except Exception:
        if not isinstance(scores, Tensor) or not isinstance(labels, Tensor):
            raise
        try:
            numbers = class_numbers(labels, scores)
        except ValueError:  # not scores of classes: the error of `loss_fn` counts
            numbers = labels[:0]
        classes, ignored = scores.shape[-1], _option(loss_fn, "ignore_index", -100)
        is_outside = (numbers < 0) | (numbers >= classes)
        outside = numbers[is_outside & (numbers != ignored)]
        if len(outside):
            raise ValueError(
                f"{len(outside)} of {numbers.numel()} labels, such as {int(outside[0])}, "
                f"{NOT_CLASSES}: the model has {classes} classes, 0 to {classes - 1}"
            ) from None
        if not len(numbers) or (numbers.dtype, numbers.shape) == (labels.dtype, labels.shape):
            raise
    return loss_fn(scores, numbers), numbers


def _samples_of(
    loss_fn: LossFunction,
    logits: Any,  # noqa: ANN401 -- as the model returns them
    labels: Any,  # noqa: ANN401 -- as the loader has them
    loss: Tensor,
) -> _Count:
    """Return the number of samples that a loss is the mean over, and what to divide it by.

    The loss of a batch must follow from the losses of its halves. Labels to be ignored do not
    count, and class weights do, as in torch's cross-entropy. A sum over samples is divided by their
    number.
    """
    whole = float(loss.detach())
    if not isinstance(labels, Tensor) or not isinstance(logits, Tensor) or len(labels) < 2:
        return _Count(whole, len(labels) if isinstance(labels, Tensor) and labels.ndim else 1)
    half = len(labels) // 2
    halves = [(logits[:half], labels[:half]), (logits[half:], labels[half:])]
    with torch.no_grad():
        parts = [float(loss_fn(*it)) for it in halves]
    tolerance = max(_SAME_LOSS, 2 * torch.finfo(loss.dtype).eps)
    weight = _option(loss_fn, "weight", None)
    for by in (weight, None):
        counts = [_count(part, _option(loss_fn, "ignore_index", -100), by) for _, part in halves]
        mean = sum(part * count for part, count in zip(parts, counts, strict=True) if count)
        if not math.isfinite(whole):  # reported with the gradients
            return _Count(whole, sum(counts), by_weight=by is not None)
        if abs(mean - whole * sum(counts)) <= tolerance * abs(mean):
            return _Count(whole, sum(counts), by_weight=by is not None)
        if abs(sum(parts) - whole) <= tolerance * abs(whole):
            return _Count(whole, sum(counts), sum(counts), by is not None)
    raise ValueError(
        f"the loss of {len(labels)} samples ({whole:.6g}) does not follow from the losses of its "
        f"halves ({parts[0]:.6g}, {parts[1]:.6g}), so there is no exact gradient to compare with"
    )


def _option(loss_fn: LossFunction, name: str, default: Any) -> Any:  # noqa: ANN401 -- as given
    """Return an attribute of a loss, or a keyword of its `partial`."""
    return getattr(loss_fn, name, getattr(loss_fn, "keywords", {}).get(name, default))


def _count(labels: Tensor, ignored: int, weight: object) -> float:
    """Return the number of samples, or of labels that are not ignored, or the sum of weights."""
    if labels.is_floating_point() or labels.dtype == torch.bool:
        return len(labels)
    counted = labels[labels != ignored].long()
    if isinstance(weight, Tensor) and weight.ndim == 1:
        return float(weight.detach().cpu().double()[counted.cpu()].sum())  # sync: in an audit only
    return len(counted)


def _compare(own: Tensor | None, exact: Tensor | None) -> tuple[float, float] | None:
    """Return the factor of the script's gradient of the logits to the exact one, and the cosine."""
    if own is None or exact is None or own.shape != exact.shape:
        return None
    mine, other = own.double().flatten(), exact.double().flatten()
    product, square = float(mine @ other), float(other @ other)
    length = float(mine.norm()) * square**0.5
    return (product / square, product / length) if length and square else None


def _weighted(
    gradients: Iterable[Gradients], weights: Iterable[float], parameters: Sequence[Tensor]
) -> Gradients:
    """Return the weighted sum of gradients, in float64 until the end."""
    sums: Gradients = [None] * len(parameters)
    for found, weight in zip(gradients, weights, strict=True):
        for place, gradient in enumerate(found):
            if gradient is None:
                continue
            scaled = gradient.double() * weight
            before = sums[place]
            sums[place] = scaled if before is None else before + scaled
    return sums

"""Gradients of one process with all samples: each worker's share, repeated without its wrapper.

Hooks of parameters, which may communicate, are off in these passes, so that what they change is
seen as a difference.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from largebatch.audit.recording import Micro, first_logits, samples_in
from largebatch.audit.restoring import Snapshot, generators_of
from largebatch.audit.subject import Subject
from largebatch.models.wrappers import device_of
from largebatch.replacing import replaced, replaced_items

Gradients = list[Tensor | None]

FP16_SCALE = 1024.0
"""Factor of the loss while a pass in float16 is repeated, so that its gradients do not underflow
(Micikevicius et al. 2018, arXiv:1710.03740, section 3.2)."""

_SAME_LOSS = 1e-3
"""Relative difference of two losses that are equal but for rounding; bfloat16 has 8 bits."""


_SAME_WEIGHT = 5e-3
"""Relative difference of two equal sums of weights: differences of float32 losses have few bits."""


_ONE_OTHER_BOTH = (slice(0, 1), slice(1, 2), slice(0, 2))
"""Places in a pair of samples: the first one, the second one, both."""


class Pass(NamedTuple):
    """One micro-batch of one worker."""

    gradients: Gradients
    """Gradients of the mean loss, without the hooks of layers."""

    samples: float
    """Number of samples, or of labels that are not ignored; with class weights the sum of those of
    the labels."""

    labels: int
    """Number of labels in the batch of which this is the whole or a part."""

    is_weighted: bool
    """True if the loss weights the samples by their labels."""

    own_loss: tuple[float, float] | None
    """Factor and cosine of the script's own gradient of the logits to that of the loss function;
    None if it was not seen."""


class Reference(NamedTuple):
    """One worker's part of the exact gradient of an update."""

    passes: list[Pass]
    hooked: list[Gradients]
    """Gradients of each pass with the hooks of layers; empty if there are none."""

    repeats_samples: bool
    """True if the model saw more samples than the step was given."""

    has_weights: bool
    """True if the loss has class weights."""


def reference_of(micros: Sequence[Micro], subject: Subject) -> Reference:
    """Repeat forward and backward passes with the present weights, and change nothing.

    Gradients that the parameters hold stay as they are. Raises ValueError if the loss is not a mean
    over samples, nor a sum, and NoLossError if the loss of the step is not known.
    """
    if subject.no_loss is not None:
        raise subject.no_loss
    model = subject.inner
    parameters = [it for it in model.parameters() if it.requires_grad]
    of_parameters = [it._backward_hooks for it in parameters if it._backward_hooks]
    of_layers = [
        hooks
        for layer in model.modules()
        for hooks in (layer._backward_hooks, layer._backward_pre_hooks)
        if hooks
    ]
    snapshot = Snapshot([model], skip=parameters)
    restore_random = generators_of(model)
    try:
        with (
            _emptied(of_parameters),
            replaced(torch.utils.checkpoint, "CheckpointFunction", _NotRecomputed),
        ):
            with _emptied(of_layers):
                passes = [_pass(micro, subject, parameters) for micro in micros]
            # Hooks of layers may be meant, so their gradients are compared too, if there are any.
            hooked = [_pass(it, subject, parameters).gradients for it in micros if of_layers]
    finally:
        snapshot.restore()
        restore_random()
    # A batch that is divided into micro-batches by the step counts once.
    labels = {id(micro.batch): it.labels for micro, it in zip(micros, passes, strict=True)}
    repeats = sum(map(samples_in, micros)) > sum(labels.values()) > 0
    return Reference(passes, hooked, repeats, any(it.is_weighted for it in passes))


def weighted(gradients: Sequence[Gradients], weights: Sequence[float]) -> Gradients:
    """Return the weighted sum of the gradients of several passes, in float64."""
    sums: Gradients = []
    for of_parameter in zip(*gradients, strict=True):
        pairs = zip(of_parameter, weights, strict=True)
        parts = [gradient.double() * weight for gradient, weight in pairs if gradient is not None]
        sums.append(reduce(torch.add, parts) if parts else None)
    return sums


@contextmanager
def _emptied(hooks: Iterable[dict[int, Any]]) -> Iterator[None]:
    """Take all hooks out of these containers in this block; autograd refers to the containers."""
    with ExitStack() as stack:
        for container in hooks:
            stack.enter_context(replaced_items(container, {}))
        yield


class _NotRecomputed:
    """Reentrant checkpointing that keeps all activations: it refuses `torch.autograd.grad`."""

    @staticmethod
    def apply(function: Callable[..., object], _: bool, *args: object) -> object:  # noqa: FBT001 -- as torch calls it
        return function(*args)


def _pass(micro: Micro, subject: Subject, parameters: Sequence[nn.Parameter]) -> Pass:
    model = subject.inner
    device = device_of(model)
    # As in the script's own pass: the same dropout, and the same running statistics.
    micro.restore_random()
    with torch.no_grad():
        for buffer, content in zip(model.buffers(), micro.buffers, strict=True):
            buffer.copy_(content)
    half = micro.half
    with torch.enable_grad(), torch.autocast(device.type, half, enabled=half is not None):
        output = model(*micro.args, **micro.kwargs)
        first = first_logits(output)
        logits, of_batch = subject.scores_and_labels(micro.batch, output)
        labels, in_batch = labels_of_pass(micro, of_batch)
        labels = labels.to(device) if isinstance(labels, Tensor) else labels
        loss, logits, labels = subject.loss_of(logits, labels)
        samples, divisor, is_weighted = _samples_of(subject.loss_fn, logits, labels, loss)
    scale = FP16_SCALE if half == torch.float16 else 1.0
    inputs = list(parameters) if first is None else [*parameters, first]
    # `autograd.grad` and not `backward`: the script's gradients stay as they are.
    results = torch.autograd.grad(
        loss, inputs, torch.full_like(loss, scale / divisor), allow_unused=True
    )
    gradients: Gradients = [None if it is None else it.detach() / scale for it in results]
    of_logits = None if first is None else gradients.pop()
    own_loss = _compare(micro.output_gradient, of_logits)
    return Pass(gradients, samples, in_batch, is_weighted, own_loss)


def labels_of_pass(micro: Micro, labels: Any) -> tuple[Any, int]:  # noqa: ANN401 -- as the loader has them
    """Return the labels of a pass, perhaps on a part of a batch, and their number in the batch."""
    number = samples_in(micro)
    if not number or not isinstance(labels, Tensor) or not labels.ndim or not len(labels):
        return labels, 0
    first = micro.start % len(labels)
    return labels[first : first + number], len(labels)


def _samples_of(
    loss_fn: Callable[[Any, Any], Tensor],
    logits: Any,  # noqa: ANN401 -- as the model returns them
    labels: Any,  # noqa: ANN401 -- as the loader has them
    loss: Tensor,
) -> tuple[float, float, bool]:
    """Return the number of samples that a loss is the mean over, what to divide it by, and whether
    the samples have weights.

    The loss of a batch must follow from the losses of its halves. Labels to be ignored do not
    count, and class weights do, as in torch's cross-entropy. A sum over samples is divided by their
    number.
    """
    whole = float(loss.detach())
    if not isinstance(labels, Tensor) or not isinstance(logits, Tensor) or len(labels) < 2:
        number = len(labels) if isinstance(labels, Tensor) and labels.ndim else 1
        return number, 1, False
    half = len(labels) // 2
    halves = [(logits[:half], labels[:half]), (logits[half:], labels[half:])]
    with torch.no_grad():
        parts = [float(loss_fn(*it)) for it in halves]
    tolerance = max(_SAME_LOSS, 2 * torch.finfo(loss.dtype).eps)  # a loss in bfloat16 has 8 bits
    ignored = _option_of(loss_fn, "ignore_index", -100)
    weights = _option_of(loss_fn, "weight", None)
    if weights is None:
        weights = _weights_within(loss_fn, logits, labels)
    # Weights that a loss function has, but does not use, do not explain it: try it without.
    for weight in (weights, None):
        counts = [_count(part, ignored, weight) for _, part in halves]
        mean = sum(part * count for part, count in zip(parts, counts, strict=True) if count)
        is_mean = abs(mean - whole * sum(counts)) <= tolerance * abs(mean)
        if is_mean or not math.isfinite(whole):  # which is reported with the gradients
            return sum(counts), 1, isinstance(weight, Tensor)
        if abs(sum(parts) - whole) <= tolerance * abs(whole):
            return sum(counts), sum(counts), isinstance(weight, Tensor)
    raise ValueError(
        f"the loss of {len(labels)} samples ({whole:.6g}) does not follow from the losses of its "
        f"halves ({parts[0]:.6g}, {parts[1]:.6g}), so there is no exact gradient to compare with"
    )


def _weights_within(
    loss_fn: Callable[[Any, Any], Tensor], scores: Tensor, labels: Tensor
) -> Tensor | None:
    """Return the class weights within a loss function, of the labels' classes; None if it has none.

    They are in units of that of class 0, or of the next one that counts. A weighted mean of two
    samples with losses a and b and weights 1 and w is (a + w b) / (1 + w), from which w follows. It
    must be the same for another loss of the first sample: then no samples are coupled.
    """
    if scores.ndim != 2 or labels.ndim != 1 or labels.is_floating_point():
        return None
    classes = scores.shape[1]
    present = sorted({int(it) for it in labels.unique() if 0 <= it < classes})  # sync: in an audit
    for first in range(min(3, classes)):
        weights = torch.zeros(classes, dtype=torch.float64)
        for label in present:
            weights[label] = _weight_of(loss_fn, scores, labels, first, label)
        of_present = weights[present]
        is_known = bool(of_present.isfinite().all() and (of_present >= 0).all())
        if present and is_known and of_present.any():
            counted = of_present[of_present > 0]
            is_equal = counted.max() <= (1 + _SAME_WEIGHT) * counted.min()
            return None if is_equal else weights
    return None


def _weight_of(
    loss_fn: Callable[[Any, Any], Tensor], scores: Tensor, labels: Tensor, first: int, label: int
) -> float:
    """Return the weight of a class over that of class `first`; NaN if it cannot be found."""
    ratios = []
    for score in (-4.0, -8.0):  # of the first sample, whose loss is then larger than the second's
        pair = torch.zeros_like(scores[:1]).repeat(2, 1)
        pair[0, first] = score
        targets = labels.new_tensor([first, label])
        with torch.no_grad():
            try:
                losses = [float(loss_fn(pair[it], targets[it])) for it in _ONE_OTHER_BOTH]
            except Exception:  # of the script's loss, which may take another number of samples
                return math.nan
        alone, other, both = losses
        if math.isnan(other) and both == alone:  # an ignored class alone has the mean of nothing
            ratios.append(0.0)
        else:
            ratios.append((alone - both) / (both - other) if both != other else math.nan)
    is_same = math.isclose(*ratios, rel_tol=_SAME_WEIGHT, abs_tol=1e-6)
    return sum(ratios) / 2 if is_same else math.nan


def _option_of(loss_fn: Callable[[Any, Any], Tensor], name: str, default: Any) -> Any:  # noqa: ANN401 -- as given
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
    if own is None or exact is None or own.shape != exact.shape:
        return None
    own_values = own.double().flatten()
    exact_values = exact.double().flatten()
    product = float(own_values @ exact_values)
    square = float(exact_values @ exact_values)
    length = float(own_values.norm()) * square**0.5
    return (product / square, product / length) if length and square else None

"""Passes over recorded micro-batches from one state, and how far two such computations differ.

The unit of a difference is the rounding of the arithmetic itself: the distance of the plain pass
from the same pass in a wider type (float64 for float32, float32 for half types and autocast). Two
orders of the same sums differ by about one unit, however deep the model is; another function
differs by many.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves, tree_map_only

from largebatch import accelerator
from largebatch.audit.randomness import states_of
from largebatch.audit.recording import Micro, first_logits
from largebatch.audit.reference import FP16_SCALE, labels_of_pass
from largebatch.audit.restoring import Snapshot, generators_of
from largebatch.audit.rules.compiled import Comparison, Distance
from largebatch.audit.subject import Subject
from largebatch.models.wrappers import device_of, without_wrappers

_NEGLIGIBLE = 1e-6
"""A gradient of this part of the length of all gradients is rounding, as of a bias before
BatchNorm."""

_NEGLIGIBLE_IF_UNKNOWN = 1e-3
"""The same where no pass in a wider type measures the rounding."""

_OTHER_NUMBERS = 0.1
"""Relative distance from which a pass in a wider type is of other random numbers, not of other
rounding."""

Convert = Callable[[Tensor], Tensor]


class Numbers(NamedTuple):
    """All that one forward and backward pass computes, draws and changes."""

    outputs: list[Tensor]
    loss: Tensor
    gradients: list[Tensor]
    """Gradients of the parameters that are trained; zeros for a parameter without one."""

    buffers: list[Tensor]
    """Buffers after the pass."""

    inputs: list[Tensor]
    """Tensors in the model's arguments after the pass."""

    drawn: frozenset[str]
    """Libraries whose random numbers the pass draws."""

    states: dict[str, int]
    """Fingerprints of the generators of random numbers after the pass, by library."""


def keep(tensor: Tensor) -> Tensor:
    """Return a tensor as it is: the conversion of a plain pass."""
    return tensor


@dataclass(slots=True, kw_only=True)
class Passes:
    """Consecutive passes of a model; each call of `run` begins from the same state.

    The passes are local to a worker: DistributedDataParallel neither sums gradients nor sends
    buffers in them.
    """

    subject: Subject
    model: nn.Module
    """The model that is run, with the wrappers that are compiled or within compiled code."""

    micros: Sequence[Micro]
    names: list[str] = field(default_factory=list)
    buffer_names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        inner = self.subject.inner
        trained = [name for name, it in inner.named_parameters() if it.requires_grad]
        self.names = [without_wrappers(name) for name in trained]
        self.buffer_names = [without_wrappers(name) for name, _ in inner.named_buffers()]

    @property
    def half(self) -> torch.dtype | None:
        """Type of autocast; None without it."""
        return self.micros[0].half

    @property
    def eps(self) -> float:
        """Rounding of the arithmetic, relative."""
        return float(torch.finfo(self.half or self._weight_type).eps)

    @property
    def _weight_type(self) -> torch.dtype:
        dtypes = [it.dtype for it in self.subject.inner.parameters() if it.is_floating_point()]
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

    def run(self, half: torch.dtype | None, convert: Convert = keep) -> list[Numbers]:
        """Return the numbers of all passes, the model's arguments converted; restore the state."""
        inner = self.subject.inner
        snapshot = Snapshot([inner], skip=inner.parameters())
        restore_random = generators_of(inner)
        self.micros[0].restore_random()
        try:
            with _not_communicating(self.model):
                return [self._numbers(micro, half, convert) for micro in self.micros]
        finally:
            snapshot.restore()
            restore_random()

    def run_converted(self, half: torch.dtype | None, convert: Convert) -> list[Numbers]:
        """Return the numbers with converted parameters and buffers too."""
        inner = self.subject.inner
        parameters = {
            name: convert(it.detach()).requires_grad_(it.requires_grad)
            for name, it in inner.named_parameters()
        }
        buffers = {name: convert(it.clone()) for name, it in inner.named_buffers()}
        with _reparametrize_module(inner, parameters | buffers, tie_weights=True):
            twin = Passes(subject=self.subject, model=inner, micros=self.micros)
            return twin.run(half, convert)

    def run_wider(self) -> list[Numbers] | None:
        """Return the numbers in the next wider type; None if the model cannot be run in one."""
        wider = torch.float32 if self.eps > torch.finfo(torch.float32).eps else torch.float64
        if self.eps <= torch.finfo(wider).eps:
            return None
        try:
            return self.run_converted(None, partial(_widened, wider))
        except Exception:  # of the script's model, which may accept one type only: any
            return None

    def _numbers(self, micro: Micro, half: torch.dtype | None, convert: Convert) -> Numbers:
        subject = self.subject
        inner = subject.inner
        device = device_of(inner)
        parameters = [it for it in inner.parameters() if it.requires_grad]
        # The model may change its arguments in place.
        args, kwargs = tree_map_only(
            Tensor, lambda it: convert(it.clone()), (micro.args, micro.kwargs)
        )
        before = states_of(inner)
        if accelerator.is_remote(device):
            torch.compiler.cudagraph_mark_step_begin()  # outputs of a graph are overwritten
        with torch.enable_grad(), torch.autocast(device.type, half, enabled=half is not None):
            output = self.model(*args, **kwargs)
            scores, of_batch = subject.scores_and_labels(micro.batch, output)
            labels, _ = labels_of_pass(micro, of_batch)
            labels = labels.to(device) if isinstance(labels, Tensor) else labels
            loss = subject.loss_of(scores, labels)[0].mean()
        scale = FP16_SCALE if half == torch.float16 else 1.0
        results = torch.autograd.grad(
            loss, parameters, torch.full_like(loss, scale), allow_unused=True
        )
        pairs = zip(results, parameters, strict=True)
        gradients = [torch.zeros_like(of) if it is None else it / scale for it, of in pairs]
        leaves = [it for it in tree_leaves(output) if isinstance(it, Tensor)]
        logits = first_logits(output)
        outputs = leaves or ([] if logits is None else [logits])
        states = states_of(inner)
        return Numbers(
            [it.detach().clone() for it in outputs],
            loss.detach().clone(),
            gradients,
            [it.detach().clone() for it in inner.buffers()],
            [it.detach() for it in tree_leaves((args, kwargs)) if isinstance(it, Tensor)],
            frozenset(name for name, state in states.items() if state != before[name]),
            states,
        )


def _widened(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextmanager
def _not_communicating(model: nn.Module) -> Iterator[None]:
    """Keep passes of DistributedDataParallel on this worker."""
    names = ("require_backward_grad_sync", "require_forward_param_sync")
    wrappers = [it for it in model.modules() if hasattr(it, names[0])]
    before = [[getattr(it, name) for name in names] for it in wrappers]
    try:
        for wrapper in wrappers:
            for name in names:
                setattr(wrapper, name, False)
        yield
    finally:
        for wrapper, values in zip(wrappers, before, strict=True):
            for name, value in zip(names, values, strict=True):
                setattr(wrapper, name, value)


def compare(
    passes: Passes,
    one: Sequence[Numbers],
    plain: Sequence[Numbers],
    again: Sequence[Numbers],
    wider: Sequence[Numbers] | None,
) -> Comparison:
    """Return the largest distances of a computation from the plain one, over all passes.

    `again` are the numbers of the plain passes repeated, `wider` those in a wider type.
    """
    if wider is not None and _is_of_other_numbers(plain, wider):
        wider = None
    least = _NEGLIGIBLE_IF_UNKNOWN if wider is None else _NEGLIGIBLE
    of_kinds: dict[str, list[Distance]] = {}
    for place, (own, exact) in enumerate(zip(one, plain, strict=True)):
        others = [again[place]] if wider is None else [again[place], wider[place]]
        unit = max(passes.eps, *(_relative_of_outputs(exact, it) for it in others))
        for kind, names in (
            ("outputs", ["the output"] * len(exact.outputs)),
            ("loss", ["the loss"]),
            ("gradients", passes.names),
            ("statistics", passes.buffer_names),
        ):
            values = _tensors(kind, exact)
            total = math.hypot(*map(_length, values)) if kind == "gradients" else 0.0
            of_others = zip(*(_tensors(kind, it) for it in others), strict=True)
            # Other numbers of outputs are a finding of their own.
            columns = zip(names, _tensors(kind, own), values, of_others, strict=False)
            distances = [Distance("", 0.0, 0.0, place)]
            for name, value, of_plain, repeated in columns:
                length = max(_length(of_plain), least * total)
                distance = distance_of(value, of_plain)
                scale = max(unit * length, *(distance_of(of_plain, it) for it in repeated))
                relative = _ratio(distance, length)
                distances.append(Distance(name, relative, _ratio(distance, scale), place))
            worst = max(distances, key=lambda it: it.units)
            of_kinds.setdefault(kind, []).append(worst)
    return Comparison(
        has_wider=wider is not None,
        **{kind: _first_beyond(of_passes) for kind, of_passes in of_kinds.items()},
    )


def _first_beyond(of_passes: Sequence[Distance]) -> Distance:
    """Return the distance in the first pass that rounding does not explain, or the largest."""
    beyond = (it for it in of_passes if not it.is_rounding)
    return next(beyond, max(of_passes, key=lambda it: it.units))


def _relative_of_outputs(one: Numbers, other: Numbers) -> float:
    pairs = zip(one.outputs, other.outputs, strict=True)
    return max((_ratio(distance_of(it, its), _length(it)) for it, its in pairs), default=0.0)


def _tensors(kind: str, numbers: Numbers) -> list[Tensor]:
    match kind:
        case "outputs":
            return numbers.outputs
        case "loss":
            return [numbers.loss]
        case "gradients":
            return numbers.gradients
        case _:
            return numbers.buffers


def _is_of_other_numbers(plain: Sequence[Numbers], wider: Sequence[Numbers]) -> bool:
    """Return True if outputs are far apart, as those of other dropout masks."""
    pairs = zip(plain, wider, strict=True)
    return any(not _relative_of_outputs(own, whole) < _OTHER_NUMBERS for own, whole in pairs)


def _length(tensor: Tensor) -> float:
    finite = tensor.detach().double().nan_to_num(0.0, 0.0, 0.0)
    return float(torch.linalg.vector_norm(finite))  # sync: in an audit only


def distance_of(one: Tensor, other: Tensor) -> float:
    """Return the distance of two tensors; infinite if one has a value that is not finite where the
    other has another one, or if their shapes differ.
    """
    if one.shape != other.shape:
        return math.inf
    one = one.detach().double()
    other = other.detach().double()
    is_equal = (one == other) | (one.isnan() & other.isnan())
    difference = torch.where(is_equal, 0.0, one - other)
    distance = float(torch.linalg.vector_norm(difference))  # sync: in an audit only
    return distance if math.isfinite(distance) else math.inf


def _ratio(distance: float, scale: float) -> float:
    if not distance:
        return 0.0
    return distance / scale if scale else math.inf

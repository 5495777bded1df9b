"""The record of one forward and backward pass: a digest of everything that it computes.

Passes over the same samples with the same weights and random numbers have equal records on equal
devices. Where two records differ first is where one of the devices went wrong. Devices of different
models round differently: between them sketches of the gradients are compared, by their distance.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from largebatch.data.types import Batch
from largebatch.distributed.agreement import sum_of_bits
from largebatch.training.loop import EagerStep

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 64
"""Numbers that are summed before they are weighted by their place, so that weights take little
memory."""

_BUCKETS = 8
"""Numbers of a sketch of a tensor."""

_UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operations whose results hold what was in memory before."""

_COPIES = {"_to_copy", "detach", "t", "transpose", "view", "permute"}
"""Operations whose result is the weight itself, in another type or shape."""


def digest(tensor: Tensor) -> Tensor:
    """Return an integer that any single different bit of a tensor changes: 0-d, int64.

    It is computed on the tensor's device, in the order of its memory. Sums of the bits are weighted
    by odd numbers modulo 2^64, so that two equal errors of opposite sign do not cancel.
    """
    numbers = _in_memory_order(tensor)
    bits = numbers.view(_INTEGERS[numbers.element_size()])
    whole = len(bits) // _ROW * _ROW
    rows = bits[:whole].view(-1, _ROW).sum(1, dtype=torch.int64)
    rest = bits[whole:].sum(dtype=torch.int64).unsqueeze(0)
    sums = torch.cat([rows, rest])
    weights = torch.arange(1, 2 * len(sums), 2, device=sums.device)
    return (sums * weights).sum()


def sketch(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor, and the sums of every 8th number: 9 numbers in float64.

    The distance of two sketches estimates that of the tensors, because errors of rounding are
    independent: the expectation of its square is the square of the distance.
    """
    numbers = _in_memory_order(tensor).double()
    padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % _BUCKETS))
    sums = padded.view(-1, _BUCKETS).sum(0)
    return torch.cat([torch.linalg.vector_norm(numbers).unsqueeze(0), sums])


def _in_memory_order(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """What a pass computed."""

    places: list[str]
    """What each digest is of: weights, images, operations in their order, gradients from the last
    layer on, statistics."""

    digests: Tensor
    """Digests on the device, int64, one for each place."""

    gradients: list[str]
    """Names of the trained weights."""

    sketches: Tensor
    """Sketches of their gradients, float64, weights x 9; empty unless requested."""

    @property
    def result(self) -> Tensor:
        """Digest of what an update uses: gradients, loss and statistics; 0-d, on the device."""
        return digest(self.digests[-len(self.gradients) - 2 :])


def record_pass(step: EagerStep, batch: Batch, *, sketches: bool = False) -> PassRecord:
    """Do the first pass of an update, and return its record; nothing is sent to other workers.

    The gradients are left in the reducer, and the statistics in the step's spans. Works on a step
    without a graph.
    """
    model = step.model
    # Sums of bits, whose order does not matter, are one launch less for each of many tensors.
    state = [it for it in model.state_dict().values() if isinstance(it, Tensor) and it.numel()]
    places = ["weights and running statistics", "images", "labels"]
    digests = [torch.tensor(sum_of_bits(state), device=step.reducer.device)]
    digests += [digest(batch.images), digest(batch.labels)]
    step.begin()
    with _Operations(model) as operations:
        step.forward_backward(batch, first=True, last=False)
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    # From the last layer on: the order in which they are computed.
    gradients = [(name, weight.grad) for name, weight in reversed(named) if weight.grad is not None]
    digests += [*operations.digests, *(digest(gradient) for _, gradient in gradients)]
    digests += [digest(step.result.loss), digest(step.spans.moments)]
    places += [*operations.places, *(f"gradient of {name}" for name, _ in gradients)]
    places += ["loss", "statistics of BatchNorm"]
    return PassRecord(
        places=places,
        digests=torch.stack(digests),
        gradients=[name for name, _ in gradients],
        sketches=torch.stack([sketch(it) for _, it in gradients]) if sketches else torch.empty(0),
    )


class _Operations(TorchDispatchMode):
    """Takes a digest of the result of every operation, forward and backward.

    Modules run as always: a hook would make them compute with other kernels. What a compiled graph
    or a Triton kernel computes inside is not seen, but its results are where they are used next.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: list[str] = []
        self.digests: list[Tensor] = []
        self._layers = {
            weight.data_ptr(): name.rpartition(".")[0] or name
            for name, weight in model.named_parameters()
            if weight.numel()
        }
        self._copies: list[Tensor] = []
        """Weights in another type, kept so that no other tensor gets their address."""

        self._last = "the input"

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # compiled modules run compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 -- torch's
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        layer = next(
            (
                self._layers[tensor.data_ptr()]
                for tensor in tree_leaves((args, kwargs))
                if _is_plain(tensor) and tensor.data_ptr() in self._layers
            ),
            None,
        )
        written = [tensor for tensor in tree_leaves(result) if _is_plain(tensor)]
        if layer is not None and name in _COPIES:
            for tensor in written:
                self._layers[tensor.data_ptr()] = layer
            self._copies += written
        # Collectives write later, and views and memory that is not yet written compute nothing.
        if func.namespace != "aten" or name in _UNWRITTEN or _is_view(func):
            return result
        where = f"of {layer}" if layer is not None else f"after {self._last}"
        self._last = layer or self._last
        is_backward = torch._C._current_graph_task_id() != -1
        for tensor in written:
            if tensor.is_floating_point() and tensor.numel():
                self.digests.append(digest(tensor))
                direction = "backward" if is_backward else "forward"
                self.places.append(f"{name} {where} ({direction})")
        return result


def _is_plain(value: object) -> bool:
    """Return True for a tensor with memory: not one of a compiler that traces, nor a sparse one."""
    is_traced = isinstance(value, FakeTensor)
    return isinstance(value, Tensor) and not is_traced and value.layout is torch.strided


def _is_view(func: Any) -> bool:  # noqa: ANN401 -- torch's
    returns = [it.alias_info for it in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)

"""The record of one forward and backward pass: digests of what its layers compute.

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
from largebatch.distributed.agreement import digest, in_memory_order
from largebatch.models.wrappers import without_wrappers
from largebatch.training.loop import EagerStep

_BUCKETS = 8
"""Numbers of a sketch of a tensor."""

_UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operations whose results hold what was in memory before."""

_COPIES = {"_to_copy", "detach", "t", "transpose", "view", "permute"}
"""Operations whose result is the weight itself, in another type or shape."""


def sketch(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor, and the sums of every 8th number: 9 numbers in float64.

    The distance of two sketches estimates that of the tensors, because errors of rounding are
    independent: the expectation of its square is the square of the distance.
    """
    numbers = in_memory_order(tensor).double()
    padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % _BUCKETS))
    sums = padded.view(-1, _BUCKETS).sum(0)
    return torch.cat([torch.linalg.vector_norm(numbers).unsqueeze(0), sums])


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """What a pass computed."""

    places: list[str]
    """What each digest is of: images, labels, operations of layers in their order, gradients from
    the last layer on, loss and statistics."""

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
    places = ["images", "labels"]
    digests = [digest(batch.images), digest(batch.labels)]
    step.begin()
    with _Operations(model) as operations:
        step.forward_backward(batch, first=True, last=False)
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    # From the last layer on: the order in which they are computed.
    gradients = [(name, weight.grad) for name, weight in reversed(named) if weight.grad is not None]
    digests += [*operations.digests, *(digest(gradient) for _, gradient in gradients)]
    digests += [digest(step.result.loss), digest(step.spans.moments)]
    places += [
        *operations.places,
        *(f"gradient of {without_wrappers(name)}" for name, _ in gradients),
    ]
    places += ["loss", "statistics of BatchNorm"]
    return PassRecord(
        places=places,
        digests=torch.stack(digests),
        gradients=[without_wrappers(name) for name, _ in gradients],
        sketches=torch.stack([sketch(it) for _, it in gradients]) if sketches else torch.empty(0),
    )


class _Operations(TorchDispatchMode):
    """Takes a digest of what each operation with a weight returns, forward and backward.

    Others, such as a ReLU, are cheap to compute and costly to digest: what they return is where the
    next layer reads it. Modules run as always: a hook would make them compute with other kernels.
    What a compiled graph or a Triton kernel computes inside is not seen either.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: list[str] = []
        self.digests: list[Tensor] = []
        self._layers = {
            weight.data_ptr(): without_wrappers(name).rpartition(".")[0] or name
            for name, weight in model.named_parameters()
            if weight.numel()
        }
        self._copies: list[Tensor] = []
        """Weights in another type, kept so that no other tensor gets their address."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # compiled modules run compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 -- torch's
        result = func(*args, **(kwargs or {}))
        layer = self._layer_of(args, kwargs)
        if layer is None:
            return result
        name = func.name().partition("::")[2].partition(".")[0]
        written = [tensor for tensor in tree_leaves(result) if _is_plain(tensor)]
        if name in _COPIES:
            self._layers |= {tensor.data_ptr(): layer for tensor in written}
            self._copies += written
        # Collectives write later, and views and memory that is not yet written compute nothing.
        if func.namespace != "aten" or name in _UNWRITTEN or _is_view(func):
            return result
        direction = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        for tensor in written:
            if tensor.is_floating_point() and tensor.numel():
                self.digests.append(digest(tensor))
                self.places.append(f"{name} of {layer} ({direction})")
        return result

    def _layer_of(self, *arguments: object) -> str | None:
        """Return the layer whose weight is among the arguments of an operation."""
        for tensor in tree_leaves(arguments):
            if _is_plain(tensor) and tensor.data_ptr() in self._layers:
                return self._layers[tensor.data_ptr()]
        return None


def _is_plain(value: object) -> bool:
    """Return True for a tensor with memory: not one of a compiler that traces, nor a sparse one."""
    is_traced = isinstance(value, FakeTensor)
    return isinstance(value, Tensor) and not is_traced and value.layout is torch.strided


def _is_view(func: Any) -> bool:  # noqa: ANN401 -- torch's
    returns = [it.alias_info for it in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)

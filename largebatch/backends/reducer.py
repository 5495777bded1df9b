"""Sums gradients over all workers while the backward pass is still running.

Parameters are put into static groups counted from the last layer, whose gradients are ready first;
each group is one flat buffer and one all-reduce, started as soon as its last gradient is there and
never before the group above it, so that all workers send in the same order. The gradients are views
into the buffers: nothing is packed or copied. Group sizes grow cubically, 3 (k+1)^3 - 3 k^3 tensors
(Fujitsu's MLPerf v0.6 entry): the first goes out early, the last ones are few and large.

A library's own wrapper (DistributedDataParallel, hvd.DistributedOptimizer) would discover the order
at run time, and differs from the next in what it does to accumulation.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn

from largebatch.contracts import Backend, Work


def cubic_groups(num_tensors: int) -> list[range]:
    """Return the groups, the one to send first in front; each is a run of tensor numbers.

    >>> [len(group) for group in cubic_groups(161)]
    [3, 21, 57, 80]
    >>> cubic_groups(5)
    [range(2, 5), range(0, 2)]
    """
    groups = []
    end, k = num_tensors, 0
    while end > 0:
        start = max(0, num_tensors - 3 * (k + 1) ** 3)
        groups.append(range(start, end))
        end, k = start, k + 1
    return groups


@dataclass(slots=True)
class _Group:
    """One buffer, and how many of its gradients the running backward pass still owes."""

    names: list[str]
    parameters: list[nn.Parameter]
    buffer: Tensor
    views: list[Tensor]
    """The gradients: parts of the buffer in the shape of the parameters."""

    owed: set[str] = field(default_factory=set)


class Reducer:
    """Owns the gradients of a model: zero them, accumulate, and `wait` for the global sum.

    Per optimizer step: `zero`, any number of backward passes, `arm` before the last one, `wait`.
    Every gradient is then the sum over workers and micro-batches; a loss divided by the global
    batch makes that the mean over all its samples, with nothing left to scale.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], backend: Backend) -> None:
        trained = [(name, weight) for name, weight in parameters if weight.requires_grad]
        if not trained:
            raise ValueError("the model has no parameter with requires_grad=True")
        self.device = trained[0][1].device
        self._backend = backend
        self._groups = [
            _make_group([trained[number] for number in numbers])
            for numbers in cubic_groups(len(trained))
        ]
        self._armed = False
        self._sent = 0
        self._works: list[Work] = []
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._on_gradient(group, name))
            for group in self._groups
            for name, weight in zip(group.names, group.parameters, strict=True)
        ]

    def zero(self) -> None:
        """Set every gradient to zero, keeping the buffers."""
        for group in self._groups:
            group.buffer.zero_()

    def arm(self) -> None:
        """Announce the last backward pass of a step: send each group when it is complete.

        Raises ValueError if something took a gradient out of its buffer, naming the parameter.
        """
        for group in self._groups:
            for name, weight, view in zip(group.names, group.parameters, group.views, strict=True):
                if weight.grad is not view:
                    raise ValueError(
                        f"the gradient of {name} is no longer the reducer's; use Reducer.zero, not "
                        "zero_grad(set_to_none=True)"
                    )
            group.owed = set(group.names)
        self._armed, self._sent = True, 0

    def wait(self) -> None:
        """Block until every gradient is the sum over all workers.

        Raises ValueError naming the parameters that the armed backward pass did not reach.
        """
        missing = [name for group in self._groups for name in sorted(group.owed)]
        if missing:
            raise ValueError(
                f"no gradient reached {', '.join(missing)}; set requires_grad=False on parameters "
                "that the loss does not depend on"
            )
        for work in self._works:
            work.wait()
        self._works.clear()
        self._armed = False

    def close(self) -> None:
        """Take the hooks off the parameters and let go of the gradients."""
        for hook in self._hooks:
            hook.remove()
        for group in self._groups:
            for weight in group.parameters:
                weight.grad = None
        self._hooks.clear()
        self._groups.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_gradient(self, group: _Group, name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            if self._armed:
                group.owed.discard(name)
                self._send_complete_groups()

        return note

    def _send_complete_groups(self) -> None:
        while self._sent < len(self._groups) and not self._groups[self._sent].owed:
            self._works.append(self._backend.all_reduce(self._groups[self._sent].buffer))
            self._sent += 1


def _make_group(members: list[tuple[str, nn.Parameter]]) -> _Group:
    """Lay the gradients of some parameters side by side in one buffer."""
    names, parameters = [name for name, _ in members], [weight for _, weight in members]
    kinds = {(weight.dtype, weight.device) for weight in parameters}
    if len(kinds) > 1:
        raise ValueError(f"parameters of different types or devices in one model: {kinds}")
    dtype, device = kinds.pop()
    sizes = [weight.numel() for weight in parameters]
    buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
    parts = zip(parameters, buffer.split(sizes), strict=True)
    views = [
        part.as_strided(weight.size(), weight.stride(), part.storage_offset())
        if torch.ops.aten.is_non_overlapping_and_dense(weight)
        else part.view_as(weight)
        for weight, part in parts
    ]
    for weight, view in zip(parameters, views, strict=True):
        weight.grad = view
    return _Group(names, parameters, buffer, views)

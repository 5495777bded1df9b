"""Adasum: combines the gradients of parts of a batch by their agreement instead of summing them.

Two gradients become (1 - g1.g2 / 2|g1|^2) g1 + (1 - g1.g2 / 2|g2|^2) g2 (arXiv:2006.02924, section
3): the mean of equal gradients, the sum of orthogonal ones. More gradients are combined in pairs,
then pairs of pairs, and, as in Horovod, separately for every tensor.

In the paper the parts are the workers. Here the recipe sets their number, so that the result does
not depend on the machine: a worker computes several parts one after the other, or several workers
sum their shares of one part. Nothing is sent before the last backward pass ends; then the whole
gradient is exchanged log2(workers) times, between two workers each time.
"""

import torch
from torch import Tensor, nn

from largebatch.distributed.backend import Backend, Group
from largebatch.distributed.reducer import Grouping, Reducer, cubic
from largebatch.distributed.serial import Serial


class Adasum(Reducer):
    """A Reducer whose `wait` combines `parts` gradients, each of its own part of the batch.

    The `accumulation` forward passes of a step in training mode, which a hook counts, are divided
    evenly over this worker's parts, in order. A loss divided by the global batch makes the gradient
    of a part `parts` times too small; `wait` multiplies by it, so that equal parts give the mean
    gradient of the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        *,
        parts: int,
        accumulation: int,
        grouping: Grouping = cubic,
        copies: bool = False,
    ) -> None:
        workers = backend.world_size
        together, own = max(1, workers // parts), max(1, parts // workers)
        if own * workers != parts * together or parts & (parts - 1) or accumulation % own:
            raise ValueError(
                f"{parts} parts, a power of two, cannot be divided over {workers} workers with "
                f"{accumulation} passes each"
            )
        super().__init__(
            model.named_parameters(),
            _team(backend, together),
            grouping=grouping,
            divisor=1.0,
            copies=copies,
        )
        self._parts, self._passes_each = parts, accumulation // own
        self._accumulation, self._passes = accumulation, 0
        self._pairs = _pairs(backend, together)
        self._combined: list[tuple[int, list[Tensor]]] = []
        self._counting = model.register_forward_pre_hook(self._count)

    def zero(self) -> None:
        """Clear all gradients, including those of complete parts."""
        super().zero()
        self._combined.clear()
        self._passes = 0

    def wait(self) -> None:
        """Block until every gradient is the combination of the parts of all workers.

        Raises the errors of Reducer.wait, and ValueError after a wrong number of forward passes.
        """
        super().wait()
        if self._passes != self._accumulation:
            raise ValueError(
                f"{self._passes} forward passes in a step, expected {self._accumulation}"
            )
        own = [group.held[name] for group in self._groups for name in group.parameters]
        self._add(own)
        ((_, gradients),) = self._combined
        for pair in self._pairs:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            both = pair.all_gather(flat).split([g.numel() for g in gradients], dim=1)
            halves = zip(*(part.unbind() for part in both), strict=True)
            first, second = ([*map(torch.Tensor.view_as, half, gradients)] for half in halves)
            gradients = [*map(adasum, first, second)]
        torch._foreach_copy_(own, torch._foreach_mul(gradients, self._parts))
        self._combined.clear()

    def close(self) -> None:
        """Remove the hooks from the model and release the gradients."""
        self._counting.remove()
        self._combined.clear()
        super().close()

    def _count(self, model: nn.Module, _: object) -> None:
        """Count a forward pass; store the gradients of the previous part if a new part starts."""
        if not model.training:
            return
        if self._passes and self._passes % self._passes_each == 0:
            self._add(
                [
                    group.held.get(name, torch.zeros_like(weight))
                    for group in self._groups
                    for name, weight in group.parameters.items()
                ]
            )
            super().zero()
        self._passes += 1

    def _add(self, gradients: list[Tensor], level: int = 0) -> None:
        """Add a part's gradients; combine complete pairs, then pairs of pairs, and so on."""
        while self._combined and self._combined[-1][0] == level:
            _, before = self._combined.pop()
            gradients, level = [*map(adasum, before, gradients)], level + 1
        self._combined.append((level, gradients))


@torch.no_grad()
def adasum(first: Tensor, second: Tensor) -> Tensor:
    """Combine two gradients of one tensor; if one is zero, the result is the other."""
    a, b = first.double().flatten(), second.double().flatten()
    product = a @ b
    scales = [torch.where(norm > 0, 1 - product / (2 * norm), 1.0) for norm in (a @ a, b @ b)]
    return first * scales[0] + second * scales[1]


def _team(backend: Backend, size: int) -> Group:
    if size == 1:
        return Serial(backend.device)
    firsts = range(0, backend.world_size, size)
    return backend.split([range(first, first + size) for first in firsts])


def _pairs(backend: Backend, distance: int) -> list[Group]:
    """Return the pairs in which this worker combines gradients, the nearest worker first."""
    groups = []
    while distance < backend.world_size:
        lower = [rank for rank in range(backend.world_size) if rank // distance % 2 == 0]
        groups.append(backend.split([[rank, rank + distance] for rank in lower]))
        distance *= 2
    return groups

"""Adasum: gradients of parts of a batch are combined by how far they agree, and not added up.

Two gradients become (1 - g1.g2 / 2|g1|^2) g1 + (1 - g1.g2 / 2|g2|^2) g2 (arXiv:2006.02924, section
3): equal ones their mean, orthogonal ones their sum. More are combined in pairs, then pairs of
pairs, and, as in Horovod, every tensor by itself.

The paper's parts are the workers. Here the recipe says how many there are, so that any machine
computes the same: a worker goes through several parts one after the other, or several workers add
up their shares of one. Nothing is sent before the last backward pass is over, and log2(workers)
times the whole gradient, between two workers each time.
"""

import torch
from torch import Tensor, nn

from largebatch.distributed.backend import Backend, Group
from largebatch.distributed.reducer import Grouping, Reducer, cubic
from largebatch.distributed.serial import Serial


class Adasum(Reducer):
    """A Reducer whose `wait` combines `parts` gradients, each of its own part of the batch.

    Of each step's `accumulation` forward passes in training mode, which the model counts, an equal
    run belongs to every part of this worker. A loss divided by the global batch makes the gradient
    of a part `parts` times too small, which `wait` makes up for: parts that agree give the mean
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
        """Forget every gradient, and those of the parts that were complete."""
        super().zero()
        self._combined.clear()
        self._passes = 0

    def wait(self) -> None:
        """Block until every gradient is what the parts of all workers combine to.

        Raises what Reducer.wait does, and ValueError after another number of forward passes.
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
            both = pair.all_gather(flat).split([each.numel() for each in gradients], dim=1)
            halves = zip(*(part.unbind() for part in both), strict=True)
            first, second = ([*map(torch.Tensor.view_as, half, gradients)] for half in halves)
            gradients = [*map(adasum, first, second)]
        torch._foreach_copy_(own, torch._foreach_mul(gradients, self._parts))
        self._combined.clear()

    def close(self) -> None:
        """Take the hooks off the model and let go of the gradients."""
        self._counting.remove()
        self._combined.clear()
        super().close()

    def _count(self, model: nn.Module, _: object) -> None:
        """Count a forward pass; put the gradients aside if it begins another part."""
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
        """Combine what has come so far as far as it is pairs, of pairs, of parts."""
        while self._combined and self._combined[-1][0] == level:
            _, before = self._combined.pop()
            gradients, level = [*map(adasum, before, gradients)], level + 1
        self._combined.append((level, gradients))


@torch.no_grad()
def adasum(first: Tensor, second: Tensor) -> Tensor:
    """Combine two gradients of one tensor; of one that is zero nothing but the other remains."""
    a, b = first.double().flatten(), second.double().flatten()
    both, one, other = a @ b, a @ a, b @ b
    kept = [torch.where(norm > 0, 1 - both / (2 * norm), 1.0) for norm in (one, other)]
    return first * kept[0] + second * kept[1]


def _team(backend: Backend, size: int) -> Group:
    """Return the workers that hold one part together."""
    if size == 1:
        return Serial(backend.device)
    firsts = range(0, backend.world_size, size)
    return backend.split([range(first, first + size) for first in firsts])


def _pairs(backend: Backend, distance: int) -> list[Group]:
    """Return the groups of two in which this worker combines, the nearest worker first."""
    groups = []
    while distance < backend.world_size:
        lower = [rank for rank in range(backend.world_size) if rank // distance % 2 == 0]
        groups.append(backend.split([[rank, rank + distance] for rank in lower]))
        distance *= 2
    return groups

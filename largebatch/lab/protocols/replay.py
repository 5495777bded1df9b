"""Computes the weights of a run from the order in which its gradients arrived, in one process.

A learner's weights are those of its servers at the clocks that it read. So a replay of thousands of
learners needs no copies of their weights: it stores only the versions from which later gradients
are computed, about as many as the staleness.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from largebatch.lab.protocols.server import Applied, Arrivals, ParameterServer

Gradient = Callable[[int, int], tuple[Sequence[Tensor], float]]
"""Maps a learner and a mini-batch to its mean gradient at the current weights, one tensor for each,
and its mean loss. The next call may overwrite the tensors."""


class Part(NamedTuple):
    """A server at the start of a replay, and the record that it follows."""

    server: ParameterServer
    numbers: Sequence[int]
    """Numbers of its tensors among all weights."""

    arrivals: Arrivals


def replay(
    parts: Sequence[Part], weights: Sequence[Tensor], gradient: Gradient
) -> Iterator[tuple[int, Applied]]:
    """Make the updates of a record, in its order; yield the number of the server and each update.

    Before each call of `gradient`, `weights` are set to the ones that the learner read. The
    servers' optimizers must not hold them.

    Raises ValueError for a record that no run can write: a gradient is in the wrong update, was
    computed from weights that did not exist yet, or is missing on a server. Raises it also if a
    learner was lost after it had reached only some of the servers: the others have a gradient of
    its mini-batch that was computed again.
    """
    followed = [_Followed(part) for part in parts]
    if any(one.reads.keys() != followed[0].reads.keys() for one in followed):
        raise ValueError("the servers took gradients of different mini-batches")
    if any(one.learners != followed[0].learners for one in followed):
        raise ValueError("the servers took gradients of one mini-batch from different learners")
    gradients: dict[int, _Computed] = {}
    while not all(one.is_done for one in followed):
        was_stuck = True
        for number, one in enumerate(followed):
            for applied in _advance(one, followed, gradients, weights, gradient):
                was_stuck = False
                if applied is not None:
                    yield number, applied
        if was_stuck:
            raise ValueError(
                f"mini-batch {followed[0].mini_batch} was computed from weights that came later"
            )


def _advance(
    one: "_Followed",
    followed: Sequence["_Followed"],
    gradients: dict[int, "_Computed"],
    weights: Sequence[Tensor],
    gradient: Gradient,
) -> Iterator[Applied | None]:
    while not one.is_done and _is_possible(followed, gradients, one.mini_batch):
        mini_batch = one.mini_batch
        if mini_batch not in gradients:
            gradients[mini_batch] = _compute(followed, weights, gradient, one)
        computed = gradients[mini_batch]
        computed.left -= 1
        if not computed.left:
            del gradients[mini_batch]
        yield one.push(computed)


class _Computed:
    """A gradient, and the number of servers that have not received it yet."""

    def __init__(self, tensors: Sequence[Tensor], loss: float, left: int) -> None:
        self.tensors, self.loss, self.left = tensors, loss, left


class _Followed:
    """One server, its position in the record, and the versions of its weights still needed."""

    def __init__(self, part: Part) -> None:
        self.server, self.numbers, arrivals = part
        columns = (arrivals.learner, arrivals.mini_batch, arrivals.clock_read, arrivals.update)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        self._rows: list[tuple[int, int, int, int]] = list(rows)
        self._next = 0
        self.reads = {mini_batch: clock for _, mini_batch, clock, _ in self._rows}
        """Clock that was read for each mini-batch."""

        self.learners = {mini_batch: learner for learner, mini_batch, _, _ in self._rows}

        self._left = Counter(self.reads.values())
        """Number of gradients still to be computed from each version."""

        self._versions: dict[int, list[Tensor]] = {}
        if len(self.reads) < len(self._rows):
            raise ValueError("a mini-batch comes twice in the record of one server")

    @property
    def is_done(self) -> bool:
        return self._next == len(self._rows)

    @property
    def mini_batch(self) -> int:
        return self._rows[self._next][1] if not self.is_done else -1

    @property
    def learner(self) -> int:
        return self._rows[self._next][0]

    def read(self, mini_batch: int) -> list[Tensor]:
        """Return the weights that a gradient was computed from; call once for each gradient."""
        clock = self.reads[mini_batch]
        self._left[clock] -= 1
        if clock == self.server.clock:
            return self.server.pull()[1]
        return self._versions[clock] if self._left[clock] else self._versions.pop(clock)

    def push(self, computed: _Computed) -> Applied | None:
        learner, mini_batch, clock_read, update = self._rows[self._next]
        clock, held = self.server.pull()
        if clock != update:
            raise ValueError(
                f"mini-batch {mini_batch} is recorded in update {update}; by the rule it is in "
                f"{clock}"
            )
        if self._left[clock] and clock not in self._versions and self._completes():
            self._versions[clock] = [weight.clone() for weight in held]
        self._next += 1
        own = [computed.tensors[number] for number in self.numbers]
        return self.server.push(learner, clock_read, own, mini_batch=mini_batch, loss=computed.loss)

    def _completes(self) -> bool:
        return (self._next + 1) % self.server.rule.gradients == 0


def _is_possible(
    followed: Sequence[_Followed], gradients: dict[int, _Computed], mini_batch: int
) -> bool:
    return mini_batch in gradients or all(
        one.reads[mini_batch] <= one.server.clock for one in followed
    )


def _compute(
    followed: Sequence[_Followed], weights: Sequence[Tensor], gradient: Gradient, one: _Followed
) -> _Computed:
    with torch.no_grad():
        for other in followed:
            read = other.read(one.mini_batch)
            for number, values in zip(other.numbers, read, strict=True):
                weights[number].copy_(values)
    tensors, loss = gradient(one.learner, one.mini_batch)
    return _Computed([tensor.detach().clone() for tensor in tensors], loss, len(followed))

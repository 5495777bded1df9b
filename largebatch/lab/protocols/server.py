"""A parameter server: a part of the weights and their optimizer, without communication.

It holds whole tensors, because LARS needs the norms of its layers. The protocol determines the
order of calls: a run's services call it in the order in which gradients arrive, a replay in the
order of its record.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from largebatch.lab.protocols.rule import Rule
from largebatch.optim.lars import LARS
from largebatch.optim.rates import set_rates
from largebatch.schedules.functions import Schedule

MOMENTUM = "momentum_buffer"
"""Name of the momentum in the state of SGD and LARS."""


class Arrival(NamedTuple):
    """The record of a gradient that a server received."""

    update: int
    """Number of the update with this gradient; the last of its arrivals makes it."""

    learner: int
    clock_read: int
    """Number of updates in the weights that the gradient was computed from."""

    staleness: int
    """Number of updates that these weights lack: update - clock_read (tau)."""

    mini_batch: int
    loss: float
    """Mean loss over the mini-batch."""


class Applied(NamedTuple):
    """The record of an update."""

    update: int
    lr: float
    """Learning rate of the schedule, times the factor of the rule that all gradients share."""

    arrivals: tuple[Arrival, ...]


class ParameterServer:
    """Updates some weights by gradients in the order in which they are pushed.

    `optimizer` may hold other weights too; it does not change weights without a gradient.
    `schedule` returns the learning rate of an update by its number, and `clock` is the number of
    updates made before.

    In the mean over an update's gradients each is multiplied by its factor (arXiv:1511.05950), and
    the weight decay by their mean factor, because the learning rate scales the decay too. LARS
    divides by the length of the gradient, which would cancel a common factor: there the learning
    rate is multiplied by the mean factor, and the rest of the factors weight the gradients.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        optimizer: Optimizer,
        schedule: Schedule,
        rule: Rule,
        *,
        clock: int = 0,
    ) -> None:
        self.weights = tuple(weights)
        self.optimizer = optimizer
        self.rule = rule
        self.clock = clock
        """Number of updates made."""

        self.arrivals: list[Arrival] = []
        """Records of all gradients, in order; `push` only appends."""

        self._schedule = schedule
        self._gradients: list[tuple[Arrival, Sequence[Tensor]]] = []

    def pull(self) -> tuple[int, list[Tensor]]:
        """Return the clock and the weights, which the next update changes in place."""
        return self.clock, [weight.detach() for weight in self.weights]

    def push(
        self,
        learner: int,
        clock_read: int,
        gradient: Sequence[Tensor],
        *,
        mini_batch: int = -1,
        loss: float = 0.0,
    ) -> Applied | None:
        """Add a gradient, the mean over its mini-batch; return the update that it completes.

        `gradient` has a tensor for each of the weights, which must not change any more.

        Raises ValueError for a gradient of weights that do not exist yet, and, if learners wait,
        for a second gradient of the same learner.
        """
        staleness = self.clock - clock_read
        if staleness < 0:
            raise ValueError(f"clock_read is {clock_read}, and only {self.clock} updates were made")
        if self.rule.waits and any(learner == held.learner for held, _ in self._gradients):
            raise ValueError(f"learner {learner} pushed twice for update {self.clock}")
        arrival = Arrival(self.clock, learner, clock_read, staleness, mini_batch, loss)
        self.arrivals.append(arrival)
        self._gradients.append((arrival, gradient))
        return self._apply() if len(self._gradients) == self.rule.gradients else None

    @torch.no_grad()
    def _apply(self) -> Applied:
        taken, self._gradients = self._gradients, []
        if self.rule.waits:  # then the sum does not depend on who was first
            taken.sort(key=lambda one: one[0].learner)
        factors = [self.rule.factor(arrival.staleness) for arrival, _ in taken]
        share = sum(factors) / len(factors)
        of_rate, of_decay = (share, 1.0) if isinstance(self.optimizer, LARS) else (1.0, share)
        lr = self._schedule(self.clock) * self.rule.rate
        groups = self.optimizer.param_groups
        decays = [group["weight_decay"] for group in groups]
        set_rates(self.optimizer, lr * of_rate, step=self.clock)
        for group in groups:
            group["weight_decay"] *= of_decay
        for place, weight in enumerate(self.weights):
            mean = torch.zeros_like(weight)
            for factor, (_, gradient) in zip(factors, taken, strict=True):
                mean.add_(gradient[place], alpha=factor / of_rate / len(taken))
            weight.grad = mean
        self.optimizer.step()
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay
        for weight in self.weights:
            weight.grad = None
        self.clock += 1
        return Applied(self.clock - 1, lr, tuple(arrival for arrival, _ in taken))


def divide(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """Divide tensors of these sizes over servers; return their ascending numbers by server.

    Assign the largest tensor first, each to the server with the smallest sum so far.

    >>> divide([10, 4, 90, 50, 40], 2)
    [[0, 2], [1, 3, 4]]
    """
    if not 1 <= servers <= len(sizes):
        raise ValueError(f"{len(sizes)} tensors cannot be divided over {servers} servers")
    parts: list[list[int]] = [[] for _ in range(servers)]
    filled = [0] * servers
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        least = min(range(servers), key=lambda server: (filled[server], len(parts[server])))
        parts[least].append(number)
        filled[least] += sizes[number]
    return [sorted(part) for part in parts]


def server_bytes(weights: Sequence[Tensor], servers: int) -> list[int]:
    """Return the bytes of the weights on each server.

    >>> server_bytes([torch.zeros(10, 3), torch.zeros(4)], 2)
    [120, 16]
    """
    sizes = [weight.nbytes for weight in weights]
    return [sum(sizes[number] for number in own) for own in divide(sizes, servers)]


ARRIVALS = "arrivals.jsonl"
"""Name of the file of a run folder with the arrivals of all servers."""

IntArray = npt.NDArray[np.int64]


class Arrivals(NamedTuple):
    """Columns with a row for each gradient that one server received, in order of arrival."""

    learner: IntArray
    mini_batch: IntArray
    """Numbers of the mini-batches, the same on every server."""

    clock_read: IntArray
    """Number of this server's updates in the weights that the gradient was computed from."""

    update: IntArray
    """Numbers of the updates that the gradients are part of, counted from 0."""

    @property
    def staleness(self) -> IntArray:
        """Number of the server's updates between the weights of a gradient and its own update."""
        return self.update - self.clock_read


Gradient = Callable[[int, int], tuple[Sequence[Tensor], float]]
"""Maps a learner and a mini-batch to its mean gradient at the current weights, one tensor for each,
and its mean loss. The next call may overwrite the tensors."""


def replay(
    server: ParameterServer, arrivals: Arrivals, weights: Sequence[Tensor], gradient: Gradient
) -> Iterator[Applied]:
    """Make the updates of a record of one server, in its order; yield each.

    A learner's weights are those of its server at the clock that it read. So a replay of thousands
    of learners needs no copies of their weights: it stores only the versions from which later
    gradients are computed, about as many as the staleness.

    Before each call of `gradient`, `weights` are set to the ones that the learner read. The
    server's optimizer must not hold them.

    Raises ValueError for a record that no run can write: a gradient is in the wrong update, was
    computed from weights that did not exist yet, or comes twice.
    """
    rows = list(zip(*(column.tolist() for column in arrivals), strict=True))
    if len({mini_batch for _, mini_batch, _, _ in rows}) < len(rows):
        raise ValueError("a mini-batch comes twice in the record")
    left = Counter(clock_read for _, _, clock_read, _ in rows)  # gradients of each version
    versions: dict[int, list[Tensor]] = {}
    for number, (learner, mini_batch, clock_read, update) in enumerate(rows, start=1):
        clock, held = server.pull()
        if clock != update:
            raise ValueError(
                f"mini-batch {mini_batch} is recorded in update {update}; by the rule it is in "
                f"{clock}"
            )
        if clock_read > clock:
            raise ValueError(f"mini-batch {mini_batch} was computed from weights that came later")
        with torch.no_grad():
            read = held if clock_read == clock else versions[clock_read]
            for weight, values in zip(weights, read, strict=True):
                weight.copy_(values)
        left[clock_read] -= 1
        if not left[clock_read]:
            versions.pop(clock_read, None)
        tensors, loss = gradient(learner, mini_batch)
        if number % server.rule.gradients == 0 and left[clock]:  # this completes an update
            versions[clock] = [weight.clone() for weight in held]
        own = [tensor.detach().clone() for tensor in tensors]
        applied = server.push(learner, clock_read, own, mini_batch=mini_batch, loss=loss)
        if applied is not None:
            yield applied

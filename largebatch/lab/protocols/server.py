"""A parameter server: a part of the weights and their optimizer, without communication; its rule.

The servers of a run and the simulator use the same rule. A server holds whole tensors, because LARS
needs the norms of its layers. The protocol determines the order of calls: a run's services call it
in the order in which gradients arrive, a replay in the order of its record.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from largebatch.formatting import plural
from largebatch.optim.lars import LARS
from largebatch.optim.rates import set_rates
from largebatch.recipe.protocols import Protocol
from largebatch.schedules.functions import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """The gradients and the learning rate of an update, and whether learners wait for it.

    >>> rule = UpdateRule(learners=30, gradients=2, waits=False, by_staleness=True)  # 15-softsync
    >>> [rule.factor(staleness) for staleness in (0, 1, 4)]
    [1.0, 1.0, 0.25]
    """

    learners: int
    """Number of learners (lambda)."""

    gradients: int
    """Number of gradients per update (c)."""

    waits: bool
    """True if a learner waits after a push for the update with its gradient. An update then has one
    gradient of every learner."""

    rate: float = 1.0
    """Factor of the learning rate of every update."""

    by_staleness: bool = False
    """True if the learning rate of each gradient is divided by its staleness."""

    @classmethod
    def hardsync(cls, learners: int) -> Self:
        """Return the synchronous rule, at the learning rate of the schedule."""
        return cls(learners=learners, gradients=learners, waits=True)

    @classmethod
    def of(cls, protocol: Protocol, *, mini_batch: int) -> Self:
        """Return the rule of a protocol; `mini_batch` is in samples (mu)."""
        return cls(
            learners=protocol.learners,
            gradients=protocol.gradients,
            waits=protocol.waits,
            rate=protocol.rate_factor(mini_batch),
            by_staleness=protocol.divides_by_staleness,
        )

    def factor(self, staleness: int) -> float:
        """Return a gradient's factor by its staleness, in addition to `rate`; 1 without.

        Staleness-aware SGD: arXiv:1511.05950.
        """
        return 1 / max(1, staleness) if self.by_staleness else 1.0


class MiniBatches:
    """Hands out the mini-batches of some updates to the learners, each of them once.

    Mini-batch m has the positions m mu to (m + 1) mu - 1 of the sample order. If learners wait,
    learner i gets the i-th part of the global batch of every update. Otherwise any learner gets the
    next one, and after update k all mini-batches before (k + 1) c have been used, in any order.

    >>> them = MiniBatches(UpdateRule(learners=3, gradients=2, waits=False), range(4, 6))
    >>> [them.next(learner) for learner in (2, 0, 2, 1, 0)]
    [8, 9, 10, 11, None]
    >>> them = MiniBatches(UpdateRule.hardsync(2), range(4, 6))
    >>> [them.next(learner) for learner in (1, 0, 0, 1, 0)]
    [9, 8, 10, 11, None]
    """

    def __init__(self, rule: UpdateRule, updates: range) -> None:
        self._rule = rule
        self._stop = updates.stop
        self._next = updates.start * rule.gradients
        self._updates = dict.fromkeys(range(rule.learners), updates.start)

    def next(self, learner: int) -> int | None:
        """Return the next mini-batch of a learner; None if none is left."""
        if self._rule.waits:
            update = self._updates[learner]
            self._updates[learner] = min(self._stop, update + 1)
            return update * self._rule.learners + learner if update < self._stop else None
        if self._next == self._stop * self._rule.gradients:
            return None
        self._next += 1
        return self._next - 1

    def stop_early(self) -> None:
        """Restrict the mini-batches to those that complete started updates."""
        begun = -(-self._next // self._rule.gradients)
        self._stop = max(self._updates.values()) if self._rule.waits else begun


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
    loss: float = math.nan
    """Mean loss over the mini-batch; NaN in a simulation."""


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
        rule: UpdateRule,
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
    ) -> float | None:
        """Add a gradient, the mean over its mini-batch; make the update that it completes, if any.

        Returns the learning rate of this update: that of the schedule, times the factor of the rule
        that all gradients share. `gradient` has a tensor for each of the weights, which must not
        change any more.

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
    def _apply(self) -> float:
        taken = self._gradients
        self._gradients = []
        if self.rule.waits:  # then the sum does not depend on who was first
            taken.sort(key=lambda pair: pair[0].learner)
        factors = [self.rule.factor(arrival.staleness) for arrival, _ in taken]
        share = sum(factors) / len(factors)
        # LARS divides by the length of the gradient, so the common factor goes into the rate; else
        # into the gradients, and into the decay, which the optimizer adds to them.
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
        # The next update may have none for some weights of the optimizer, and must not repeat this
        # one.
        for weight in self.weights:
            weight.grad = None
        self.clock += 1
        return lr


def divide(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """Divide tensors of these sizes over servers; return their ascending numbers by server.

    Assign the largest tensor first, each to the server with the smallest sum so far.

    >>> divide([10, 4, 90, 50, 40], 2)
    [[0, 2], [1, 3, 4]]
    """
    if not 1 <= servers <= len(sizes):
        raise ValueError(f"{len(sizes)} tensors cannot be divided over {plural(servers, 'server')}")
    parts: list[list[int]] = [[] for _ in range(servers)]
    filled = [0] * servers
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        # Of equally full servers the one with the fewest tensors, so that none stays empty.
        least = min(range(servers), key=lambda server: (filled[server], len(parts[server])))
        parts[least].append(number)
        filled[least] += sizes[number]
    return [sorted(part) for part in parts]


ARRIVALS = "arrivals.jsonl"
"""Name of the file of a run folder with the arrivals of all servers."""

Gradient = Callable[[int, int], tuple[Sequence[Tensor], float]]
"""Maps a learner and a mini-batch to its mean gradient at the current weights, one tensor for each,
and its mean loss. The next call may overwrite the tensors."""


def replay(
    server: ParameterServer,
    arrivals: Sequence[Arrival],
    weights: Sequence[Tensor],
    gradient: Gradient,
) -> Iterator[list[Arrival]]:
    """Make the updates of a record of one server, in its order; yield the gradients of each.

    A learner's weights are those of its server at the clock that it read. So a replay of thousands
    of learners needs no copies of their weights: it stores only the versions from which later
    gradients are computed, about as many as the staleness.

    Before each call of `gradient`, `weights` are set to the ones that the learner read. The
    server's optimizer must not hold them.
    """
    left = Counter(arrival.clock_read for arrival in arrivals)  # gradients of each version
    versions: dict[int, list[Tensor]] = {}
    for number, (update, learner, clock_read, _, mini_batch, _) in enumerate(arrivals, start=1):
        clock, held = server.pull()
        assert clock == update, "the record follows another rule"
        with torch.no_grad():
            read = held if clock_read == clock else versions[clock_read]
            for weight, values in zip(weights, read, strict=True):
                weight.copy_(values)
        left[clock_read] -= 1
        if not left[clock_read]:
            versions.pop(clock_read, None)
        tensors, loss = gradient(learner, mini_batch)
        # Kept before the push, which changes the weights in place.
        if number % server.rule.gradients == 0 and left[clock]:  # this completes an update
            versions[clock] = [weight.clone() for weight in held]
        # The server keeps it until its update is complete, and the next gradient overwrites it.
        copies = [tensor.detach().clone() for tensor in tensors]
        lr = server.push(learner, clock_read, copies, mini_batch=mini_batch, loss=loss)
        if lr is not None:
            yield server.arrivals[-server.rule.gradients :]

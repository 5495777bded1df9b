"""A parameter server: a part of the weights, and what updates them, without communication.

It holds whole tensors, so that LARS finds the norms of its layers. Who calls it in which order is
what a protocol is about: the services of a run in the order in which gradients arrive, the
simulator in an order of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from largebatch.optim.lars import LARS
from largebatch.schedules.functions import Schedule
from largebatch.training.protocols.rule import Rule


class Arrival(NamedTuple):
    """One gradient, as a server received it."""

    update: int
    """The update that it became a part of; it is made by the last of its arrivals."""

    learner: int
    clock_read: int
    """How many updates the weights had behind them that it was computed from."""

    staleness: int
    """How many updates they have missed: update - clock_read (tau)."""

    mini_batch: int
    loss: float
    """Mean over its mini-batch."""


class Applied(NamedTuple):
    """An update that was made."""

    update: int
    lr: float
    """The rate of the schedule, times the factor of the rule that all gradients share."""

    arrivals: tuple[Arrival, ...]


class ParameterServer:
    """Updates some weights by gradients in the order in which they are pushed.

    `optimizer` may hold more weights than those: what has no gradient it leaves alone. `schedule`
    gives the rate of an update by its number, and `clock` is how many were made before.

    The mean over an update's gradients has each times its factor (arXiv:1511.05950), and the weight
    decay that is added to it their mean factor, for the rate is the decay's as well. LARS divides
    by the length of the gradient, so that a factor common to all of them would be lost: there the
    rate is multiplied by their mean factor, and what is left of them weighs the gradients.
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
        """Updates made."""

        self.arrivals: list[Arrival] = []
        """Of all gradients, in order; `push` only adds to it."""

        self._schedule = schedule
        self._gradients: list[tuple[Arrival, Sequence[Tensor]]] = []

    def pull(self) -> tuple[int, list[Tensor]]:
        """Return the clock and the weights, which the next update will change in place."""
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
        """Take a gradient, the mean over its mini-batch; return the update that it completed.

        `gradient` has a tensor for each of the weights, which must not change any more.

        Raises ValueError for a gradient of weights that there have not been, and where learners
        wait for a second one of the same learner.
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
        for group in groups:
            group["lr"] = lr * of_rate
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
    """Divide tensors of these sizes over servers; return the numbers of those of each, rising.

    The largest goes first, to the server with the least so far.

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

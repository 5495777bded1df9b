"""The arithmetic of the protocols: pure, without PyTorch and without communication.

The servers of a run and the simulator use the same rule.
"""

import math
from dataclasses import dataclass
from typing import Self

from largebatch.recipe.protocols import Hardsync, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The gradients and the learning rate of an update, and whether learners wait for it.

    >>> rule = Rule(learners=30, gradients=2, waits=False, by_staleness=True)  # 15-softsync
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
        learners, gradients = protocol.learners, protocol.gradients
        if isinstance(protocol, Hardsync):
            reference = protocol.reference_batch
            rate = math.sqrt(learners * mini_batch / reference) if reference else 1.0
            return cls(learners=learners, gradients=gradients, waits=True, rate=rate)
        return cls(
            learners=learners,
            gradients=gradients,
            waits=False,
            rate=1 / protocol.n if protocol.modulation == "n" else 1.0,
            by_staleness=protocol.modulation == "staleness",
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

    >>> them = MiniBatches(Rule(learners=3, gradients=2, waits=False), range(4, 6))
    >>> [them.next(learner) for learner in (2, 0, 2, 1, 0)]
    [8, 9, 10, 11, None]
    >>> them = MiniBatches(Rule.hardsync(2), range(4, 6))
    >>> [them.next(learner) for learner in (1, 0, 0, 1, 0)]
    [9, 8, 10, 11, None]
    """

    def __init__(self, rule: Rule, updates: range) -> None:
        self._rule, self._stop = rule, updates.stop
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

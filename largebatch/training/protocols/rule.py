"""The arithmetic of the protocols: pure, without PyTorch and without communication.

The servers of a run and the simulator follow the same rule, so that they cannot disagree.
"""

import math
from dataclasses import dataclass
from typing import Self, assert_never

from largebatch.recipe.protocols import Asynchronous, Hardsync, LocalSteps, Protocol, Softsync


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What an update is made of, and who waits for it.

    >>> rule = Rule(learners=30, gradients=2, waits=False, by_staleness=True)  # 15-softsync
    >>> [rule.factor(staleness) for staleness in (0, 1, 4)]
    [1.0, 1.0, 0.25]
    """

    learners: int
    """lambda."""

    gradients: int
    """Those that an update takes (c)."""

    waits: bool
    """Whether a learner waits after a push until the update that its gradient is in was made. An
    update then has one gradient of every learner."""

    rate: float = 1.0
    """What the rate of every update is multiplied by."""

    by_staleness: bool = False
    """Whether the rate of each gradient is divided by its staleness."""

    local_steps: int = 1
    """Updates of its own that a learner makes before a push."""

    @classmethod
    def hardsync(cls, learners: int) -> Self:
        """Return the rule by which all wait for all, at the rate of the schedule."""
        return cls(learners=learners, gradients=learners, waits=True)

    @classmethod
    def of(cls, protocol: Protocol, *, mini_batch: int) -> Self:
        """Return the rule of a protocol; `mini_batch` is in samples (mu)."""
        learners, gradients = protocol.learners, protocol.gradients
        match protocol:
            case Hardsync(reference_batch=reference):
                rate = math.sqrt(learners * mini_batch / reference) if reference else 1.0
                return cls(learners=learners, gradients=gradients, waits=True, rate=rate)
            case Softsync(modulation=modulation, n=n):
                pass
            case Asynchronous(modulation=modulation):
                n = learners
            case LocalSteps(steps=steps):
                return cls(learners=learners, gradients=gradients, waits=True, local_steps=steps)
            case _:
                assert_never(protocol)
        return cls(
            learners=learners,
            gradients=gradients,
            waits=False,
            rate=1 / n if modulation == "n" else 1.0,
            by_staleness=modulation == "staleness",
        )

    def factor(self, staleness: int) -> float:
        """Return what a gradient this many updates late counts, beside `rate`; 1 if it is not late.

        Staleness-aware SGD: arXiv:1511.05950.
        """
        return 1 / max(1, staleness) if self.by_staleness else 1.0


class MiniBatches:
    """Hands the mini-batches of some updates out to the learners, each of them once.

    Mini-batch m has the positions m mu to (m + 1) mu - 1 of the sample order. Where learners wait,
    learner i gets the i-th part of the global batch of every update (with local steps: of every
    update in which it pulls); else it gets the next one, whoever it is. Update k then has taken
    the mini-batches before (k + 1) c, in whatever order, when all of them have been pushed.

    >>> them = MiniBatches(Rule(learners=3, gradients=2, waits=False), range(4, 6))
    >>> [them.next(learner) for learner in (2, 0, 2, 1, 0)]
    [8, 9, 10, 11, None]
    >>> them = MiniBatches(Rule.hardsync(2), range(4, 6))
    >>> [them.next(learner) for learner in (1, 0, 0, 1, 0)]
    [9, 8, 10, 11, None]

    One that was handed out and never pushed can be taken back, and is handed out again.

    >>> them = MiniBatches(Rule(learners=2, gradients=1, waits=False), range(2))
    >>> [them.next(learner) for learner in (0, 1, 0)]
    [0, 1, None]
    >>> (them.under_way, them.take_back(1), them.next(0), them.next(0), them.under_way)
    (True, 1, 1, None, False)
    """

    def __init__(self, rule: Rule, updates: range) -> None:
        self._rule, self._stop = rule, updates.stop
        self._next = updates.start * rule.gradients
        self._given: dict[int, int] = {}
        self._back: list[int] = []
        self._updates = dict.fromkeys(range(rule.learners), updates.start)

    @property
    def end(self) -> int:
        """How many updates have been made in all when no mini-batch is left."""
        return self._stop

    def next(self, learner: int) -> int | None:
        """Return the next mini-batch of a learner; None where none is left."""
        if self._rule.waits:
            update = self._updates[learner]
            self._updates[learner] = min(self._stop, update + self._rule.local_steps)
            return update * self._rule.learners + learner if update < self._stop else None
        self._given.pop(learner, None)
        if self._back:
            number = self._back.pop()
        elif self._next < self._stop * self._rule.gradients:
            number, self._next = self._next, self._next + 1
        else:
            return None
        self._given[learner] = number
        return number

    def take_back(self, learner: int) -> int | None:
        """Take back what a learner has computed last, unless it has come for the next one."""
        number = self._given.pop(learner, None)
        if number is not None:
            self._back.append(number)
        return number

    @property
    def under_way(self) -> bool:
        """Whether learners that do not wait have mini-batches that could be taken back."""
        return bool(self._given)

    def stop_early(self) -> None:
        """Hand out no more than completes the updates that have been begun."""
        begun = -(-self._next // self._rule.gradients)
        self._stop = max(self._updates.values()) if self._rule.waits else begun

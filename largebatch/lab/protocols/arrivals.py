"""The order in which gradients arrived at a parameter server, as columns.

The weights of a run depend only on which gradient goes into which update, and on the weights it was
computed from; times only determine the order. So a run and a simulation write the same record, and
`replay` computes the weights from either.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from largebatch.lab.protocols.server import Arrival

ARRIVALS = "arrivals.jsonl"
"""Name of the file of a run folder with the arrivals of all servers."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """One row for each gradient that one server received, in order of arrival."""

    learner: IntArray
    mini_batch: IntArray
    """Numbers of the mini-batches, the same on every server."""

    clock_read: IntArray
    """Number of this server's updates in the weights that the gradient was computed from."""

    update: IntArray
    """Numbers of the updates that the gradients are part of, counted from 0."""

    @classmethod
    def of(cls, arrivals: Iterable[Arrival]) -> Self:
        """Return the record of a parameter server."""
        rows = [(one.learner, one.mini_batch, one.clock_read, one.update) for one in arrivals]
        learner, mini_batch, clock_read, update = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return cls(learner=learner, mini_batch=mini_batch, clock_read=clock_read, update=update)

    @classmethod
    def joined(cls, records: Sequence[Self]) -> Self:
        """Return the concatenated records."""
        columns = {
            name: np.concatenate([getattr(one, name) for one in records])
            for name in ("learner", "mini_batch", "clock_read", "update")
        }
        return cls(**columns)

    def later(self, updates: int, *, gradients: int) -> Self:
        """Return the record shifted by a number of updates, each of `gradients` gradients."""
        return replace(
            self,
            mini_batch=self.mini_batch + updates * gradients,
            clock_read=self.clock_read + updates,
            update=self.update + updates,
        )

    def __len__(self) -> int:
        return len(self.learner)

    @property
    def staleness(self) -> IntArray:
        """Number of the server's updates between the weights of a gradient and its own update."""
        return self.update - self.clock_read

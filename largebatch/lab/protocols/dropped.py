"""Learners without which the others continue, as notes in the store of all workers.

The process that started the workers reads the notes too: it does not end the others when such a
learner ends.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count

from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.distributed_c10d import Store

from largebatch.distributed.environment import DROPPED


class DroppedWorkers:
    """The notes of dropped workers in a store."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore(DROPPED, store)
        self._rounds = count()

    def add(self, worker: int) -> None:
        """Record that the run continues without a worker, from the next `agree` on."""
        self._store.append("all", f"{worker} ")  # type: ignore[attr-defined]  # torch's stubs
        self._store.set(str(worker), "")

    def include(self, worker: int) -> bool:
        """Return True if a worker was dropped; False if the store is out of reach."""
        with suppress(DistError):
            return bool(self._store.check([str(worker)]))
        return False

    def agree(
        self, of: Collection[int], *, own: int, witnesses: Sequence[int], limit: timedelta
    ) -> set[int]:
        """Return which of these workers are dropped, the same set on every worker that calls this.

        The witnesses, who add workers, call it when they will add no more; all others wait for
        them. Every worker calls it equally often. Raises DistError after the limit.
        """
        number = next(self._rounds)
        ready = [f"{number} {witness}" for witness in witnesses]
        if own in witnesses:
            self._store.set(f"{number} {own}", "")
        self._store.wait(ready, limit)
        noted = self._store.get("all") if self._store.check(["all"]) else b""
        return {int(worker) for worker in noted.split()} & set(of)

"""Workers that the run goes on without, as notes in the store that connects all workers.

The process that started the workers reads the notes too: it does not end the others when such a
worker ends.
"""

from collections.abc import Collection, Sequence
from datetime import timedelta
from itertools import count

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.distributed_c10d import Store


class DroppedWorkers:
    """The dropped workers of a store; `attempt` is the number of restarts of all workers before."""

    def __init__(self, store: Store, *, attempt: str = "0") -> None:
        self._store = PrefixStore("dropped", PrefixStore(attempt, store))
        self._rounds = count()

    def add(self, worker: int) -> None:
        """Record that the run continues without a worker."""
        self._store.append("all", f"{worker} ")  # type: ignore[attr-defined]  # torch's stubs
        self._store.set(str(worker), "")

    def include(self, worker: int) -> bool:
        """Return True if a worker was dropped."""
        return bool(self._store.check([str(worker)]))

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

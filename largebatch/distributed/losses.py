"""Lost workers that the others continue without, recorded in the workers' store.

The launcher reads the records too: it does not stop the others when such a worker ends.
"""

from collections.abc import Collection, Sequence
from datetime import timedelta
from itertools import count

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.distributed_c10d import Store


class Losses:
    """The lost workers in a store; `attempt` is the number of previous starts of all workers."""

    def __init__(self, store: Store, *, attempt: str = "0") -> None:
        self._store = PrefixStore("lost", PrefixStore(attempt, store))
        self._rounds = count()

    def note(self, worker: int) -> None:
        """Record that the others continue without a worker."""
        self._store.append("all", f"{worker} ")  # type: ignore[attr-defined]  # torch's stubs
        self._store.set(str(worker), "")

    def include(self, worker: int) -> bool:
        """Return True if a worker was recorded as lost."""
        return bool(self._store.check([str(worker)]))

    def agree(
        self, of: Collection[int], *, own: int, witnesses: Sequence[int], limit: timedelta
    ) -> set[int]:
        """Return the lost workers among these, the same set on every calling worker.

        The witnesses, which record losses, call it after their last record; all others wait for
        them. Every worker must call it the same number of times. Raises DistError after the limit.
        """
        number = next(self._rounds)
        ready = [f"{number} {witness}" for witness in witnesses]
        if own in witnesses:
            self._store.set(f"{number} {own}", "")
        self._store.wait(ready, limit)
        noted = self._store.get("all") if self._store.check(["all"]) else b""
        return {int(worker) for worker in noted.split()} & set(of)

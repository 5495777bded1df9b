"""Workers that were lost and that the others go on without, as notes in the store that joins them.

What started the workers reads the notes too: for such a worker it does not end the others.
"""

from collections.abc import Collection, Sequence
from datetime import timedelta
from itertools import count

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.distributed_c10d import Store


class Losses:
    """The workers of a store that were lost; `attempt` is how often all were started before."""

    def __init__(self, store: Store, *, attempt: str = "0") -> None:
        self._store = PrefixStore("lost", PrefixStore(attempt, store))
        self._rounds = count()

    def note(self, worker: int) -> None:
        """Let all know that the others go on without a worker."""
        self._store.append("all", f"{worker} ")  # type: ignore[attr-defined]  # torch's stubs
        self._store.set(str(worker), "")

    def include(self, worker: int) -> bool:
        """Return whether the others go on without a worker, or are about to."""
        return bool(self._store.check([str(worker)]))

    def agree(
        self, of: Collection[int], *, own: int, witnesses: Sequence[int], limit: timedelta
    ) -> set[int]:
        """Return which workers of these were lost, the same set on every worker that calls this.

        The witnesses, who note losses, call it when they will note no more; all others wait for
        them. Every worker calls it equally often. Raises DistError after the limit.
        """
        number = next(self._rounds)
        ready = [f"{number} {witness}" for witness in witnesses]
        if own in witnesses:
            self._store.set(f"{number} {own}", "")
        self._store.wait(ready, limit)
        noted = self._store.get("all") if self._store.check(["all"]) else b""
        return {int(worker) for worker in noted.split()} & set(of)

"""The notes of the watch in torch's store: which workers wait, and whether one is busy.

Thousands of workers that wait for one search for it at the same time. So the waiting workers are
counted in a tree: for each worker, for each 8 neighbours, for each 64, and so on. A search descends
only into parts where some workers wait, but not all, so a note and a search take O(log W) requests.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.distributed_c10d import Store

from largebatch.errors import SHOWN

_FAN_OUT = 8
"""Number of parts in a larger part."""


class StoreNotes:
    """The notes of worker `rank`; implements `watch.Notes`."""

    def __init__(self, store: Store, *, rank: int, workers: int) -> None:
        self._store = PrefixStore("watch", store)
        self._rank, self._workers = rank, workers
        self._sizes = [1]
        while self._sizes[-1] < workers:
            self._sizes.append(self._sizes[-1] * _FAN_OUT)
        self._beats = 0
        self._speaks: bool | None = None

    def wait(self) -> None:
        """Count this worker as waiting, in small parts first, so that searches see it early."""
        for size in self._sizes:
            self._count(self._rank, size, 1)

    def resume(self) -> None:
        """Stop counting this worker, in large parts first."""
        for size in reversed(self._sizes):
            self._count(self._rank, size, -1)

    def absent(self, members: Sequence[int]) -> list[int]:
        """Return the first few of these workers, in rising order, that are not waiting."""
        return list(islice(self._absent(members, 0, self._sizes[-1]), SHOWN + 1))

    def beat(self) -> None:
        """Record that this worker, for which others wait, is busy."""
        self._store.add("busy", 1)

    def are_busy(self, workers: Sequence[int]) -> bool:  # noqa: ARG002 -- one count for all
        """Return True if any worker that is not waiting has been busy since the last call."""
        before, self._beats = self._beats, self._store.add("busy", 0)
        return self._beats != before

    def speaks(self) -> bool:
        """Return True on the first worker that calls this, and again on later calls."""
        if self._speaks is None:
            self._speaks = self._store.add("speaker", 1) == 1
        return self._speaks

    def _absent(self, members: Sequence[int], begin: int, size: int) -> Iterator[int]:
        """Yield the members of a part that are not waiting."""
        end = min(begin + size, self._workers)
        inside = members[bisect_left(members, begin) : bisect_left(members, end)]
        if not inside:
            return
        waiting = self._count(begin, size, 0)
        if waiting == 0:
            yield from inside
        elif waiting < end - begin:
            for first in range(begin, end, size // _FAN_OUT):
                yield from self._absent(members, first, size // _FAN_OUT)

    def _count(self, worker: int, size: int, number: int) -> int:
        """Add to the number of waiting workers in the part of `worker`; return the sum."""
        return self._store.add(f"waits/{size}/{worker // size}", number)

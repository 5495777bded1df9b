"""The notes of the watch in torch's store: who waits, and whether a worker is busy.

Thousands of workers that wait for one look for it at the same time. So the waiting workers are
counted in a tree: of each worker, of each 8 side by side, of each 64, and so on. A search goes only
into parts whose count is neither 0 nor that of all, so a note and a search take O(log W) requests.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.distributed_c10d import Store

from largebatch.errors import SHOWN

_FAN_OUT = 8
"""How many parts make a larger one."""


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
        """Count this worker, in small parts first: a search meanwhile finds that it waits."""
        for size in self._sizes:
            self._count(self._rank, size, 1)

    def resume(self) -> None:
        """Count this worker no longer, in large parts first."""
        for size in reversed(self._sizes):
            self._count(self._rank, size, -1)

    def absent(self, members: Sequence[int]) -> list[int]:
        """Return which of these workers, in rising order, do not wait; a few of many."""
        return list(islice(self._absent(members, 0, self._sizes[-1]), SHOWN + 1))

    def beat(self) -> None:
        """Note that this worker, for which others wait, is busy."""
        self._store.add("busy", 1)

    def are_busy(self, workers: Sequence[int]) -> bool:  # noqa: ARG002 -- one count for all
        """Return True if any worker that does not wait has been busy since the last call."""
        before, self._beats = self._beats, self._store.add("busy", 0)
        return self._beats != before

    def speaks(self) -> bool:
        """Return True for the first worker that calls this, and for it again."""
        if self._speaks is None:
            self._speaks = self._store.add("speaker", 1) == 1
        return self._speaks

    def _absent(self, members: Sequence[int], begin: int, size: int) -> Iterator[int]:
        """Give the members of a part that do not wait."""
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
        """Add to the number of waiting workers in the part that holds this one; return it."""
        return self._store.add(f"waits/{size}/{worker // size}", number)

"""What ends a worker that waits for another one longer than `--timeout`, and says for whom.

Libraries report a worker that is gone. One that is there and does nothing (suspended, or waiting
for a disk or a device) they report late, without its number, or never. So a thread of every worker
looks at the oldest operation under way. When half of the time is over it leaves a note in a store;
when all of it is, those that left none are absent, and the process ends. A worker that does for
long what the others have to wait for notes that it is busy, again and again, unless it waits too.
"""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NoReturn, Protocol

from largebatch.distributed.environment import ABSENT, GRACE_SECONDS, LAUNCHER, STARTING
from largebatch.errors import shorten


class Notes(Protocol):
    """What this worker leaves in a store that every worker reaches without the help of others."""

    def wait(self) -> None:
        """Note that this worker waits for others."""

    def resume(self) -> None:
        """Take that note back."""

    def absent(self, members: Sequence[int]) -> list[int]:
        """Return which of these workers, in rising order, have no such note; a few of many."""

    def beat(self) -> None:
        """Note that this worker, for which others wait, is busy."""

    def are_busy(self, workers: Sequence[int]) -> bool:
        """Return True if one of these absent workers has noted since the last call that it is."""

    def speaks(self) -> bool:
        """Return True on one of the workers that have looked for those absent."""


Rescue = Callable[[Callable[[], bool]], bool]
"""Saves what is sound while the main thread is held by an operation; takes what returns whether it
still is. Returns False where the main thread is on its way out by itself."""


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    members: Sequence[int]
    begun: float
    is_done: Callable[[], bool]
    has_failed: Callable[[], bool]


class Watch:
    """Follows the operations of one worker; `timeout` is in seconds.

    `notes` is None where there is no store: who is absent is then not known. `starting`: it waits
    STARTING times as long until `started` is called.
    """

    def __init__(
        self, notes: Notes | None, *, rank: int, timeout: float, starting: bool = False
    ) -> None:
        self._notes, self._rank = notes, rank
        self._after_start = timeout
        self._timeout = timeout * STARTING if starting else timeout
        self._period = min(1.0, timeout / 20)
        self._numbers = count()
        self._under_way: dict[int, _Operation] = {}
        self._lock = threading.Lock()
        self._waits = False
        self._busy = 0
        self._excused_until = 0.0
        self._failed_since: float | None = None
        self._rescue: Rescue | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread in the middle of a call would abort the process

    def begin(
        self,
        name: str,
        members: Sequence[int],
        is_done: Callable[[], bool] = lambda: False,
        has_failed: Callable[[], bool] = lambda: False,
    ) -> int:
        """Follow an operation until `end` is called with the number returned, or `is_done`.

        One that `has_failed` will never be done, and the thread that began it may not notice.
        """
        number = next(self._numbers)
        with self._lock:
            self._under_way[number] = _Operation(
                name, members, time.monotonic(), is_done, has_failed
            )
        return number

    def end(self, number: int) -> None:
        """Forget an operation."""
        with self._lock:
            self._under_way.pop(number, None)

    @contextmanager
    def during(self, name: str, members: Sequence[int]) -> Iterator[None]:
        """Follow an operation that blocks."""
        number = self.begin(name, members)
        try:
            yield
        finally:
            self.end(number)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Let the others wait for this worker for as long as it is alive."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    def before_leaving(self, rescue: Rescue | None) -> None:
        """Call this, in another thread, before this process ends because of another worker."""
        self._rescue = rescue

    def started(self) -> None:
        """Wait for no longer than `timeout` from here on."""
        self._timeout = self._after_start

    def close(self) -> None:
        """Follow nothing more."""
        self._closed.set()
        self._thread.join(GRACE_SECONDS)

    def _follow(self) -> None:
        while not self._closed.wait(self._period):
            operation = self._oldest()
            waited = time.monotonic() - operation.begun if operation else 0.0
            self._leave_notes(waits=waited > self._timeout / 2)
            if operation is not None and self._is_lost(operation):
                message = _describe_failure(operation.name, self._rank)
                prints = self._rank in operation.members[:2]  # one of which may be lost
                self._leave_unless_saved(operation, message, print_it=prints)
            elif operation is not None and waited > self._timeout:
                self._judge(operation)

    def _is_lost(self, operation: _Operation) -> bool:
        """Return whether it failed so long ago that the main thread would have raised that."""
        if not operation.has_failed():
            self._failed_since = None
            return False
        self._failed_since = self._failed_since or time.monotonic()
        return time.monotonic() - self._failed_since > GRACE_SECONDS

    def _leave_notes(self, *, waits: bool) -> None:
        """Note what has changed; without the store from now on where that fails."""
        if self._notes is None:
            return
        try:
            if waits != self._waits:
                self._notes.wait() if waits else self._notes.resume()
            if self._busy and not waits:
                self._notes.beat()
        except Exception:
            self._notes = None
        self._waits = waits

    def _oldest(self) -> _Operation | None:
        """Return the first operation that is not done."""
        with self._lock:
            for number, operation in list(self._under_way.items()):
                if not _is_done(operation):
                    return operation
                del self._under_way[number]
        return None

    def _judge(self, operation: _Operation) -> None:
        """End this process, unless an absent worker is busy."""
        absent: list[int] | None = None
        prints = self._rank == min(operation.members)
        excused = threading.Event()

        def look(notes: Notes) -> None:
            nonlocal absent, prints
            found = notes.absent(operation.members)
            if notes.are_busy(found):
                excused.set()
            elif time.monotonic() > self._excused_until:
                prints, absent = notes.speaks(), found

        if self._notes is not None:  # whose host may be what does not answer
            looking = threading.Thread(target=look, args=(self._notes,), daemon=True)
            looking.start()
            looking.join(GRACE_SECONDS)
        if excused.is_set():
            self._excused_until = time.monotonic() + self._timeout
        if time.monotonic() < self._excused_until or _is_done(operation):
            return
        message = describe(operation.name, absent, self._timeout)
        self._leave_unless_saved(operation, message, print_it=prints)

    def _leave_unless_saved(self, operation: _Operation, message: str, *, print_it: bool) -> None:
        """Call the rescue, then end this process, unless the rescue says that it ends by itself."""
        rescue, leaves = self._rescue, True

        def save() -> None:
            nonlocal leaves
            assert rescue is not None
            leaves = rescue(lambda: not _is_done(operation))

        if rescue is not None:  # whose disk may be what does not answer
            saving = threading.Thread(target=save, daemon=True)
            saving.start()
            saving.join(self._after_start)
        if leaves:
            leave(message, print_it=print_it)
        else:
            self._closed.set()


def _is_done(operation: _Operation) -> bool:
    """Return whether it is; one that the main thread has just finished may be unknown."""
    try:
        return operation.is_done()
    except (RuntimeError, ValueError):
        return True


class Watched:
    """What every backend asks of its watch; without a watch these calls do nothing."""

    _watch: Watch | None = None

    def busy(self) -> AbstractContextManager[None]:
        """Let the others wait for this worker; without a watch their library has its own limit."""
        return self._watch.busy() if self._watch else nullcontext()

    def before_leaving(self, rescue: Rescue | None) -> None:
        """Call this before the watch ends this process."""
        if self._watch is not None:
            self._watch.before_leaving(rescue)

    def started(self) -> None:
        """Wait for no longer than --timeout from here on."""
        if self._watch is not None:
            self._watch.started()


def _describe_failure(operation: str, rank: int) -> str:
    return f"worker {rank} lost contact with another worker ({operation} failed)"


_LONGER = "or give a longer --timeout"


def describe(operation: str, absent: Sequence[int] | None, seconds: float) -> str:
    """Say who has not joined an operation; None: this cannot be known.

    >>> print(describe("barrier", [2], 300))
    worker 2 has not joined barrier for 300 s; look at its host, or give a longer --timeout
    """
    what = f"{operation} for {seconds:g} s"
    if absent is None:
        return f"a worker has not joined {what}, and no store answers that knows which one"
    if not absent:
        return f"every worker waits in {what}; look at the network between them"
    if len(absent) == 1:
        return f"worker {absent[0]} has not joined {what}; look at its host, {_LONGER}"
    names = shorten([str(worker) for worker in absent])
    return f"workers {names} have not joined {what}; look at their hosts, {_LONGER}"


def leave(message: str, *, print_it: bool) -> NoReturn:
    """End this process at once because of another worker; its main thread may wait for ever."""
    if LAUNCHER in os.environ:
        report(message)
    elif print_it:
        sys.stderr.write(f"largebatch: {message}\n")
        sys.stderr.flush()
    else:
        time.sleep(1)  # launchers end all workers when the first one has ended
    os._exit(ABSENT)


def report(message: str) -> None:
    """Leave a message to the process that started this worker, in the file it named."""
    path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"message": message, "timestamp": time.time()}), encoding="utf-8")
    part.replace(path)


def leave_with(parent: int) -> None:
    """End this process soon after the one that started it, which cannot end it any more."""

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()

"""A watchdog that ends a worker after waiting longer than `--timeout`, and names the absent worker.

Libraries report a worker that has exited. A worker that hangs (suspended, or waiting for a disk or
a device) is reported late, without its number, or never. So a thread of every worker monitors the
oldest operation in progress. After half of the timeout it leaves a note in a store; after all of
it, the workers without a note are absent, and the process exits. A worker that keeps the others
waiting on purpose records regularly that it is busy, unless it waits too.
"""

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NoReturn, Protocol

from largebatch.distributed.environment import ABSENT, GRACE_SECONDS, LAUNCHER, STARTING
from largebatch.errors import shorten


class Notes(Protocol):
    """Notes in a store that every worker reaches without the other workers."""

    def wait(self) -> None:
        """Record that this worker is waiting for others."""

    def resume(self) -> None:
        """Remove the record of `wait`."""

    def absent(self, members: Sequence[int]) -> list[int]:
        """Return the first few of these workers, in rising order, that are not waiting."""

    def beat(self) -> None:
        """Record that this worker, for which others wait, is busy."""

    def are_busy(self, workers: Sequence[int]) -> bool:
        """Return True if one of these workers has recorded since the last call that it is busy."""

    def speaks(self) -> bool:
        """Return True on exactly one of the workers that called `absent`."""


Rescue = Callable[[Callable[[], bool]], bool]
"""Function that saves the run while the main thread is blocked in an operation. It takes a function
that returns True while it is blocked, and returns False if the main thread is exiting by itself."""


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    members: Sequence[int]
    start: float
    is_done: Callable[[], bool]
    has_failed: Callable[[], bool]


class Watch:
    """Monitors the operations of one worker; `timeout` is in seconds.

    `notes` is None if there is no store: absent workers are then unknown. With `starting` the
    timeout is STARTING times as long until `started` is called.
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
        atexit.register(self.close)  # a thread inside a call would abort the process

    def begin(
        self,
        name: str,
        members: Sequence[int],
        is_done: Callable[[], bool] = lambda: False,
        has_failed: Callable[[], bool] = lambda: False,
    ) -> int:
        """Monitor an operation until `is_done`, or until `end` is called with the returned number.

        An operation that `has_failed` is never done, and the thread that started it may not notice.
        """
        number = next(self._numbers)
        with self._lock:
            self._under_way[number] = _Operation(
                name, members, time.monotonic(), is_done, has_failed
            )
        return number

    def end(self, number: int) -> None:
        """Stop monitoring an operation."""
        with self._lock:
            self._under_way.pop(number, None)

    @contextmanager
    def during(self, name: str, members: Sequence[int]) -> Iterator[None]:
        """Monitor a blocking operation."""
        number = self.begin(name, members)
        try:
            yield
        finally:
            self.end(number)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Keep the other workers waiting for this one during the block, while it is alive."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    def before_leaving(self, rescue: Rescue | None) -> None:
        """Set the function called, in another thread, before an exit because of another worker."""
        self._rescue = rescue

    def started(self) -> None:
        """Wait for at most `timeout` from here on."""
        self._timeout = self._after_start

    def close(self) -> None:
        """Stop monitoring."""
        self._closed.set()
        self._thread.join(GRACE_SECONDS)

    def _follow(self) -> None:
        while not self._closed.wait(self._period):
            operation = self._oldest()
            waited = time.monotonic() - operation.start if operation else 0.0
            self._leave_notes(waits=waited > self._timeout / 2)
            if operation is not None and self._is_lost(operation):
                message = f"worker {self._rank} lost contact with another worker "
                message += f"({operation.name} failed)"
                prints = self._rank in operation.members[:2]  # two, because one may be lost
                self._leave_unless_saved(operation, message, print_it=prints)
            elif operation is not None and waited > self._timeout:
                self._judge(operation)

    def _is_lost(self, operation: _Operation) -> bool:
        """Return True if it failed so long ago that the main thread has missed the error."""
        if not operation.has_failed():
            self._failed_since = None
            return False
        self._failed_since = self._failed_since or time.monotonic()
        return time.monotonic() - self._failed_since > GRACE_SECONDS

    def _leave_notes(self, *, waits: bool) -> None:
        """Update the notes; stop using the store if that fails or hangs."""
        changes, beats = waits != self._waits, self._busy and not waits
        self._waits = waits

        def leave_them(notes: Notes) -> None:
            if changes:
                notes.wait() if waits else notes.resume()
            if beats:
                notes.beat()

        if (changes or beats) and self._notes and not _has_answered(self._notes, leave_them):
            self._notes = None

    def _oldest(self) -> _Operation | None:
        """Return the oldest operation that is not done."""
        with self._lock:
            for number, operation in list(self._under_way.items()):
                if not _is_done(operation):
                    return operation
                del self._under_way[number]
        return None

    def _judge(self, operation: _Operation) -> None:
        """Exit this process, unless an absent worker is busy."""
        absent: list[int] | None = None
        prints = self._rank == min(operation.members)
        excused = threading.Event()

        def look(notes: Notes) -> None:
            nonlocal absent, prints
            workers = notes.absent(operation.members)
            if notes.are_busy(workers):
                excused.set()
            elif time.monotonic() > self._excused_until:
                prints, absent = notes.speaks(), workers

        if self._notes is not None:
            _has_answered(self._notes, look)
        if excused.is_set():
            self._excused_until = time.monotonic() + self._timeout
        if time.monotonic() < self._excused_until or _is_done(operation):
            return
        message = describe(operation.name, absent, self._timeout)
        self._leave_unless_saved(operation, message, print_it=prints)

    def _leave_unless_saved(self, operation: _Operation, message: str, *, print_it: bool) -> None:
        """Call the rescue, then exit, unless it returns False: the main thread is exiting."""
        rescue, leaves = self._rescue, True

        def save() -> None:
            nonlocal leaves
            assert rescue is not None
            leaves = rescue(lambda: not _is_done(operation))

        if rescue is not None:  # in a thread, because the disk may not respond
            saving = threading.Thread(target=save, daemon=True)
            saving.start()
            saving.join(self._after_start)
        if leaves:
            leave(message, print_it=print_it)
        else:
            self._closed.set()


def _has_answered(notes: Notes, call: Callable[[Notes], None]) -> bool:
    """Use the notes in a thread, for their store may hang; return False if it does or fails."""
    answered = threading.Event()

    def use() -> None:
        with suppress(Exception):
            call(notes)
            answered.set()

    using = threading.Thread(target=use, daemon=True)
    using.start()
    using.join(GRACE_SECONDS)
    return answered.is_set()


def _is_done(operation: _Operation) -> bool:
    """Return True if it is done, or if the library no longer knows it."""
    try:
        return operation.is_done()
    except (RuntimeError, ValueError):
        return True


class Watched:
    """The calls of a backend to its watch; they do nothing without one."""

    _watch: Watch | None = None

    def busy(self) -> AbstractContextManager[None]:
        """Keep the other workers waiting; without a watch, their library's timeout applies."""
        return self._watch.busy() if self._watch else nullcontext()

    def before_leaving(self, rescue: Rescue | None) -> None:
        """Set the function called before the watch ends this process."""
        if self._watch is not None:
            self._watch.before_leaving(rescue)

    def started(self) -> None:
        """Wait for at most --timeout from here on."""
        if self._watch is not None:
            self._watch.started()


_LONGER = "or give a longer --timeout"


def describe(operation: str, absent: Sequence[int] | None, seconds: float) -> str:
    """Format a message that names the absent workers of an operation; None if unknown.

    >>> print(describe("barrier", [2], 300))
    worker 2 has not joined barrier for 300 s; look at its host, or give a longer --timeout
    """
    what = f"{operation} for {seconds:g} s"
    if absent is None:
        return f"a worker has not joined {what}; the store that knows which one does not respond"
    if not absent:
        return f"every worker waits in {what}; look at the network between them"
    if len(absent) == 1:
        return f"worker {absent[0]} has not joined {what}; look at its host, {_LONGER}"
    names = shorten([str(worker) for worker in absent])
    return f"workers {names} have not joined {what}; look at their hosts, {_LONGER}"


def leave(message: str, *, print_it: bool) -> NoReturn:
    """Exit this process immediately, because its main thread may wait indefinitely."""
    try:
        if LAUNCHER in os.environ:
            report(message)
        elif print_it:
            sys.stderr.write(f"largebatch: {message}\n")
            sys.stderr.flush()
        else:
            time.sleep(1)  # launchers end all workers when the first one ends
    finally:  # also with a closed terminal or a full disk
        os._exit(ABSENT)


def report(message: str) -> None:
    """Write a message for the launcher to the file that it named."""
    path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"message": message, "timestamp": time.time()}), encoding="utf-8")
    part.replace(path)


def leave_with(parent: int) -> None:
    """Exit this process soon after its parent process has ended."""

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()

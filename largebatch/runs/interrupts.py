"""Requests to stop: SIGINT and SIGTERM, answered in one place for workers, runs and commands."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM)
HEARD = b"stopping after this step; once more stops at once\n"


@contextmanager
def answering(handler: Callable[..., object], *numbers: signal.Signals) -> Iterator[None]:
    """Answer these signals with a function meanwhile.

    They reach only a program's main thread; in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def stop_requests(*, heard: bool, limit: float | None = None) -> Iterator[Callable[[], bool]]:
    """Yield whether to stop: after SIGINT or SIGTERM, or when the time is nearly over.

    The second signal acts at once. `heard`: the first one is answered by a line on the terminal.
    `limit` is in seconds from now on.
    """
    asked = threading.Event()
    previous = {number: signal.getsignal(number) for number in STOPS}

    def ask(number: int, _: object) -> None:
        asked.set()
        signal.signal(number, previous[signal.Signals(number)])
        if heard:  # by the system's own call: a stream may be in the middle of a line
            os.write(2, HEARD)

    with answering(ask, *STOPS):
        deadline = _Deadline(limit)
        yield lambda: deadline.is_near() or asked.is_set()


class _Deadline:
    """The end of the time a run has, less what it needs to stop.

    That is one and a half times the longest it went between two looks at the clock: an update, or
    an evaluation with its checkpoint.
    """

    def __init__(self, seconds: float | None) -> None:
        self._last = time.monotonic()
        self._end = math.inf if seconds is None else self._last + seconds
        self._longest = 0.0

    def is_near(self) -> bool:
        """Look at the clock; return whether to stop now."""
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        return now + 1.5 * self._longest > self._end

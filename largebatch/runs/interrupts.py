"""Requests to stop, handled in one place for workers, runs and commands.

SIGINT (Ctrl-C), SIGTERM, SIGUSR1 (SLURM's warning) and SIGHUP (a closed terminal) often come to
every process of a group at once and again from the process that started it.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from largebatch.distributed.environment import LAUNCHER

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
HEARD = b"stopping; once more stops at once\n"

TOGETHER_SECONDS = 1.0
"""Signals within this time of the first one count as the same request."""


def say_heard() -> None:
    """Print HEARD, if the terminal is still open: its end is a request, too."""
    with suppress(OSError):
        os.write(2, HEARD)  # a stream may be in the middle of a line


class InterruptedStudyError(Exception):
    """A run of several was requested to stop and has saved; the same call resumes it."""


class Requests:
    """Counts requests to stop."""

    latest = -math.inf
    """Time of the last request that any of these was given, by the monotonic clock."""

    def __init__(self) -> None:
        self._first: float | None = None
        self.again = False
        """True after a second request."""

    @property
    def any(self) -> bool:
        """True after the first request."""
        return self._first is not None

    def add(self) -> None:
        """Count a signal."""
        now = Requests.latest = time.monotonic()
        if self._first is None:
            self._first = now
        self.again = self.again or now - self._first > TOGETHER_SECONDS


@contextmanager
def answering(handler: Callable[..., object], *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals by a function inside the block; SIGHUP unless it is ignored (nohup).

    Signals reach only a program's main thread; in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    answered = [number for number in numbers if number != signal.SIGHUP or not ignored]
    previous = {number: signal.signal(number, handler) for number in answered}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def stop_requests(
    *, handles_signals: bool, limit: float | None = None, begun: float | None = None
) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after a signal, or when `limit` seconds are nearly over.

    `limit` counts from `begun`, a time of the monotonic clock, or from now. If `handles_signals`,
    the first request prints a line. The second request raises KeyboardInterrupt, except in workers
    of start_workers: their launcher may pass on a signal that they got too, and kills them itself.
    """
    requests = Requests()
    launched = LAUNCHER in os.environ

    def add(*_: object) -> None:
        first = not requests.any
        requests.add()
        if first and handles_signals:
            say_heard()
        if requests.again and not launched:
            raise KeyboardInterrupt

    with answering(add, *STOPS):
        longest, last = 0.0, time.monotonic()
        end = math.inf if limit is None else (last if begun is None else begun) + limit

        def wants_stop() -> bool:
            """Return True, at the end too, less 1.5 of the longest time between two calls."""
            nonlocal longest, last
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            return now + 1.5 * longest > end or requests.any

        yield wants_stop


def noting_requests() -> Callable[[], bool]:
    """Return a function that returns True after a request from now on, whoever takes it.

    A run handles requests until its last update; a series of runs needs the later ones too.
    """
    begun = time.monotonic()
    return lambda: Requests.latest > begun


def describe_saved(folder: Path) -> str:
    """Describe the newest checkpoint of a run folder."""
    from largebatch.tracking.events import CHECKPOINTS  # pydantic's models of all events

    newest = max((folder / CHECKPOINTS).glob("step-*.safetensors"), default=None)
    if newest is None:
        return "nothing is saved"
    return f"saved is {newest}, after {int(newest.stem.removeprefix('step-')):,} steps"

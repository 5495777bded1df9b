"""Requests to stop, answered in one place for workers, runs and commands.

They come as SIGINT (Ctrl-C), SIGTERM, SIGUSR1 (SLURM's warning) and SIGHUP (a terminal that is
closed), often to every process of a group at once and again from the process that started it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from largebatch.distributed.environment import LAUNCHER
from largebatch.tracking.events import CHECKPOINTS

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
HEARD = b"stopping after this step; once more stops at once\n"

TOGETHER_SECONDS = 1.0
"""Signals that come within this time of the first one are the same request."""

_SHOW_CURSOR = b"\x1b[?25h"


class Requests:
    """Counts requests to stop."""

    def __init__(self) -> None:
        self._first: float | None = None
        self.again = False
        """Whether there was a second one."""

    @property
    def any(self) -> bool:
        """Whether there was one."""
        return self._first is not None

    def add(self) -> None:
        """Count a signal."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
        self.again = self.again or now - self._first > TOGETHER_SECONDS


@contextmanager
def answering(handler: Callable[..., object], *numbers: signal.Signals) -> Iterator[None]:
    """Answer these signals with a function meanwhile; SIGHUP only where it is not ignored (nohup).

    They reach only a program's main thread; in others this does nothing.
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
def stop_requests(*, heard: bool) -> Iterator[Callable[[], bool]]:
    """Yield whether a signal has asked for a stop; the second request raises KeyboardInterrupt.

    `heard`: the first one is answered by a line on the terminal. What start_workers started has no
    second one: its launcher, which may pass on what the worker got as well, kills it then.
    """
    requests = Requests()
    launched = LAUNCHER in os.environ

    def add(*_: object) -> None:
        first = not requests.any
        requests.add()
        if first and heard:  # by the system's own call: a stream may be in the middle of a line
            os.write(2, HEARD)
        if requests.again and not launched:
            raise KeyboardInterrupt

    with answering(add, *STOPS):
        yield lambda: requests.any


def describe_saved(folder: Path) -> str:
    """Return which checkpoint of a run folder is the newest.

    >>> describe_saved(Path("no such folder"))
    'nothing is saved'
    """
    newest = max((folder / CHECKPOINTS).glob("step-*.pt"), default=None)
    if newest is None:
        return "nothing is saved"
    return f"saved is {newest}, after {int(newest.stem.removeprefix('step-')):,} steps"


def show_cursor() -> None:
    """Show a terminal's cursor again, which a progress bar that was killed has left hidden."""
    for stream in (1, 2):
        if os.isatty(stream):
            os.write(stream, _SHOW_CURSOR)
            return

"""Requests to stop: SIGINT and SIGTERM, answered in one place for workers, runs and commands."""

import os
import signal
import threading
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
def stop_requests(*, heard: bool) -> Iterator[Callable[[], bool]]:
    """Yield whether SIGINT or SIGTERM has asked for a stop; the second one acts at once.

    `heard`: the first one is answered by a line on the terminal.
    """
    asked = threading.Event()
    previous = {number: signal.getsignal(number) for number in STOPS}

    def ask(number: int, _: object) -> None:
        asked.set()
        signal.signal(number, previous[signal.Signals(number)])
        if heard:  # by the system's own call: a stream may be in the middle of a line
            os.write(2, HEARD)

    with answering(ask, *STOPS):
        yield asked.is_set

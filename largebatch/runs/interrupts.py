"""StopRequests to stop, handled in one place for workers, runs and commands.

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
from typing import TYPE_CHECKING

from largebatch.distributed.environment import LAUNCHER
from largebatch.formatting import duration, plural

if TYPE_CHECKING:
    from largebatch.tracking.events import StopCause

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
CTRL_C = signal.SIGUSR2
"""Signal by which the launcher passes Ctrl-C on: SIGINT would print a traceback of a worker that
still imports, and SIGTERM would hide who stopped the run."""

CAUSES: "dict[int, StopCause]" = {
    signal.SIGINT: "SIGINT",
    CTRL_C: "SIGINT",
    signal.SIGTERM: "SIGTERM",
    signal.SIGUSR1: "SIGUSR1",
    signal.SIGHUP: "SIGHUP",
}

SCHEDULERS = {
    "SLURM_JOB_ID": "SLURM",
    "PBS_JOBID": "PBS",
    "LSB_JOBID": "LSF",
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
}
"""Schedulers by a variable that they set in their jobs."""

STOPPING = b"stopping; once more stops at once\n"

TOGETHER_SECONDS = 1.0
"""Signals within this time of the first one count as the same request."""


def print_stopping() -> None:
    """Print STOPPING, if the terminal is still open: its end is a request, too."""
    with suppress(OSError):
        os.write(2, STOPPING)  # a stream may be in the middle of a line


class InterruptedStudyError(Exception):
    """A run of several was requested to stop and has saved; the same call resumes it."""


class StopRequests:
    """Counts requests to stop."""

    latest = -math.inf
    """Time of the last request that any of these was given, by the monotonic clock."""

    def __init__(self) -> None:
        self._first: float | None = None
        self.number = 0
        """The first signal; 0 without one."""

        self.again = False
        """True after a second request."""

    @property
    def any(self) -> bool:
        """True after the first request."""
        return self._first is not None

    def add(self, number: int = signal.SIGINT) -> None:
        """Count a signal."""
        now = StopRequests.latest = time.monotonic()
        if self._first is None:
            self._first = now
            self.number = number
        self.again = self.again or now - self._first > TOGETHER_SECONDS


@contextmanager
def answering(handler: Callable[..., object], *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals by a function inside the block; SIGHUP unless it is ignored (nohup).

    Signals reach only a program's main thread; in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # nohup has the run outlive its terminal, so SIGHUP stays ignored.
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
) -> Iterator[Callable[[], "StopCause | None"]]:
    """Yield a function that returns the cause after a signal, or when `limit` seconds nearly end.

    `limit` counts from `begun`, a time of the monotonic clock, or from now. If `handles_signals`,
    the first request prints a line. The second request raises KeyboardInterrupt, except in workers
    of start_workers: their launcher may pass on a signal that they got too, and kills them itself.
    """
    requests = StopRequests()
    launched = LAUNCHER in os.environ

    def add(number: int, *_: object) -> None:
        first = not requests.any
        requests.add(number)
        if first and handles_signals:
            print_stopping()
        if requests.again and not launched:
            raise KeyboardInterrupt

    with answering(add, *STOPS, *([CTRL_C] if launched else [])):
        longest = 0.0
        last = time.monotonic()
        end = math.inf if limit is None else (last if begun is None else begun) + limit

        def wants_stop() -> "StopCause | None":
            """Return the cause; the limit's comes 1.5 of the longest time between calls before."""
            nonlocal longest, last
            # Between two calls is an update, with an evaluation or a checkpoint if one is due. The
            # longest may come before the next call; half of it is left for the last checkpoint.
            now = time.monotonic()
            longest = max(longest, now - last)
            last = now
            if requests.any:
                return CAUSES[requests.number]
            return "time limit" if now + 1.5 * longest > end else None

        yield wants_stop


def scheduler() -> str | None:
    """Return the name of the scheduler that this process is a job of; None without one."""
    return next((name for variable, name in SCHEDULERS.items() if variable in os.environ), None)


def describe_cause(cause: "StopCause", *, limit: float | None, used: float) -> str:
    """Describe why a run was stopped; `used` seconds of its time limit were over."""
    manager = scheduler()
    if cause == "time limit":
        limit = limit or 0.0
        shown = duration(limit) if limit >= 120 else f"{limit:g} s"
        return (
            f"--time-limit {shown}, of which {duration(used)} were over: the next "
            "update might have ended later"
        )
    if cause == "SIGINT":
        return "Ctrl-C (SIGINT)"
    if cause == "SIGHUP":
        return "SIGHUP: its terminal was closed"
    if manager is not None:
        return f"{cause} under {manager}: preemption, or the end of the job's time"
    return f"{cause}, sent by another process"


def noting_requests() -> Callable[[], bool]:
    """Return a function that returns True after a request from now on, whoever takes it.

    A run handles requests until its last update; a series of runs needs the later ones too.
    """
    start = time.monotonic()
    return lambda: StopRequests.latest > start


def describe_saved(folder: Path) -> str:
    """Describe the newest checkpoint of a run folder."""
    from largebatch.tracking.events import CHECKPOINTS  # pydantic's models of all events

    newest = max((folder / CHECKPOINTS).glob("step-*.safetensors"), default=None)
    if newest is None:
        return "nothing is saved"
    return f"saved is {newest}, after {plural(int(newest.stem.removeprefix('step-')), 'step')}"

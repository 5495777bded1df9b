"""Owners of trials: which process works on a trial, and whether it is alive.

A process writes a heartbeat into its trial. Another process that sees the same heartbeat for too
long, on its own clock, treats the owner as gone; the clocks of machines need not agree. On the
same machine an owner whose process no longer exists is gone at once.
"""

import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna

_LOG = logging.getLogger(__name__)

OWNER = "owner"
"""Name of the attribute of trials."""

BEAT_SECONDS = 15.0
GRACE_SECONDS = 180.0
"""Seconds without a heartbeat after which a process on another machine is gone."""


class Owners:
    """What this process has seen of other owners."""

    def __init__(
        self, *, parent: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Remember `parent`, the process that this one stops with."""
        self.parent, self._clock = parent, clock
        self._seen: dict[Hashable, tuple[tuple[object, ...], float]] = {}

    def own(self, *, beat: int) -> dict[str, object]:
        """Return the heartbeat that this process writes into its trial."""
        return {
            "host": platform.node(), "numbers": _numbers(), "process": os.getpid(), "beat": beat,
        }  # fmt: skip

    def is_gone(self, trial: Hashable, attributes: Mapping[str, Any]) -> bool:
        """Return True if a running trial has lost its process.

        A trial of this process counts as lost, because the process runs none while it asks.
        """
        owner = attributes.get(OWNER, {})
        here = owner.get("host") == platform.node() and owner.get("numbers") == _numbers()
        if here and not _lives_elsewhere(owner["process"]):
            return True
        now, beat = self._clock(), tuple(owner.values())
        seen, since = self._seen.get(trial, (None, now))
        if seen != beat:
            self._seen[trial] = beat, now
            return False
        return now - since > GRACE_SECONDS


@cache
def _numbers() -> str:
    """Return an id of this process's PID namespace, as far as the system has one.

    Containers may share the name of their host, and machines may have the same name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _lives_elsewhere(process: int) -> bool:
    if process == os.getpid():  # a container starts its processes with the same numbers again
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


@contextmanager
def beating(trial: "optuna.Trial", owners: Owners) -> Iterator[None]:
    """Write heartbeats in the background; if the parent is gone, ask this process to stop."""
    ended = threading.Event()

    def beat() -> None:
        for number in range(1, 2**63):
            if ended.wait(BEAT_SECONDS):
                return
            if owners.parent not in {None, os.getppid()}:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                trial.set_user_attr(OWNER, owners.own(beat=number))
            except Exception as error:  # the run continues; its result matters more
                _LOG.warning("the storage was not told that a trial is under way: %s", error)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

"""Which process works on a trial, and whether it still does.

A process writes a beat into its trial now and then. Another one that sees the same beat for long
takes the process for gone, by its own clock: the machines' need not agree. On the same machine a
process that does not exist any more is gone at once.
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

BEAT_SECONDS = 15.0
GRACE_SECONDS = 180.0
"""Without a beat, a process on another machine is gone."""


class Owners:
    """What this process has seen of the others."""

    def __init__(
        self, *, parent: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`parent` is the process without which this one is to stop."""
        self.parent, self._clock = parent, clock
        self._seen: dict[Hashable, tuple[tuple[object, ...], float]] = {}

    def own(self, *, beat: int) -> dict[str, object]:
        """Return what this process writes into its trial."""
        return {
            "host": platform.node(), "numbers": _numbers(), "process": os.getpid(), "beat": beat,
        }  # fmt: skip

    def is_gone(self, trial: Hashable, attributes: Mapping[str, Any]) -> bool:
        """Return whether a running trial has lost its process.

        This process itself has none when it asks.
        """
        owner = attributes.get("owner", {})
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
    """Return whose process numbers are those of this process, as far as the system tells.

    Containers may share the name of their host, and machines one name.
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
    """Beat meanwhile; where the parent is gone, ask this process to stop."""
    ended = threading.Event()

    def beat() -> None:
        for number in range(1, 2**63):
            if ended.wait(BEAT_SECONDS):
                return
            if owners.parent not in {None, os.getppid()}:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                trial.set_user_attr("owner", owners.own(beat=number))
            except Exception as error:  # the run goes on; its result is what counts
                _LOG.warning("the storage was not told that a trial is under way: %s", error)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

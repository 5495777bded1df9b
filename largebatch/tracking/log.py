"""log.jsonl, and the delivery of events to every tracker."""

import fcntl
import logging
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from largebatch.errors import CheckpointError, LogError, reason_of
from largebatch.tracking.events import EVENTS, Event, Finish, Note, Start, Tracker

_LOG = logging.getLogger(__name__)


class Clock:
    """Base of Trackers that time a run: they get a start last, and everything else first."""


class JsonLines:
    """A Tracker that appends each record at once, so that a killed run leaves everything.

    The file is locked while open, also between hosts: a run folder has one owner. The system
    unlocks it when the process ends. Raises CheckpointError if another process holds it, or if a
    new run finds records.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path = path
        with ExitStack() as opened:
            # Without a buffer: what is recorded is the system's, whatever then happens to this
            # process.
            self._file = opened.enter_context(path.open("ab", buffering=0))
            try:
                _lock(self._file, path)
            except OSError as error:
                _LOG.warning(
                    "%s: cannot be locked (%s); make sure that no other run writes to it",
                    path.parent, error.strerror,
                )  # fmt: skip
            if not resume and os.fstat(self._file.fileno()).st_size:
                raise CheckpointError(
                    f"{path.parent}: another run has started here; choose another --out"
                )
            drop_unfinished_line(path)
            self._opened = opened.pop_all()  # until `close`

    def record(self, event: Event) -> None:
        """Append one line; raise LogError if it cannot be written whole."""
        line = EVENTS.dump_json(event) + b"\n"
        size = os.fstat(self._file.fileno()).st_size
        try:
            whole = self._file.write(line) == len(line)
            reason = "no space left on the device"
        except OSError as error:
            whole = False
            reason = str(error.strerror)
        if not whole:
            # A line cut in two would make the rest of the log unreadable after a resume.
            os.ftruncate(self._file.fileno(), size)
            raise LogError(
                f"{self._path}: cannot be written: {reason}; free space and continue with --resume"
            )

    def close(self) -> None:
        """Close the file and unlock the folder for other processes."""
        self._opened.close()


def require_unlocked(path: Path) -> None:
    """Raise CheckpointError if another process has this log open."""
    with suppress(OSError), path.open("rb") as file:
        _lock(file, path)


def _lock(file: IO[bytes], path: Path) -> None:
    """Lock an open file; OSError if its file system has no locks."""
    try:
        # flock belongs to the open file and not to the process: a second run in this process is
        # refused too, and closing another file of the same path does not unlock it.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"{path.parent}: another run is writing to this folder; wait for its end or choose "
            "another --out"
        ) from None


def record(trackers: list[Tracker], event: Event) -> None:
    """Send an event to every tracker; remove one that fails from the list, with a note.

    The run's own log is an exception: without it there is no report. It gets a finish last, after
    such notes.
    """
    for tracker in sorted(trackers, key=lambda tracker: _turn(tracker, event)):
        if tracker not in trackers:  # disabled by an error in an earlier note
            continue
        try:
            tracker.record(event)
        except Exception as error:
            if isinstance(tracker, JsonLines):
                raise
            trackers.remove(tracker)
            name = type(tracker).__name__
            text = f"{name} was disabled after an error: {reason_of(error)}"
            stage: Any = getattr(event, "stage", "train")
            step = getattr(event, "step", 0)
            record(trackers, Note(kind="tracker", stage=stage, step=step, text=text))


def _turn(tracker: Tracker, event: Event) -> int:
    """Return the order in which trackers receive an event: -1 first, 1 last."""
    # What other trackers take, such as seconds of a server, is not counted: the clock starts after
    # them and stops before them.
    if isinstance(tracker, Clock):
        return 1 if isinstance(event, Start) else -1
    return int(isinstance(event, Finish) and isinstance(tracker, JsonLines))


def last_event(path: Path) -> Event | None:
    """Return the last event of a log; None if its last line is none."""
    *_, line = [b"", *path.read_bytes().splitlines()]
    with suppress(ValidationError):
        return EVENTS.validate_json(line)
    return None


def drop_unfinished_line(path: Path) -> None:
    """Cut off the incomplete last line of a run that was killed while writing."""
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)

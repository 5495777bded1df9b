"""log.jsonl, and the delivery of events to every tracker."""

import fcntl
import logging
import os
from contextlib import ExitStack
from pathlib import Path

from largebatch.errors import CheckpointError, LogError, reason_of
from largebatch.tracking.events import EVENTS, Event, Finish, Note, StageName, Start, Tracker

_LOG = logging.getLogger(__name__)

_PIECE = 2**16
"""Bytes read at a time when searching for the last end of a line."""


class Clock:
    """Base of Trackers that time a run, so that other trackers' work is not in their times.

    They receive a start after all other trackers, and everything else before them.
    """


class JsonLines:
    """A Tracker that appends each record at once, so that a killed run leaves everything.

    The file and its folder are locked while open: a run folder has one owner. The folder's lock
    holds even if another file replaces the log, and the file's lock works between hosts, because
    NFS keeps it on the server. The system releases both when the process ends. Raises
    CheckpointError if another process holds the file, or if a new run finds records.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path, self._absolute = path, path.absolute()
        with ExitStack() as opened:
            folder = os.open(path.parent, os.O_RDONLY)
            opened.callback(os.close, folder)
            self._file = opened.enter_context(path.open("ab", buffering=0))
            _lock(path.parent, folder, self._file.fileno())
            if not resume and os.fstat(self._file.fileno()).st_size:
                raise CheckpointError(
                    f"{path.parent}: another run has started here; choose another --out"
                )
            drop_unfinished_line(path)
            self._opened = opened.pop_all()  # until `close`

    def record(self, event: Event) -> None:
        """Append one line.

        Raises LogError if it cannot be written whole.
        """
        line = EVENTS.dump_json(event) + b"\n"
        before = os.fstat(self._file.fileno())
        self._require_in_place(before)
        try:
            whole, reason = self._file.write(line) == len(line), "no space left on the device"
        except OSError as error:
            whole, reason = False, str(error.strerror)
        if not whole:
            os.ftruncate(self._file.fileno(), before.st_size)
            raise LogError(
                f"{self._path}: cannot be written: {reason}; free space and continue with --resume"
            )

    def _require_in_place(self, own: os.stat_result) -> None:
        """Raise LogError unless this file is still the one at its path."""
        try:
            there = self._absolute.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise LogError(
                f"{self._path}: was removed or moved while the run wrote to it"
            ) from None
        except OSError as error:
            raise LogError(
                f"{self._path}: cannot be reached: {error.strerror}; continue with --resume"
            ) from error
        if not os.path.samestat(there, own):
            raise LogError(
                f"{self._path}: was replaced by another file while the run wrote to it; put back "
                "the one that was there, or resume without the records that it alone has"
            )

    def close(self) -> None:
        """Close the file and unlock the folder for other processes."""
        self._opened.close()


def record(trackers: list[Tracker], event: Event) -> None:
    """Send an event to every tracker; remove one that fails from the list, with a note.

    A run does not end because a tracker does. The run's own log is an exception: without
    log.jsonl there is no report. At a finish the log comes last, so that it holds such notes
    too.
    """
    for tracker in sorted(trackers, key=lambda each: _turn(each, event)):
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
            record(trackers, _note_at(event, text))


def _turn(tracker: Tracker, event: Event) -> int:
    """Return the order in which trackers receive an event: -1 first, 1 last."""
    if isinstance(tracker, Clock):
        return 1 if isinstance(event, Start) else -1
    return int(isinstance(event, Finish) and isinstance(tracker, JsonLines))


def _note_at(event: Event, text: str) -> Note:
    stage: StageName
    match event:
        case Start():
            stage, step = "train", event.resume_step
        case Finish():
            stages = event.summary.stages
            stage, step = stages[-1].name if stages else "train", event.summary.steps
        case _:
            stage, step = event.stage, event.step
    return Note(kind="tracker", stage=stage, step=step, text=text)


def _lock(folder: Path, *descriptors: int) -> None:
    """Lock an open file or folder; log a warning if the file system has no locks.

    NFS has none for a folder, only for a file that is open for writing.
    """
    reasons = []
    for descriptor in descriptors:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{folder}: another run is writing to this folder; wait for its end or choose "
                "another --out"
            ) from None
        except OSError as error:
            reasons.append(error.strerror)
    if len(reasons) == len(descriptors):
        _LOG.warning(
            "%s: cannot be locked (%s); make sure that no other run writes to it",
            folder,
            reasons[-1],
        )


def drop_unfinished_line(path: Path) -> None:
    """Cut off the incomplete last line of a run that was killed while writing.

    No other byte is changed, so a kill here loses nothing.
    """
    with path.open("rb") as file:
        size = end = file.seek(0, os.SEEK_END)
        found = -1
        while end and found < 0:
            start = max(0, end - _PIECE)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            end = start + found + 1
    if end < size:
        os.truncate(path, end)

"""Bounds of the waits of an audited script: its workers may raise, sleep or leave at any place.

A worker that fails leaves the others in a sum, for as long as the process group waits. A thread of
each worker sees how long ago its script or its audit made progress, and what other workers write
into the store of the process group. When the time is over, all of them print where they are, and
exit; the one that the others wait for exits first, so that its error is the one that is reported.
"""

import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from largebatch.distributed.environment import LAUNCHER, own_rank
from largebatch.errors import printable
from largebatch.runs.launch import USER, leave_with_error

_LATE = "largebatch_audit_late"
"""Key of the store, set by a worker whose time is over."""

_FAILED = "largebatch_audit_failed"
"""Key of the store, set by a worker whose script has failed."""

_AFTER_ERROR = 10.0
"""Seconds without progress after which workers leave if the script of another one has failed."""

_GRACE = 3.0
"""Seconds that a worker which waits for others leaves after them."""

_PERIOD = 0.2  # seconds between two looks at the store

_WAITING = ("torch.distributed", "torch.nn.parallel", "torch.autograd", "horovod")
"""Packages in which a worker waits for the sums of others, beside this one's backends."""


class Watchdog:
    """A thread that ends this worker when its script or its audit makes no progress."""

    def __init__(self, path: Path, timeout: float) -> None:
        self.path = path
        self.timeout = timeout
        self.thread_of_audit: threading.Thread | None = None
        """The thread of the audit, while the script waits for it; None while the script runs."""

        self._main = threading.main_thread()
        self._is_audited = False
        self._error: str | None = None
        self._since = time.monotonic()
        self._is_stopped = threading.Event()
        self._store: Any = None

    def start(self) -> None:
        """Watch from now on; a wait counts from the script's first update."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._is_stopped.set()

    def begin(self) -> None:
        """Bound the waits of this worker from now on: its audit begins."""
        self._is_audited = True
        self.progress()

    def progress(self) -> None:
        """Count the time from now on."""
        self._since = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """Print the script's error at once: others may not take part in what reports it."""
        place = ""
        for frame, line in traceback.walk_tb(error.__traceback__):
            if self._is_of_script(frame):
                place = f"{Path(frame.f_code.co_filename).name}, line {line}: "
        self._error = f"{place}{type(error).__name__}: {error}"
        _print(f"worker {own_rank()} failed: {self._error}")
        self._set(_FAILED, str(own_rank()))

    def end(self, what: str) -> None:
        """Bound the waits of the others: this worker's script has ended, perhaps as theirs."""
        if self._is_audited:
            self._error = what
            self._set(_FAILED, str(own_rank()))

    def _watch(self) -> None:
        waited: tuple[object, int, float] | None = None
        while not self._is_stopped.wait(_PERIOD):
            now = time.monotonic()
            limit = min(self.timeout, _AFTER_ERROR) if self._read(_FAILED) else self.timeout
            if self._is_audited and now - self._since > limit:
                self._set(_LATE, "audit")
                self._leave(f"made no progress in {limit:g} s of the audit", is_reason=False)
            if late := self._read(_LATE):
                is_reason = late == "audit" and not self._is_audited
                what = "made no progress in the audit"
                if not self._is_audited:
                    what = f"made no update while another worker waited {self.timeout:g} s or more"
                self._leave(what, is_reason=is_reason)
            if self._is_audited:
                continue
            # The script is before its first update: only a wait in one call counts.
            frame = self._frame()
            if frame is None or not _waits_for_others(frame):
                waited = None
            # The same instruction of the same frame: a loop that waits again has moved on.
            elif waited is None or waited[:2] != (frame, frame.f_lasti):
                waited = (frame, frame.f_lasti, now)
            elif now - waited[2] > limit:
                self._set(_LATE, "start")
                what = f"waited {limit:g} s before its first update"
                self._leave(what, is_reason=False)

    def _frame(self) -> FrameType | None:
        """Return the innermost frame of the script, or of its audit while the script waits."""
        thread = self.thread_of_audit or self._main
        return sys._current_frames().get(thread.ident or 0)

    def _leave(self, what: str, *, is_reason: bool) -> NoReturn:
        """Print where this worker is, and exit; at once if others wait for it."""
        frame = self._frame()
        waits = _waits_for_others(frame) and not is_reason and self._error is None
        place = self._place_of(frame)
        text = f"worker {own_rank()} {what}"
        if self._error is not None:
            text = f"worker {own_rank()} failed: {self._error}"
        elif waits:
            text += "; it waits for others" + f" at {place}" * bool(place)
        else:
            text += f"; it is at {place}" * bool(place) + "; a larger --timeout waits longer"
        _print(text + self._stack_of(frame))
        if waits:
            # What it prints from here on follows from the exit of the others.
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            time.sleep(_GRACE)
        _leave_with(f"{self.path}: {text}")

    def _stack_of(self, frame: FrameType | None) -> str:
        """Format the stack from the script's first frame on; the audit's own is of no use."""
        if frame is None or self.thread_of_audit is not None:
            return ""
        frames = list(traceback.walk_stack(frame))[::-1]
        of_script = [place for place, (it, _) in enumerate(frames) if self._is_of_script(it)]
        stack = traceback.StackSummary.extract(iter(frames[of_script[0] if of_script else 0 :]))
        return "; its stack:\n" + "".join(stack.format()).rstrip()

    def _place_of(self, frame: FrameType | None) -> str:
        """Return the innermost line of the script's own files in a stack."""
        while frame is not None and not self._is_of_script(frame):
            frame = frame.f_back
        if frame is None:
            return ""
        code = frame.f_code
        return f"{Path(code.co_filename).name}, line {frame.f_lineno}, in {code.co_name}"

    def _is_of_script(self, frame: FrameType) -> bool:
        name = frame.f_code.co_filename
        is_file = not name.startswith("<")  # as "<frozen runpy>", which has no folder
        return is_file and Path(name).resolve().parent == self.path.resolve().parent

    def _open_store(self) -> Any:  # noqa: ANN401 -- torch's stores
        """Return a connection of this thread to the process group's store; None without one."""
        if self._store is None and dist.is_available() and dist.is_initialized():
            store: Any = dist.distributed_c10d._get_default_store()
            # The script's thread may block in a call of its own connection.
            try:
                self._store = store.clone()
            except (RuntimeError, NotImplementedError, AttributeError):  # of another kind
                self._store = store
        return self._store

    def _read(self, key: str) -> str:
        """Return what some worker has set; empty if none has, or if no worker can be reached."""
        try:
            store = self._open_store()
            return store.get(key).decode() if store is not None and store.check([key]) else ""
        except (RuntimeError, ValueError):  # worker 0, which has it, or the group has ended
            return ""

    def _set(self, key: str, value: str) -> None:
        try:
            store = self._open_store()
            if store is not None:
                store.set(key, value)
        except (RuntimeError, ValueError):
            return


def leave_before_the_audit(path: Path, how: str) -> NoReturn:
    """End this process, whose script ends it by itself before its updates are audited."""
    message = f"{path}: it ended by {how} before its first updates were audited"
    _print(f"worker {own_rank()}: {message}")
    _leave_with(message)


def _leave_with(message: str) -> NoReturn:
    if LAUNCHER in os.environ:
        leave_with_error(USER, message)
    sys.stdout.flush()
    os._exit(USER)


def _waits_for_others(frame: FrameType | None) -> bool:
    """Return True if the innermost function of a stack is one that waits for other workers."""
    if frame is None:
        return False
    module = str(frame.f_globals.get("__name__"))
    return module.startswith((*_WAITING, "largebatch.distributed"))


def _print(text: str) -> None:
    lines = "\n".join(printable(line) for line in text.splitlines())
    sys.stderr.write(f"largebatch: {lines}\n")
    sys.stderr.flush()

"""torch's Flight Recorder: what a worker had started when the run began to hang.

The recorder is a ring in the memory of each process: the last collectives of every process group
with their number, sizes and state. A thread of each worker follows it. Shortly before the timeout
of the process group is over, it writes the ring to the run folder and makes the others write
theirs, because a dump of one worker does not show which other one is missing. NCCL's own dump comes
later, on the way to the end of the process, and is a pickle, which can run code where it is read;
this one is JSON.

The workers agree through the store of the process group, which works while a collective hangs. A
worker whose process is stopped, or that holds Python's lock, writes nothing, and that is told too.
"""

import json
import math
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from largebatch.errors import printable
from largebatch.storage import write_whole

PART_OF_TIMEOUT = 0.9
"""Part of the timeout without progress after which dumps are written. The rest is for writing: at
its end Gloo raises an error and NCCL aborts the process."""

GRACE_SECONDS = 8.0
"""Seconds that the first worker waits for the dumps of the others; more than `LONGEST_PERIOD`."""

LONGEST_PERIOD = 5.0
"""Seconds between two looks at recorder and store: of 2,048 workers 400 requests a second."""

KEPT = 64
"""Number of the last entries that a dump keeps, besides those that have not ended: 2,048 dumps of
the whole ring would be gigabytes."""

HEADER = "largebatch"
"""Key of a dump that torch's own does not have: about the worker that wrote it."""

_SHOWN_FRAMES = 20  # innermost frames of the main thread that a dump has
_EVENT = "hang/event"  # keys of the store: name of the folder of the dumps, ...
_DUMPED = "hang/dumped"  # ... number of workers that have written theirs, ...
_FIRST = "hang/first"  # ... number of workers that were ready to read all of them, ...
_LINE = "hang/line"  # ... and what the first one found

_PACKAGE = Path(__file__).parent.parent


def recorder_variables(version: str) -> dict[str, str]:
    """Return the variables that make this version of torch record, and NCCL wait for the dumps.

    >>> recorder_variables("2.8.0+cu128")["TORCH_NCCL_TRACE_BUFFER_SIZE"]
    '2000'
    >>> "TORCH_NCCL_TRACE_BUFFER_SIZE" in recorder_variables("2.13.0")
    False
    """
    variables = {
        "TORCH_FR_BUFFER_SIZE": "2000",  # collectives, of all groups
        # Without it NCCL's watchdog aborts at once, and other workers do not hear of the timeout.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # Events before each collective: they show a GPU that has not begun one.
        "TORCH_NCCL_ENABLE_TIMING": "1",
    }
    numbers = re.match(r"(\d+)\.(\d+)", version)
    assert numbers is not None
    if (int(numbers[1]), int(numbers[2])) < (2, 9):
        variables["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "2000"
    return variables


def enable_recorder() -> None:
    """Set the variables of the recorder, unless the user has; call this before the first group."""
    for name, value in recorder_variables(torch.__version__).items():
        os.environ.setdefault(name, value)


def recorded(*, collectives: bool) -> dict[str, Any]:
    """Return the content of the recorder, as torch's JSON has it; empty without a recorder."""
    # Of all libraries from torch 2.8, else of NCCL alone.
    dump = getattr(c10d, "_dump_fr_trace_json", getattr(c10d, "_dump_nccl_trace_json", None))
    if dump is None:
        return {}
    content: dict[str, Any] = json.loads(dump(includeCollectives=collectives, onlyActive=False))
    return content


class Stall:
    """Measures how long no collective has ended while one is waited for."""

    def __init__(self) -> None:
        self._ended: dict[str, int] = {}
        self._since: dict[str, float] = {}

    def seconds(self, status: Mapping[str, Mapping[str, str]], now: float) -> float:
        """Return the longest such time of a process group, from the recorder's `pg_status`.

        >>> stall = Stall()
        >>> waiting = {"0": {"last_enqueued_collective": "7", "last_completed_collective": "6"}}
        >>> stall.seconds(waiting, 100.0), stall.seconds(waiting, 130.0)
        (0.0, 30.0)
        """
        longest = 0.0
        for group, numbers in status.items():
            ended = int(numbers["last_completed_collective"])
            waits = int(numbers["last_enqueued_collective"]) > ended
            if not waits or self._ended.get(group) != ended:
                self._ended[group] = ended
                self._since[group] = now
            longest = max(longest, now - self._since[group])
        return longest


class HangWatch:
    """A thread that writes a dump when this worker, or another one, is about to time out.

    Dumps are written to `folder`/TIME/worker-RANK.json. `timeout` returns the present timeout of
    the process groups in seconds, `describe` what a dump has about this worker besides its stack.
    `explain` is called on one worker, with the folder of the dumps and the hosts of the workers
    that wrote none, and returns in one line what the dumps show.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        timeout: Callable[[], float],
        describe: Callable[[], dict[str, Any]],
        explain: Callable[[Path, dict[int, str]], str],
    ) -> None:
        self._store = store
        self._folder = folder
        self._timeout = timeout
        self._describe = describe
        self._explain = explain
        self._rank = dist.get_rank()
        self._workers = dist.get_world_size()
        self._waited = 0.0
        self._dump_time = math.inf
        self._main = threading.main_thread().ident or 0
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="hang watch", daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        self._store.set(f"hang/host/{self._rank}", socket.gethostname())
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._is_stopped.set()
        # Python ends a process badly while a thread is in a library. Not longer: the process that
        # serves the store may have ended, or this thread waits for the dumps of others.
        self._thread.join(LONGEST_PERIOD)

    def line(self) -> str:
        """Return what the dumps show after an error of this worker; empty if it was no timeout.

        Waits for the worker that reads all dumps.
        """
        with suppress(RuntimeError):  # the store has ended with the process that served it
            if not self._store.check([_EVENT]):
                return ""
            if time.monotonic() - self._dump_time > self._timeout():
                return ""  # that collective ended in the last moment, and this error is another one
            end = time.monotonic() + GRACE_SECONDS + LONGEST_PERIOD
            while time.monotonic() < end:
                if self._store.check([_LINE]):
                    return self._store.get(_LINE).decode()
                time.sleep(0.1)
        return ""

    def _follow(self) -> None:
        stall = Stall()
        with suppress(RuntimeError):
            while not self._is_stopped.wait(min(LONGEST_PERIOD, self._timeout() / 40)):
                self._waited = stall.seconds(
                    recorded(collectives=False).get("pg_status", {}), time.monotonic()
                )
                is_late = self._waited >= PART_OF_TIMEOUT * self._timeout()
                if is_late or self._store.check([_EVENT]):
                    self._dump()
                    if is_late and self._store.add(_FIRST, 1) == 1:
                        self._report()
                    return

    def _dump(self) -> None:
        """Write this worker's dump into the folder that the first worker has named."""
        self._dump_time = time.monotonic()
        own_name = time.strftime("%Y%m%d-%H%M%S")
        name = self._store.compare_set(_EVENT, "", own_name).decode()
        content = recorded(collectives=True)
        entries = content.get("entries", [])
        running = [entry for entry in entries[:-KEPT] if not entry["retired"]]
        content["entries"] = [*running, *entries[-KEPT:]]
        content[HEADER] = {
            "worker": self._rank,
            "workers": self._workers,
            "host": socket.gethostname(),
            "seconds": round(self._waited, 1),
            "stack": self._stack(),
            **self._describe(),
        }
        path = self._folder / name / f"worker-{self._rank:05}.json"
        try:
            write_whole(path, json.dumps(content).encode())
        except OSError as error:
            _print(f"{path}: the dump of the collectives was not written: {error.strerror}")
        self._store.set(f"hang/dumped/{self._rank}", "")
        self._store.add(_DUMPED, 1)

    def _stack(self) -> list[str]:
        """Return the innermost frames of the main thread, the innermost one first."""
        innermost = sys._current_frames().get(self._main)
        frames = islice(traceback.walk_stack(innermost), _SHOWN_FRAMES)
        return [
            f"{_short(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
            for frame, line in frames
        ]

    def _report(self) -> None:
        """Wait for the dumps of the others, and print what all of them show."""
        folder = self._folder / self._store.get(_EVENT).decode()
        end = time.monotonic() + GRACE_SECONDS
        while self._store.add(_DUMPED, 0) < self._workers and time.monotonic() < end:
            time.sleep(0.1)
        silent = []
        if self._store.add(_DUMPED, 0) < self._workers:
            # Not by their files, which a network file system may show later.
            ranks = range(self._workers)
            silent = [rank for rank in ranks if not self._store.check([f"hang/dumped/{rank}"])]
        hosts = self._store.multi_get([f"hang/host/{rank}" for rank in silent]) if silent else []
        named = {rank: host.decode() for rank, host in zip(silent, hosts, strict=True)}
        line = f"{self._explain(folder, named)} (dumps: {folder})"
        self._store.set(_LINE, line)
        _print(line)


def _short(path: str) -> str:
    """Return the path of a file of this package below it, of another file its name."""
    place = Path(path)
    if place.is_relative_to(_PACKAGE):
        return place.relative_to(_PACKAGE).as_posix()
    return place.name


def _print(text: str) -> None:
    with suppress(OSError):  # of a closed terminal
        sys.stderr.write(f"largebatch: {printable(text)}\n")
        sys.stderr.flush()

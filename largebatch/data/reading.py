"""The bytes of encoded pictures: read ahead by threads, again where a read fails or hangs.

Pictures lie on disks and networks that fail or stand still for a moment, and a run of hours must
not end over that; nor may it wait for ever without saying for what. The threads are daemons, so
one that hangs inside the operating system keeps neither a run nor the process from ending.
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue

from largebatch.contracts import Request
from largebatch.data.index import Index, Location
from largebatch.errors import DataError

THREADS = 8
"""How many reads are under way at once; they wait for the disk, not for the processor."""

PAUSES = (0.1, 1.0, 5.0)
"""Seconds before each further attempt at a read that failed."""

SLOW_SECONDS = 60.0
"""How long a read may take before another one is tried beside it."""

_Job = tuple[Location, Future[bytes]]


def name_of(location: Location) -> str:
    """Return the path of a picture, and its place where the file is a shard of many."""
    return f"{location.path}" + (f" (byte {location.offset})" if location.offset else "")


def read(location: Location) -> bytes:
    """Return the bytes of one picture; raise DataError with its path if no attempt succeeds."""
    problem: OSError | None = None
    for pause in (0.0, *PAUSES):
        time.sleep(pause)
        try:
            return _read_once(location)
        except OSError as error:
            problem = error
    raise DataError(
        f"{name_of(location)}: cannot be read ({problem}), tried {1 + len(PAUSES)} times; see that "
        "the disk is well and that the files are those that were indexed"
    )


def _read_once(location: Location) -> bytes:
    file = os.open(location.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = os.pread(file, location.num_bytes, location.offset)
    finally:
        os.close(file)
    if len(content) != location.num_bytes:
        raise OSError(f"{len(content)} of {location.num_bytes} bytes")
    return content


class Reader:
    """Reads pictures in threads of its own; `open_reader` makes one."""

    def __init__(self, threads: int) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name="read", daemon=True) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, location: Location) -> Future[bytes]:
        """Queue a read; `finish` waits for it."""
        future: Future[bytes] = Future()
        self._jobs.put((location, future))
        return future

    def close(self) -> None:
        """End the threads, dropping what is queued; one that hangs is left behind."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + 1.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self._closed:
                _carry_out(*job)


def finish(location: Location, future: Future[bytes]) -> bytes:
    """Wait for a read; one that hangs is tried again beside it, then DataError names the path."""
    attempts = 1 + len(PAUSES)
    for _ in range(attempts):
        try:
            return future.result(SLOW_SECONDS)
        except TimeoutError:
            future = Future()
            threading.Thread(target=_carry_out, args=(location, future), daemon=True).start()
    raise DataError(
        f"{name_of(location)}: the disk gives no answer: {attempts} reads took more than "
        f"{SLOW_SECONDS:g} seconds each"
    )


def _carry_out(location: Location, future: Future[bytes]) -> None:
    try:
        future.set_result(read(location))
    except BaseException as error:  # raised again where the bytes are wanted
        future.set_exception(error)


@contextmanager
def open_reader(threads: int = THREADS) -> Iterator[Reader]:
    """Yield a reader whose threads end with the block."""
    reader = Reader(threads)
    try:
        yield reader
    finally:
        reader.close()


def read_ahead(
    index: Index, requests: Iterable[Request], reader: Reader
) -> Iterator[tuple[Request, list[bytes]]]:
    """Give each request with its pictures' bytes, while those of the next are being read."""
    waiting: tuple[Request, list[_Job]] | None = None
    for request in requests:
        locations = [index.locate(sample) for sample in request.samples.tolist()]
        started = [(location, reader.start(location)) for location in locations]
        if waiting is not None:
            yield waiting[0], [finish(*job) for job in waiting[1]]
        waiting = request, started
    if waiting is not None:
        yield waiting[0], [finish(*job) for job in waiting[1]]

"""Threads that read encoded images ahead and retry a read that fails or hangs.

Disks and networks fail or stall for a moment. That must not end a run of hours, and a run must not
wait indefinitely without a message. The threads are daemons, so a thread that hangs inside the
operating system keeps neither the run nor the process from ending.

A batch is read into one reusable buffer: allocating memory costs more than reading cached files.
The thread that requests a batch does only a few array operations; the reading threads do all work
per image, such as building paths.
"""

import functools
import os
import resource
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np

from largebatch.data.index.folder import changed
from largebatch.data.index.index import Index, Location
from largebatch.data.types import Bytes, IntArray, Request
from largebatch.storage import read_again

FIRST_READS = 8
"""Maximum number of images read at the same time until read times are known."""

KEPT_OPEN = 4
"""A reader keeps at most 1 / KEPT_OPEN of the process's limit of open files, for shards."""

THREAD_SECONDS = 0.02
"""Seconds of reading in the previous batch per additional thread. One thread is best for cached
files: several would spend more time waiting for Python's lock than reading."""

SLOW_SECONDS = 60.0
"""Seconds that a read may take before a second attempt is started."""


def name_of(location: Location) -> str:
    """Return the path of an image, with its position if the file is a shard."""
    return f"{location.path}" + (f" (byte {location.offset})" if location.offset else "")


def read(location: Location) -> bytes:
    """Return the bytes of one image; raise DataError with its path if all attempts fail."""
    content = np.empty(location.num_bytes, dtype=np.uint8)
    try:
        _read_one(content, location)
    except OSError as error:
        content = _read_again(location, error)
    return content.tobytes()


def _read_one(content: Bytes, location: Location) -> None:
    """Read an image into `content`; raise OSError if the file changed since it was indexed."""
    if location.offset == 0:  # not a shard, which begins with a header
        _read_file(content, str(location.path), location.mtime)
        return
    file = os.open(location.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _fill(content, file, location.offset)
    finally:
        os.close(file)


def _read_file(content: Bytes, path: str, mtime: int | None) -> None:
    """Read a whole file; raise OSError if its length, or its time if known, has changed."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        indexed = len(content), status.st_mtime_ns if mtime is None else mtime
        if indexed != (status.st_size, status.st_mtime_ns):
            raise OSError(changed("it", indexed, (status.st_size, status.st_mtime_ns)))
        _fill(content, file, 0)
    finally:
        os.close(file)


def _fill(content: Bytes, file: int, offset: int) -> None:
    """Read `content` from an offset of an open file; raise OSError if the file is too short."""
    done, got = 0, 1
    while done < len(content) and got > 0:
        got = os.preadv(file, [content.data[done:]], offset + done)
        done += got
    if done < len(content):
        raise OSError(f"its file has {done:,} of its {len(content):,} bytes")


def _read_again(location: Location, problem: OSError) -> Bytes:
    """Retry a read that failed or hangs, each time in a new thread, which may hang too."""

    def in_a_thread() -> Bytes:
        content = np.empty(location.num_bytes, dtype=np.uint8)
        outcome: futures.Future[None] = futures.Future()

        def attempt() -> None:
            try:
                _read_one(content, location)
                outcome.set_result(None)
            except OSError as error:
                outcome.set_exception(error)

        threading.Thread(target=attempt, name="read again", daemon=True).start()
        if not futures.wait([outcome], SLOW_SECONDS).done:
            raise _no_answer()
        outcome.result()
        return content

    return read_again(in_a_thread, problem, name=name_of(location))


def _no_answer() -> OSError:
    return OSError(f"no answer in {SLOW_SECONDS:g} seconds")


class _OpenFile:
    """A file that closes with the last reference to it: a hanging thread may still read it."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)


class _Files:
    """The files of an index; shards stay open, so that reading an image is one system call."""

    def __init__(self, index: Index) -> None:
        self.index = index
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = None if limit == resource.RLIM_INFINITY else limit // KEPT_OPEN
        self._open = functools.lru_cache(maxsize=most)(_OpenFile)

    def read(self, content: Bytes, sample: int) -> None:
        """Read an image into `content`; raise OSError if the file changed since it was indexed."""
        index, path = self.index, self.index.file(sample)
        if index.offsets is None:
            mtime = None if index.mtimes is None else int(index.mtimes[sample])
            _read_file(content, path, mtime)
            return
        try:
            file = self._open(path)  # another thread may drop the reference of the cache
            _fill(content, file.number, int(index.offsets[sample]))
        except OSError:
            self.close()  # the handle of a network file may be stale
            raise

    def close(self) -> None:
        """Close the files; one that is being read closes after the read."""
        self._open.cache_clear()


class _Share:
    """Images of a batch that one thread reads one after the other."""

    def __init__(self, files: "_Files", samples: IntArray, room: Bytes, spans: IntArray) -> None:
        self.files = files
        self.samples = samples
        self.room = room
        self.spans = spans
        """Start and end of each image in `room`, N x 2."""

        self.contents: list[Bytes] = []
        """Views of the images; empty until the first is being read."""

        self.problems: dict[int, OSError] = {}
        self.done = threading.Event()
        self.abandoned = False
        """True if the thread hangs and was replaced; it ends when its read returns."""

        self.current = 0
        """Row of the image being read."""

        self.seconds = 0.0
        """Seconds that all reads took."""

        self._since: float | None = None
        """Start of the current read; None before the first."""

    def run(self) -> None:
        """Read the images into the buffer and record failed reads."""
        self.contents = [self.room[start:end] for start, end in self.spans.tolist()]
        start_time = time.monotonic()
        for row, sample in enumerate(self.samples.tolist()):
            self.current, self._since = row, time.monotonic()
            try:
                self.files.read(self.contents[row], sample)
            except OSError as error:
                self.problems[row] = error
        self.seconds = time.monotonic() - start_time
        self.done.set()

    def wait(self) -> bool:
        """Wait until all images are read; return False as soon as one read takes too long."""
        while not self.done.wait(SLOW_SECONDS / 10):
            if self._since is not None and time.monotonic() - self._since > SLOW_SECONDS:
                return False
        return True


class Reading:
    """The images of a request, read into one buffer."""

    def __init__(self, files: _Files, request: Request, buffer: Bytes, threads: int) -> None:
        self.index = files.index
        self.request = request
        self.buffer: Bytes | None = buffer
        """Buffer of the images; None if a hanging thread may still write into it."""

        self.contents = [buffer[:0]] * len(request.samples)
        """Encoded images; empty until all of them are read."""

        sizes = sizes_of(self.index, request)
        ends = np.cumsum(sizes)
        spans = np.stack([ends - sizes, ends], axis=-1)
        parts = (slice(first, None, threads) for first in range(threads))
        self.shares = [_Share(files, request.samples[p], buffer, spans[p]) for p in parts]


def sizes_of(index: Index, request: Request) -> IntArray:
    """Return the lengths of the encoded images of a request in bytes."""
    assert index.num_bytes is not None, "synthetic images are not read"
    return index.num_bytes[request.samples]


class Reader:
    """Reads images in threads; use `open_reader`."""

    def __init__(self, index: Index, reads: int) -> None:
        self._files = _Files(index)
        self._index = index
        self._reads = reads
        self._jobs: SimpleQueue[_Share | None] = SimpleQueue()
        self._free: list[Bytes] = []
        self._closed = False
        self._sharing = min(reads, FIRST_READS)
        self._threads: list[threading.Thread] = []
        self._at_work = 0
        """Number of threads, not counting replaced ones."""

    def start(self, request: Request) -> Reading:
        """Start reading the images of a request; `finish` waits for them."""
        room = self._room(int(sizes_of(self._index, request).sum()))
        reading = Reading(self._files, request, room, self._sharing)
        for share in reading.shares:
            self._jobs.put(share)
        for _ in range(self._at_work, self._sharing):
            self._add_thread(None)
        self._at_work = max(self._at_work, self._sharing)
        return reading

    def finish(self, reading: Reading) -> None:
        """Wait for the images; raise DataError with the path of one that cannot be read."""
        for first, share in enumerate(reading.shares):
            reading.contents[first :: len(reading.shares)] = self._finish(share, reading)
        seconds = sum(share.seconds for share in reading.shares)
        self._sharing = min(self._reads, 1 + int(seconds / THREAD_SECONDS))

    def release(self, reading: Reading) -> None:
        """Return the buffer of a reading for reuse; its images must not be used any more."""
        if reading.buffer is not None:
            self._free.append(reading.buffer)
            reading.buffer = None

    def close(self) -> None:
        """Stop the threads and drop queued reads; a hanging thread is abandoned."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + 1.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._files.close()

    def _finish(self, share: _Share, reading: Reading) -> list[Bytes]:
        following, in_time = None, share.wait()
        contents, problems = list(share.contents), share.problems
        if not in_time:
            # Its read may end at this moment. Then one image is read twice and an extra thread
            # starts and ends, which is harmless: all write the same bytes to the same place.
            share.abandoned, hung = True, share.current
            reading.buffer = None  # the replaced thread may still write into it
            rest = slice(hung + 1, None)
            following = _Share(share.files, share.samples[rest], share.room, share.spans[rest])
            contents, problems = contents[: hung + 1], {**problems, hung: _no_answer()}
            self._add_thread(following)  # immediately: other threads may hang in queued reads
        for row, problem in problems.items():
            location = share.files.index.locate(int(share.samples[row]))
            contents[row] = _read_again(location, problem)
        return contents if following is None else contents + self._finish(following, reading)

    def _room(self, num_bytes: int) -> Bytes:
        """Return memory for a batch, reused from an earlier one if large enough."""
        room = self._free.pop() if self._free else np.empty(0, dtype=np.uint8)
        if len(room) < num_bytes:  # over-allocated by 25 %, because batches differ in length
            room = np.empty(num_bytes + num_bytes // 4, dtype=np.uint8)
        return room

    def _add_thread(self, share: _Share | None) -> None:
        """Start a thread; it reads this share first."""
        thread = threading.Thread(target=self._work, args=(share,), name="read", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self, share: _Share | None) -> None:
        share = share or self._jobs.get()
        while share is not None:
            if not self._closed:
                share.run()
            if share.abandoned:
                return  # this thread was replaced
            share = self._jobs.get()


@contextmanager
def open_reader(index: Index, reads: int) -> Iterator[Reader]:
    """Yield a reader of an index's images, at most `reads` at a time; close it after the block."""
    reader = Reader(index, reads)
    try:
        yield reader
    finally:
        reader.close()


def read_ahead(requests: Iterable[Request], reader: Reader) -> Iterator[Reading]:
    """Yield each request with its images, while the images of the next are being read."""
    waiting: Reading | None = None
    for request in requests:
        started = reader.start(request)
        if waiting is not None:
            reader.finish(waiting)
            yield waiting
        waiting = started
    if waiting is not None:
        reader.finish(waiting)
        yield waiting

"""The bytes of encoded images: read ahead by threads, again where a read fails or hangs.

Images lie on disks and networks that fail or stand still for a moment, and a run of hours must
not end over that; nor may it wait for ever without saying for what. The threads are daemons, so
one that hangs inside the operating system keeps neither a run nor the process from ending.

A batch is read into one buffer, which can be used again: fresh memory costs more than reading what
the system has cached. The thread that asks for a batch does a few operations on arrays; paths and
everything else that is done for each image are the work of the threads that read.
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
"""How many images are read at a time, at most, before it is known how long reads take."""

KEPT_OPEN = 4
"""A reader keeps at most this part, 1 / KEPT_OPEN, of the files that a process may open: shards."""

THREAD_SECONDS = 0.02
"""How much reading of the batch before brings in another thread. What lies in memory is read best
by one: several would spend more time on handing Python's lock to each other than on reading."""

SLOW_SECONDS = 60.0
"""How long a read may take before another one is tried beside it."""


def name_of(location: Location) -> str:
    """Return the path of an image, and its place where the file is a shard of many."""
    return f"{location.path}" + (f" (byte {location.offset})" if location.offset else "")


def read(location: Location) -> bytes:
    """Return the bytes of one image; raise DataError with its path if no attempt succeeds."""
    content = np.empty(location.num_bytes, dtype=np.uint8)
    try:
        _read_one(content, location)
    except OSError as error:
        content = _read_again(location, error)
    return content.tobytes()


def _read_one(content: Bytes, location: Location) -> None:
    """Read an image into `content`; raise OSError where the file is not what was indexed."""
    if location.offset == 0:  # shards begin with a header
        _read_file(content, str(location.path), location.mtime)
        return
    file = os.open(location.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _fill(content, file, location.offset)
    finally:
        os.close(file)


def _read_file(content: Bytes, path: str, mtime: int | None) -> None:
    """Read a whole file; raise OSError where it has another length, or time if that is known."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        then = len(content), found.st_mtime_ns if mtime is None else mtime
        if then != (found.st_size, found.st_mtime_ns):
            raise OSError(changed("it", then, (found.st_size, found.st_mtime_ns)))
        _fill(content, file, 0)
    finally:
        os.close(file)


def _fill(content: Bytes, file: int, offset: int) -> None:
    """Read `content` from a place in an open file; raise OSError where the file ends before."""
    done, got = 0, 1
    while done < len(content) and got > 0:
        got = os.preadv(file, [content.data[done:]], offset + done)
        done += got
    if done < len(content):
        raise OSError(f"its file has {done:,} of its {len(content):,} bytes")


def _read_again(location: Location, problem: OSError) -> Bytes:
    """Try a read that failed or hangs again, each time in a thread that may hang too."""

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
    """A file that is closed with the last reference to it: a thread that hangs may be reading."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)


class _Files:
    """The files of an index: shards stay open, of which an image is read with one call."""

    def __init__(self, index: Index) -> None:
        self.index = index
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = None if limit == resource.RLIM_INFINITY else limit // KEPT_OPEN
        self._open = functools.lru_cache(maxsize=most)(_OpenFile)

    def read(self, content: Bytes, sample: int) -> None:
        """Read an image into `content`; raise OSError where the file is not what was indexed."""
        index, path = self.index, self.index.file(sample)
        if index.offsets is None:
            mtime = None if index.mtimes is None else int(index.mtimes[sample])
            _read_file(content, path, mtime)
            return
        try:
            _fill(content, self._open(path).number, int(index.offsets[sample]))
        except OSError:
            self.close()  # a file that was opened over a network may be stale
            raise

    def close(self) -> None:
        """Close what nobody is reading, and the rest when it is read."""
        self._open.cache_clear()


class _Share:
    """Some images of a batch, which one thread reads one after the other."""

    def __init__(self, files: "_Files", samples: IntArray, room: Bytes, spans: IntArray) -> None:
        self.files = files
        self.samples = samples
        self.room = room
        self.spans = spans
        """First and last byte in `room` of each image, N x 2."""

        self.contents: list[Bytes] = []
        """The images, once the first of them is being read."""

        self.problems: dict[int, OSError] = {}
        self.done = threading.Event()
        self.abandoned = False
        """Whether the thread hangs and was replaced: should its read return, it ends."""

        self.current = 0
        """The image that is being read."""

        self.seconds = 0.0
        """How long all of it took."""

        self._since: float | None = None
        """When that began; None: nothing has begun."""

    def run(self) -> None:
        """Read the images into their places, noting which reads failed."""
        self.contents = [self.room[start:end] for start, end in self.spans.tolist()]
        begun = time.monotonic()
        for row, sample in enumerate(self.samples.tolist()):
            self.current, self._since = row, time.monotonic()
            try:
                self.files.read(self.contents[row], sample)
            except OSError as error:
                self.problems[row] = error
        self.seconds = time.monotonic() - begun
        self.done.set()

    def wait(self) -> bool:
        """Wait until all is read; return False instead once a single read takes too long."""
        while not self.done.wait(SLOW_SECONDS / 10):
            if self._since is not None and time.monotonic() - self._since > SLOW_SECONDS:
                return False
        return True


class Reading:
    """The images of a request while they are being read, all into one buffer."""

    def __init__(self, files: _Files, request: Request, buffer: Bytes, threads: int) -> None:
        self.index = files.index
        self.request = request
        self.buffer: Bytes | None = buffer
        """None once something else may still write into it."""

        self.contents = [buffer[:0]] * len(request.samples)
        """The encoded images, once all of them are read."""

        sizes = sizes_of(self.index, request)
        ends = np.cumsum(sizes)
        spans = np.stack([ends - sizes, ends], axis=-1)
        parts = (slice(first, None, threads) for first in range(threads))
        self.shares = [_Share(files, request.samples[p], buffer, spans[p]) for p in parts]


def sizes_of(index: Index, request: Request) -> IntArray:
    """Return the lengths of the encoded images of a request in bytes."""
    assert index.num_bytes is not None, "these images are made up, not read"
    return index.num_bytes[request.samples]


class Reader:
    """Reads images in threads of its own; `open_reader` makes one."""

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
        """Number of threads, without those that hang and were replaced."""

    def start(self, request: Request) -> Reading:
        """Begin to read the images of a request; `finish` waits for them."""
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
        """Let the memory of images that are no longer used be used again."""
        if reading.buffer is not None:
            self._free.append(reading.buffer)
            reading.buffer = None

    def close(self) -> None:
        """End the threads, dropping what is queued; one that hangs is left behind."""
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
            # Its read may end this very moment. Then one image is read twice and one more thread
            # comes and goes, which does no harm: all write the same bytes to the same place.
            share.abandoned, hung = True, share.current
            reading.buffer = None  # the thread that was replaced may still write into it
            rest = slice(hung + 1, None)
            following = _Share(share.files, share.samples[rest], share.room, share.spans[rest])
            contents, problems = contents[: hung + 1], {**problems, hung: _no_answer()}
            self._add_thread(following)  # at once: others may hang in what is queued
        for row, problem in problems.items():
            location = share.files.index.locate(int(share.samples[row]))
            contents[row] = _read_again(location, problem)
        return contents if following is None else contents + self._finish(following, reading)

    def _room(self, num_bytes: int) -> Bytes:
        """Return memory for a batch: that of an earlier one, if it is enough."""
        room = self._free.pop() if self._free else np.empty(0, dtype=np.uint8)
        if len(room) < num_bytes:  # with some to spare: batches differ in length
            room = np.empty(num_bytes + num_bytes // 4, dtype=np.uint8)
        return room

    def _add_thread(self, share: _Share | None) -> None:
        """Start a thread, with this share first."""
        thread = threading.Thread(target=self._work, args=(share,), name="read", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self, share: _Share | None) -> None:
        share = share or self._jobs.get()
        while share is not None:
            if not self._closed:
                share.run()
            if share.abandoned:
                return  # another thread has taken the place of this one
            share = self._jobs.get()


@contextmanager
def open_reader(index: Index, reads: int) -> Iterator[Reader]:
    """Yield a reader of an index's images, at most `reads` at a time; it ends with the block."""
    reader = Reader(index, reads)
    try:
        yield reader
    finally:
        reader.close()


def read_ahead(requests: Iterable[Request], reader: Reader) -> Iterator[Reading]:
    """Give each request with its images read, while those of the next are being read."""
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

"""Threads that read encoded images ahead of their use, and retry a read that fails.

Disks and networks fail for a moment, which must not end a run of hours. A batch is read into one
reusable buffer: allocating memory costs more than reading cached files.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from largebatch.data.decoders.sources import Files, Source, open_source
from largebatch.data.index.index import Index, Location
from largebatch.data.types import Bytes, IntArray, Request
from largebatch.errors import DataError
from largebatch.storage import read_again

FIRST_READS = 8  # maximum number of images read at the same time until read times are known

THREAD_SECONDS = 0.02
"""Seconds of reading in the previous batch per additional thread. One thread is best for cached
files: several would spend more time waiting for Python's lock than reading."""

SLOWEST_SECONDS = 600.0  # seconds after which a run ends that waits for a read


def name_of(location: Location) -> str:
    """Return the path of an image, with its position if the file is a shard."""
    return location.path + (f" (byte {location.offset})" if location.offset else "")


def read(location: Location, source: Source | None = None) -> bytes:
    """Return the bytes of one image, by default of a file.

    Raises DataError with its path if all attempts fail.
    """
    content = np.empty(location.num_bytes, dtype=np.uint8)
    _read_patiently(content, location, source or Files())
    return content.tobytes()


def _read_patiently(content: Bytes, location: Location, source: Source) -> None:
    """Fill `content` with an image; raise DataError with its path if all attempts fail."""

    def again() -> None:
        source.reopen()
        source.read(content, location)

    try:
        source.read(content, location)
    except OSError as error:
        read_again(again, error, name=name_of(location), hint=source.hint)


class Reading:
    """The images of a request, read into one buffer."""

    def __init__(self, index: Index, request: Request, buffer: Bytes, lengths: IntArray) -> None:
        self.index = index
        self.request = request
        self.buffer = buffer
        ends = [0, *np.cumsum(lengths).tolist()]
        self.contents = [buffer[a:b] for a, b in pairwise(ends)]
        """Encoded images; valid after `Reader.finish`."""

        self.jobs: list[Future[float]] = []


class Reader:
    """Reads images in threads; use `open_reader`."""

    def __init__(self, index: Index, reads: int) -> None:
        self._index = index
        self._reads = reads
        self.pool = ThreadPoolExecutor(reads, thread_name_prefix="read")
        self._free: list[Bytes] = []
        self._sharing = min(reads, FIRST_READS)
        self._source = open_source(index)

    def announced(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield the requests, each announced to the source as early as it fetches ahead."""
        waiting: deque[Request] = deque()
        for request in requests:
            self._source.expect(request)
            waiting.append(request)
            while waiting and self._source.is_full:
                yield waiting.popleft()
        yield from waiting

    def start(self, request: Request) -> Reading:
        """Start reading the images of a request; `finish` waits for them."""
        assert self._index.num_bytes is not None, "synthetic images are not read"
        lengths = self._index.num_bytes[request.samples]
        num_bytes = int(lengths.sum())
        room = self._free.pop() if self._free else np.empty(0, dtype=np.uint8)
        if len(room) < num_bytes:  # over-allocated by 25 %, because batches differ in length
            room = np.empty(num_bytes + num_bytes // 4, dtype=np.uint8)
        reading = Reading(self._index, request, room, lengths)
        threads = max(1, min(self._sharing, len(lengths)))
        rows = (slice(first, None, threads) for first in range(threads))
        reading.jobs = [self.pool.submit(self._read, reading, part) for part in rows]
        return reading

    def finish(self, reading: Reading) -> None:
        """Wait for the images; raise DataError with the path of one that cannot be read."""
        seconds = 0.0
        for first, job in enumerate(reading.jobs):
            try:
                seconds += job.result(SLOWEST_SECONDS)
            except TimeoutError:
                path = self._index.file(int(reading.request.samples[first]))
                raise DataError(f"{path}: not read after {SLOWEST_SECONDS:g} s") from None
        # More threads only if the reads of this batch took long: see THREAD_SECONDS.
        self._sharing = min(self._reads, 1 + int(seconds / THREAD_SECONDS))

    def release(self, reading: Reading) -> None:
        """Return the buffer of a reading for reuse; its images must not be used any more."""
        self._free.append(reading.buffer)

    def close(self) -> None:
        """Drop the requests that were announced and not read."""
        self._source.close()

    def _read(self, reading: Reading, rows: slice) -> float:
        start = time.monotonic()
        samples = reading.request.samples[rows].tolist()
        for content, sample in zip(reading.contents[rows], samples, strict=True):
            _read_patiently(content, self._index.locate(sample), self._source)
        return time.monotonic() - start


@contextmanager
def open_reader(index: Index, reads: int) -> Iterator[Reader]:
    """Yield a reader of an index's images, at most `reads` at a time."""
    reader = Reader(index, reads)
    try:
        yield reader
    finally:
        # Without waiting: a read of a lost network file may hang for minutes.
        reader.pool.shutdown(wait=False, cancel_futures=True)
        reader.close()


def read_ahead(requests: Iterable[Request], reader: Reader) -> Iterator[Reading]:
    """Yield each request with its images, while the images of the next are being read."""
    # One request ahead: its reads overlap with the decoding of the one before it.
    waiting: Reading | None = None
    for request in reader.announced(requests):
        started = reader.start(request)
        if waiting is not None:
            reader.finish(waiting)
            yield waiting
        waiting = started
    if waiting is not None:
        reader.finish(waiting)
        yield waiting

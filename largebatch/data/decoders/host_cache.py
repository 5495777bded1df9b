"""Blocks of a bucket's shards on the disk of a host, fetched ahead of their use.

A block is the consecutive images of a shard that begin within the same BLOCK_BYTES; it is read in
one request and kept as one file, which ends with a checksum. The name of a file contains the ETag
of its shard, so a changed shard has other files. Requests are known ahead, and so are the blocks
that a reader will need: `Blocks.expect` starts to fetch them, in order.

Workers of a host share the folder. A file is written under a lock, under another name, and renamed
when it is whole: another worker that needs the block waits for the lock and finds the file. The
lock of a killed worker ends with it, and the next worker fetches the block again.

Each worker removes what it has fetched itself, at most its share of the budget: of the blocks that
no reader expects, the one that the host needs last (Belady 1966, doi 10.1147/sj.52.0078). The order
of training is a pure function of the seed, so this is known and not estimated. Blocks of other
images, such as validation's, are kept as long as there are blocks of training to remove.
"""

import errno
import fcntl
import hashlib
import heapq
import itertools
import logging
import os
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import BinaryIO

import numpy as np

from largebatch.address import Address
from largebatch.bucket import open_bucket
from largebatch.data.index.index import Index, Location, Paths
from largebatch.data.order import samples_at, unrepeated
from largebatch.data.types import Bytes, HostCache, IntArray, Request, TrainingOrder
from largebatch.errors import DataError
from largebatch.storage import CHECKSUM_BYTES, PARTIAL, checksum, is_whole

BLOCK_BYTES = 2**18
"""Two photographs of ImageNet, or a hundred of CIFAR-10. A request of this length from a server
with 20 ms of latency takes little longer than one of a byte."""

FETCHES = 64  # blocks that a worker fetches at the same time
LOOKAHEAD_BYTES = 2**28  # bytes of blocks that a reader expects at a time, at most
NEVER = 2**62  # next use of a block that is not needed again

_Entry = tuple[int, int, Path]
"""-next use, number of the entry, and file: the file that is needed last is the first of a heap."""

_LOCK = "lock"
_LOG = logging.getLogger(__name__)


class Keeper:
    """The files of one bucket in a cache folder, as one worker accounts for them."""

    def __init__(self, folder: Path, *, share: int | None, worker: int, workers: int) -> None:
        self.folder = folder
        self.share = share
        """Bytes that this worker may keep; None: no limit."""

        self._lock = threading.Lock()
        self._sizes: dict[Path, int] = {}
        self._total = 0
        self._pins: Counter[Path] = Counter()
        self._numbers = itertools.count()
        self._newest: dict[Path, _Entry] = {}
        self._queue: list[_Entry] = []
        self._set_aside: dict[Path, _Entry] = {}  # of pinned files
        self._adopt(worker, workers)

    def _adopt(self, worker: int, workers: int) -> None:
        """Account for this worker's part of the files that earlier runs have left."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Some file systems of clusters have no locks.
            with (self.folder / _LOCK).open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
            # Each worker looks at its own part: of ImageNet there are 600,000.
            paths = sorted(
                path
                for path in self.folder.glob("*/*")
                if zlib.crc32(os.fsencode(path.name)) % workers == worker and path.is_file()
            )
        except OSError as error:
            raise DataError(
                f"--cache-dir: {self.folder}: cannot be used ({error.strerror}); choose another"
            ) from None
        for path in paths:
            if path.name.endswith(PARTIAL):
                _remove_abandoned(path)
                continue
            with suppress(OSError):
                self.note(path, path.stat().st_size, next_use=NEVER)

    def note(self, path: Path, size: int, *, next_use: int | None) -> None:
        """Account for a file, or change its next use, a position; None: it is kept longest."""
        with self._lock:
            if path not in self._sizes:
                self._sizes[path] = size
                self._total += size
            number = next(self._numbers)
            # Without a known use the least recently used is removed first.
            key = number - NEVER if next_use is None else next_use
            entry = self._newest[path] = (-key, number, path)
            heapq.heappush(self._queue, entry)
            if len(self._queue) > 2 * len(self._newest):
                # Each use leaves an entry, and without a surplus none is removed.
                self._queue = list(self._newest.values())
                heapq.heapify(self._queue)
                self._set_aside.clear()
            self._remove_surplus()

    def owns(self, path: Path) -> bool:
        """Return True if this worker accounts for a file."""
        return path in self._sizes

    def pin(self, path: Path, count: int) -> None:
        """Keep a file until `unpin` has been called as many times."""
        with self._lock:
            self._pins[path] += count

    def unpin(self, path: Path, count: int = 1) -> None:
        """Undo `pin`; remove what is above the share."""
        with self._lock:
            self._pins[path] -= count
            if self._pins[path] > 0:
                return
            del self._pins[path]
            if path in self._set_aside:
                heapq.heappush(self._queue, self._set_aside.pop(path))
            self._remove_surplus()

    def shrink(self) -> bool:
        """Make a full disk's content the share, less one file; return True if one was removed."""
        with self._lock:
            before = self._total
            self.share = max(0, before - BLOCK_BYTES)
            self._remove_surplus()
            return self._total < before

    def _remove_surplus(self) -> None:
        while self.share is not None and self._total > self.share and self._queue:
            entry = heapq.heappop(self._queue)
            path = entry[2]
            if self._newest.get(path) != entry:  # it has a later one
                continue
            if self._pins[path] > 0:
                # Pinned files are those that are needed last, after this use. Back in the queue
                # they would all be looked at again for the next file that is removed.
                self._set_aside[path] = entry
                continue
            path.unlink(missing_ok=True)
            self._total -= self._sizes.pop(path)
            del self._newest[path]


@lru_cache(maxsize=16)
def _keeper(folder: Path, share: int | None, worker: int, workers: int) -> Keeper:
    """Return what this process accounts with; the readers of all splits share it."""
    return Keeper(folder, share=share, worker=worker, workers=workers)


class Blocks:
    """A bucket's images, read from blocks on this host's disk: a Source."""

    hint = "check the network, the credentials and that the object has not changed"

    def __init__(self, index: Index, cache: HostCache) -> None:
        assert isinstance(index.root, Address)
        assert index.offsets is not None
        assert index.num_bytes is not None
        assert isinstance(index.paths, Paths)
        self._bucket = open_bucket(index.root)
        self._versions = index.versions
        self._order = cache.order
        folder = cache.folder / hashlib.sha256(index.root.url.encode()).hexdigest()[:16]
        self._keeper = _keeper(folder, cache.share, cache.worker, cache.workers)
        self._shards = index.paths.holders
        which = index.paths.which
        ends = index.offsets + index.num_bytes
        cells = index.offsets // BLOCK_BYTES
        # Rows are in the order of the shards and of the images in them.
        is_first = np.ones(len(which), dtype=np.bool_)
        is_first[1:] = (which[1:] != which[:-1]) | (cells[1:] != cells[:-1])
        self._first_rows = np.append(np.flatnonzero(is_first), len(which))
        self._block_of = np.cumsum(is_first) - 1
        self._starts: IntArray = index.offsets[is_first]
        self._lengths: IntArray = np.maximum.reduceat(ends, self._first_rows[:-1]) - self._starts
        self._shard_of: IntArray = which[is_first]
        firsts = np.searchsorted(self._shard_of, np.arange(len(self._shards) + 1)).tolist()
        self._blocks_of = dict(zip(self._shards, map(range, firsts, firsts[1:]), strict=False))
        self._folders = [
            self._keeper.folder / _folder_of(name, self._versions[name]) for name in self._shards
        ]
        self._knows_kept = False
        self._warned = False
        self._pool = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")
        self._lock = threading.Lock()
        self._ready = bytearray(len(self._starts))  # 1: whole, as this process has checked
        self._jobs: dict[int, Future[bool]] = {}
        self._expected: Counter[int] = Counter()
        self._expected_bytes = 0
        share = self._keeper.share
        self._lookahead = LOOKAHEAD_BYTES if share is None else min(LOOKAHEAD_BYTES, share // 4)

    @property
    def is_full(self) -> bool:
        """True if enough is expected."""
        return self._expected_bytes >= self._lookahead

    def expect(self, request: Request) -> None:
        """Start to fetch the blocks of a request."""
        if not self._knows_kept:
            self._knows_kept = True
            self._note_kept(request)
        blocks, counts = np.unique(self._block_of[request.samples], return_counts=True)
        for block, count in zip(blocks.tolist(), counts.tolist(), strict=True):
            path = self._path(block)
            self._keeper.pin(path, count)
            with self._lock:
                if block not in self._expected:
                    self._expected_bytes += int(self._lengths[block])
                self._expected[block] += count
            if self._keeper.owns(path):
                self._note(block, request)
            if not self._ready[block]:
                self._start(block, request)

    def read(self, content: Bytes, location: Location) -> None:
        """Fill `content` with an image; raise OSError if its block cannot be fetched now."""
        name = location.path.removeprefix(f"{self._bucket.address}/")
        blocks = self._blocks_of[name]
        starts = self._starts[blocks.start : blocks.stop]
        block = blocks.start + int(np.searchsorted(starts, location.offset, "right")) - 1
        if not self._read_block(content, block, location.offset):
            received = self._bucket.read_range(
                name, location.offset, location.num_bytes, version=self._versions[name]
            )
            content[:] = np.frombuffer(received, dtype=np.uint8)
        # Not after an error: the image is read again, and its block is still expected.
        self._release(block)

    def reopen(self) -> None:
        """Do nothing: the library makes new connections itself."""

    def close(self) -> None:
        """Cancel what is not fetched yet."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:  # threads may still read
            expected = self._expected
            self._expected = Counter()
        for block, count in expected.items():
            self._keeper.unpin(self._path(block), count)

    def _read_block(self, content: Bytes, block: int, offset: int) -> bool:
        """Fill `content` from the block's file; return False if the disk has no room for it."""
        place = offset - int(self._starts[block])
        for _ in range(3):
            if not self._ready[block] and not self._start(block).result():
                return False
            try:
                file = os.open(self._path(block), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # another worker has removed it
                self._ready[block] = 0
                continue
            try:
                if os.preadv(file, [content.data], place) == len(content):
                    return True
            finally:
                os.close(file)
            self._ready[block] = 0
        return False

    def _release(self, block: int) -> None:
        with self._lock:
            if block not in self._expected:
                return
            self._expected[block] -= 1
            if self._expected[block] == 0:
                del self._expected[block]
                self._expected_bytes -= int(self._lengths[block])
        self._keeper.unpin(self._path(block))

    def _path(self, block: int) -> Path:
        return self._folders[int(self._shard_of[block])] / str(self._starts[block])

    def _start(self, block: int, request: Request | None = None) -> Future[bool]:
        """Return the job that makes a block ready."""
        with self._lock:
            job = self._jobs.get(block)
            if job is None:
                job = self._jobs[block] = self._pool.submit(self._make_ready, block, request)
            return job

    def _make_ready(self, block: int, request: Request | None) -> bool:
        """Fetch a block unless it is whole on the disk; return False if that has no room."""
        path = self._path(block)
        try:
            if not self._is_whole(path, block):
                path.parent.mkdir(parents=True, exist_ok=True)
                with _locked(path.with_name(path.name + PARTIAL)) as (partial, file):
                    # Another worker may have fetched it in the meantime.
                    if not self._is_whole(path, block):
                        self._fetch(block, path, partial, file)
                        self._note(block, request)
            self._ready[block] = 1
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            if not self._keeper.shrink() and not self._warned:
                self._warned = True  # not once for every block
                _LOG.warning("%s: the disk is full; images are read from the bucket", path)
            return False
        finally:
            with self._lock:
                del self._jobs[block]
        return True

    def _fetch(self, block: int, path: Path, partial: Path, file: BinaryIO) -> None:
        name = self._shards[int(self._shard_of[block])]
        content = self._bucket.read_range(
            name,
            int(self._starts[block]),
            int(self._lengths[block]),
            version=self._versions[name],
        )
        try:
            file.truncate(0)
            file.write(content)
            file.write(checksum([content]))
            file.flush()
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def _is_whole(self, path: Path, block: int) -> bool:
        # Not flushed to the disk when it was written: the checksum shows what a power failure lost.
        return is_whole(path, int(self._lengths[block]))

    def _note_kept(self, request: Request) -> None:
        """Compute the next uses of blocks that earlier runs have left."""
        if self._keeper.share is None:  # none is removed
            return
        for block in range(len(self._starts)):
            if self._keeper.owns(self._path(block)):
                self._note(block, request)

    def _note(self, block: int, request: Request | None) -> None:
        next_use = None
        if self._order is not None and request is not None and request.start is not None:
            rows = np.arange(self._first_rows[block], self._first_rows[block + 1])
            after = request.start + len(request.samples) - 1
            next_use = next_position(self._order, rows, after=after)
        size = int(self._lengths[block]) + CHECKSUM_BYTES
        self._keeper.note(self._path(block), size, next_use=next_use)


def _folder_of(shard: str, version: str) -> str:
    return hashlib.sha256(f"{shard}\0{version}".encode()).hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield a file to write that only one worker of the host has open under a lock.

    It is renamed by the block, or removed after it.
    """
    while True:
        with path.open("ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # waits; a killed worker's lock ends with it
            if _is_at(path, file):
                try:
                    yield path, file
                finally:
                    if _is_at(path, file):
                        path.unlink(missing_ok=True)
                return
        # The worker before has renamed it or removed it.


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Return True if an open file still has this path."""
    with suppress(FileNotFoundError):
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    return False


def _remove_abandoned(path: Path) -> None:
    """Remove the partial file of a killed worker; nothing if a running one has it."""
    with suppress(OSError), path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)


def next_position(order: TrainingOrder, rows: IntArray, *, after: int) -> int:
    """Return the first position above `after` where this host trains on one of the rows.

    Two epochs are looked at; NEVER if there is none in them.
    """
    first = after // (order.num_trained * order.repeats)
    for epoch in (first, first + 1):
        with _DRAWING:
            positions = _positions(order, epoch)[rows]
        later = positions[positions > after]
        if later.size:
            return int(later.min())
    return NEVER


_DRAWING = Lock()
"""Held while the positions of an epoch are found: at its begin all threads ask for the same."""


@lru_cache(maxsize=3)
def _positions(order: TrainingOrder, epoch: int) -> IntArray:
    """Return the positions of each row in a pass over the samples, rows x repeats.

    -1 where this host does not train on it.
    """
    number = order.num_trained * order.repeats
    positions = range(epoch * number, (epoch + 1) * number)
    samples = samples_at(
        positions,
        seed=order.seed,
        num_samples=order.num_samples,
        trained=order.trained,
        repeats=order.repeats,
        order=order.order,
    )
    _, copies = unrepeated(positions, num_samples=order.num_trained, repeats=order.repeats)
    places = np.arange(positions.start, positions.stop, dtype=np.int64)
    found = np.full((order.num_samples, order.repeats), -1, dtype=np.int64)
    found[samples, copies] = np.where(order.is_own(places), places, -1)
    return found

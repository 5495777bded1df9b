"""Blocks of a bucket's shards on the disk of a host, fetched ahead of their use.

A block is the consecutive images of a shard that begin within the same BLOCK_BYTES, or within
LARGE_BLOCK_BYTES (`block_bytes` chooses); it is read in one request and kept as one file, which
ends with a checksum. The name of a file contains the ETag of its shard, so a changed shard has
other files. Requests are known ahead, and so are the blocks that a reader will need:
`Blocks.expect` starts to fetch them, in order.

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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock

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

LARGE_BLOCK_BYTES = 2**20
"""A byte costs the least processor time from this length on: a request, a lock and a file have a
cost of their own, which this many bytes make small."""

FETCHES = 64  # blocks that a worker fetches at the same time
LOOKAHEAD_BYTES = 2**28  # bytes of blocks that a reader expects at a time, at most
NEVER = 2**62  # next use of a block that is not needed again

_Entry = tuple[int, int, str]
"""-next use, number of the entry, and file: the file that is needed last is the first of a heap."""

_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR}
_LOCK = "lock"
_LOG = logging.getLogger(__name__)


class Keeper:
    """The files of one bucket in a cache folder, as one worker accounts for them."""

    def __init__(self, folder: Path, *, share: int | None, worker: int, workers: int) -> None:
        self.folder = folder
        self.share = share
        """Bytes that this worker may keep; None: no limit."""

        self._lock = threading.Lock()
        # By path; a string, because a Path takes longer to hash than a small image to read.
        self._sizes: dict[str, int] = {}
        self._total = 0
        self._pins: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._newest: dict[str, _Entry] = {}
        self._queue: list[_Entry] = []
        self._set_aside: dict[str, _Entry] = {}  # of pinned files
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
            raise _unusable(self.folder, error) from None
        for path in paths:
            if path.name.endswith(PARTIAL):
                _remove_abandoned(path)
                continue
            with suppress(OSError):
                self.add(str(path), path.stat().st_size, next_use=NEVER)

    def add(self, path: str, size: int, *, next_use: int | None) -> None:
        """Account for a file whose next use is a position; None: it is kept longest."""
        with self._lock:
            if path not in self._sizes:
                self._sizes[path] = size
                self._total += size
            self._enqueue(path, next_use)
            self._remove_surplus()

    def use(self, path: str, *, next_use: int | None) -> None:
        """Change the next use of a file, if this worker accounts for it."""
        with self._lock:
            if path in self._sizes:  # else another reader's file has taken its room
                self._enqueue(path, next_use)

    def _enqueue(self, path: str, next_use: int | None) -> None:
        number = next(self._numbers)
        # Without a known use the most recent one is removed first: images are read in turn, so it
        # is needed again after all others.
        key = number - NEVER if next_use is None else next_use
        entry = self._newest[path] = (-key, number, path)
        heapq.heappush(self._queue, entry)
        if len(self._queue) > 2 * len(self._newest):
            # Each use leaves an entry, and without a surplus none is removed.
            self._queue = list(self._newest.values())
            heapq.heapify(self._queue)
            self._set_aside.clear()

    def owns(self, path: str) -> bool:
        """Return True if this worker accounts for a file."""
        return path in self._sizes

    def pin(self, path: str) -> None:
        """Keep a file until `unpin` has been called as many times."""
        with self._lock:
            self._pins[path] += 1

    def unpin(self, path: str) -> None:
        """Undo `pin`; remove what is above the share."""
        with self._lock:
            self._pins[path] -= 1
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
            Path(path).unlink(missing_ok=True)
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
        self._latest: int | None = None  # last position that was expected; None: not known
        folder = cache.folder / hashlib.sha256(index.root.url.encode()).hexdigest()[:16]
        self._keeper = _keeper(folder, cache.share, cache.worker, cache.workers)
        self._shards = index.paths.holders
        which = index.paths.which
        ends = index.offsets + index.num_bytes
        length = block_bytes(cache, num_bytes=int(index.num_bytes.sum()), num_samples=len(index))
        cells = index.offsets // length
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
            f"{self._keeper.folder}/{_folder_of(name, self._versions[name])}"
            for name in self._shards
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
        if request.start is not None:
            self._latest = request.start + len(request.samples) - 1
        if not self._knows_kept and self._keeper.share is not None:
            self._knows_kept = True
            self._note_kept()
        blocks, counts = np.unique(self._block_of[request.samples], return_counts=True)
        # Without a limit no block is removed, and its next use does not matter.
        is_known = request.start is not None and self._keeper.share is not None
        next_uses = self._next_uses(blocks) if is_known else [None] * len(blocks)
        for block, count, next_use in zip(blocks.tolist(), counts.tolist(), next_uses, strict=True):
            path = self._path(block)
            with self._lock:
                is_new = block not in self._expected
                self._expected[block] += count
                if is_new:
                    self._expected_bytes += int(self._lengths[block])
                    self._keeper.pin(path)
            self._keeper.use(path, next_use=next_use)
            if not self._ready[block]:
                self._start(block, next_use)

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
        for block in expected:
            self._keeper.unpin(self._path(block))

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
            if self._expected[block] > 0:
                return
            del self._expected[block]
            self._expected_bytes -= int(self._lengths[block])
        self._keeper.unpin(self._path(block))

    def _path(self, block: int) -> str:
        # With its length: blocks of another division of the shard are other files.
        folder = self._folders[self._shard_of[block]]
        return f"{folder}/{self._starts[block]}-{self._lengths[block]}"

    def _start(self, block: int, next_use: int | None = None) -> Future[bool]:
        """Return the job that makes a block ready."""
        with self._lock:
            job = self._jobs.get(block)
            if job is None:
                job = self._jobs[block] = self._pool.submit(self._make_ready, block, next_use)
            return job

    def _make_ready(self, block: int, next_use: int | None) -> bool:
        """Fetch a block unless it is whole on the disk; return False if that has no room."""
        path = self._path(block)
        try:
            if not self._is_whole(path, block):
                self._fetch_once(path, block, next_use)
            self._ready[block] = 1
        except OSError as error:
            if error.errno not in _FULL:
                raise
            if self._keeper.share is None:
                self._note_kept()
            if not self._keeper.shrink() and not self._warned:
                self._warned = True  # not once for every block
                _LOG.warning("%s: the disk is full; images are read from the bucket", path)
            return False
        finally:
            with self._lock:
                del self._jobs[block]
        return True

    def _fetch_once(self, path: str, block: int, next_use: int | None) -> None:
        """Fetch a block under a lock, unless another worker of the host has."""
        partial = Path(path + PARTIAL)
        try:
            file = _locked(partial)
        except OSError as error:
            if error.errno in _NOT_ALLOWED:  # neither the network nor the bucket is at fault
                raise _unusable(partial.parent, error) from None
            raise
        try:
            if self._is_whole(path, block):
                partial.unlink()
                return
            self._fetch(block, file)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)  # only who has the lock removes or renames it
            raise
        finally:
            os.close(file)
        size = int(self._lengths[block]) + CHECKSUM_BYTES
        self._keeper.add(path, size, next_use=next_use)

    def _fetch(self, block: int, file: int) -> None:
        name = self._shards[int(self._shard_of[block])]
        content = self._bucket.read_range(
            name,
            int(self._starts[block]),
            int(self._lengths[block]),
            version=self._versions[name],
        )
        if os.fstat(file).st_size:  # of a killed worker
            # Not of an empty file: ext4 would then write it to the disk when it is closed.
            os.ftruncate(file, 0)
        for part in (content, memoryview(checksum([content]))):
            done = 0
            while done < len(part):
                done += os.write(file, part[done:])

    def _is_whole(self, path: str, block: int) -> bool:
        # Not flushed to the disk when it was written: the checksum shows what a power failure lost.
        return is_whole(Path(path), int(self._lengths[block]))

    def _note_kept(self) -> None:
        """Compute the next uses of the blocks that this worker accounts for."""
        owns = self._keeper.owns
        kept = [block for block in range(len(self._starts)) if owns(self._path(block))]
        next_uses = self._next_uses(np.array(kept, dtype=np.int64))
        for block, next_use in zip(kept, next_uses, strict=True):
            self._keeper.use(self._path(block), next_use=next_use)

    def _next_uses(self, blocks: IntArray) -> list[int | None]:
        """Return the next use of each block after the latest expected one; None: not known."""
        if self._order is None or self._latest is None or not len(blocks):
            return [None] * len(blocks)
        firsts = self._first_rows[blocks]
        ends = self._first_rows[blocks + 1]
        uses = next_positions(self._order, firsts, ends, after=self._latest)
        return [int(use) for use in uses]


def block_bytes(cache: HostCache, *, num_bytes: int, num_samples: int) -> int:
    """Return the length of the blocks of images with `num_bytes` in all.

    Large blocks are for images that are read in their order, as validation's, and for orders
    whose neighbours are fetched ahead in any case: this host trains on all of them, from less
    data than a reader looks ahead, which the folder has room for. In an order over more data a
    large block would be fetched for one image long before its other images are used.
    """
    order = cache.order
    if order is None:
        return LARGE_BLOCK_BYTES
    if len(order.ranks) < order.workers:
        return BLOCK_BYTES
    if order.order is not None and order.order.chunk > 1:
        in_window = order.order.chunk * order.order.window
        num_bytes = num_bytes * min(in_window, num_samples) // num_samples
    has_room = cache.share is None or cache.share * cache.workers >= num_bytes
    return LARGE_BLOCK_BYTES if num_bytes <= LOOKAHEAD_BYTES and has_room else BLOCK_BYTES


def _folder_of(shard: str, version: str) -> str:
    return hashlib.sha256(f"{shard}\0{version}".encode()).hexdigest()[:16]


def _unusable(folder: Path, error: OSError) -> DataError:
    return DataError(f"--cache-dir: {folder}: cannot be used ({error.strerror}); choose another")


def _locked(path: Path) -> int:
    """Return an open file that only one worker of the host has under a lock.

    The worker renames or removes it before it closes it. The lock of a killed worker ends with it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    while True:
        try:
            file = os.open(path, flags, 0o666)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, flags, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # waits
            if _is_at(path, file):
                return file
        except BaseException:
            os.close(file)
            raise
        # The worker before has renamed it or removed it.
        os.close(file)


def _is_at(path: Path, file: int) -> bool:
    """Return True if an open file still has this path."""
    with suppress(FileNotFoundError):
        return path.stat().st_ino == os.fstat(file).st_ino
    return False


def _remove_abandoned(path: Path) -> None:
    """Remove the partial file of a killed worker; nothing if a running one has it."""
    with suppress(OSError), path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Else it was renamed since it was opened, and this path is another worker's file.
        if _is_at(path, file.fileno()):
            path.unlink()


def next_positions(
    order: TrainingOrder, firsts: IntArray, ends: IntArray, *, after: int
) -> IntArray:
    """Return the first position above `after` where this host trains on a row of each range.

    Range i is the rows from firsts[i] to before ends[i], at least one. Two epochs are looked at;
    NEVER where there is none in them.
    """
    numbers = ends - firsts
    starts = np.cumsum(numbers) - numbers  # of the ranges in their concatenation
    rows = np.arange(int(numbers.sum())) + np.repeat(firsts - starts, numbers)
    uses = np.full(len(firsts), NEVER, dtype=np.int64)
    epoch = after // (order.num_trained * order.repeats)
    for looked_at in (epoch, epoch + 1):
        with _DRAWING:
            positions = _positions(order, looked_at)[rows]
        later = np.where(positions > after, positions, NEVER).min(axis=1)
        uses = np.minimum(uses, np.minimum.reduceat(later, starts))
    return uses


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

"""Compare the bytes of every image with stored checksums.

A run compares only lengths and times of files, because reading all of them takes an hour. Changes
that keep both, by a failing disk or a copy that preserves times, are detected only here.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from largebatch.data.index.index import Index, Location, open_mapped, pack, places
from largebatch.data.index.shards import CHUNK
from largebatch.data.types import Bytes
from largebatch.errors import DataError
from largebatch.storage import PART, THREADS, Progress, write_whole

CHECKSUM_BYTES = 16
"""Length of an image's checksum; long enough that collisions cannot be constructed."""


def note(index: Index, split: str, *, progress: Progress) -> Path:
    """Read every image, store the checksums and return the path of their file.

    Raises DataError if an image cannot be read, or if no place is writable.
    """
    checksums, unread = _read_all(index, progress)
    if unread:
        row, problem = next(iter(unread.items()))
        raise DataError(f"{_name(index, row)}: cannot be read ({problem}); no checksums are stored")
    content = pack({"digest": index.digest}, {"checksums": checksums})
    problems = []
    for place in _places(index.root, split):
        try:
            write_whole(place, content)
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
        else:
            return place
    raise DataError(f"the checksums cannot be written: {'; '.join(problems)}")


def differing(index: Index, split: str, *, progress: Progress) -> list[str]:
    """Read every image and return those that differ from their checksums, with the reasons.

    Raises DataError if there are no checksums of this index.
    """
    stored = _stored(index, split)
    current, unread = _read_all(index, progress)
    rows = np.flatnonzero((current != stored).any(axis=1)).tolist()
    reasons = dict.fromkeys(rows, "its bytes do not match the stored checksum") | unread
    return [f"{_name(index, row)}: {reasons[row]}" for row in sorted(reasons)]


def _stored(index: Index, split: str) -> Bytes:
    problem = f"{index.root}: there are no checksums of {split}"
    for place in _places(index.root, split):
        try:
            header, arrays = open_mapped(place)
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            problem = f"{place}: these checksums are damaged"
            continue
        if header["digest"] == index.digest:
            return arrays["checksums"]
        problem = f"{place}: these checksums are of another index"
    raise DataError(
        f"{problem}; store them, while the images are known to be good, with: "
        f"largebatch data verify {index.root} --write"
    )


def _read_all(index: Index, progress: Progress) -> tuple[Bytes, dict[int, str]]:
    """Return the checksum of every image, and the reasons why some cannot be read."""
    checksums = np.zeros((len(index), CHECKSUM_BYTES), dtype=np.uint8)
    unread: dict[int, str] = {}

    def read(rows: range) -> int:
        for row in rows:
            try:
                checksums[row] = np.frombuffer(_checksum(index.locate(row)), dtype=np.uint8)
            except OSError as error:
                unread[row] = str(error.strerror or error)
        return rows.stop

    parts = [range(n, min(n + PART, len(index))) for n in range(0, len(index), PART)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="verify") as pool:
        for done in pool.map(read, parts):
            progress(done, len(index))
    return checksums, unread


def _checksum(location: Location) -> bytes:
    """Return the checksum of an image, or of the remaining bytes if its file was truncated."""
    digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
    file = os.open(location.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        start, end = location.offset, location.offset + location.num_bytes
        while start < end and (chunk := os.pread(file, min(CHUNK, end - start), start)):
            digest.update(chunk)
            start += len(chunk)
    finally:
        os.close(file)
    return digest.digest()


def _name(index: Index, row: int) -> str:
    offset = "" if index.offsets is None else f" (byte {int(index.offsets[row])})"
    return f"{index.paths[row]}{offset}"


def _places(root: Path, split: str) -> tuple[Path, ...]:
    return tuple(place.with_suffix(".checksums") for place in places(root, split))

"""Compare the bytes of every image with checksums that were noted before.

A run compares lengths and times of files, because to read all of them takes an hour. What changes
behind both, on a disk that fails or by a copy that keeps times, shows only here.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from largebatch.data.index.file import Arrays, open_mapped, pack
from largebatch.data.index.index import Index, Location, places
from largebatch.data.types import Bytes
from largebatch.errors import DataError
from largebatch.storage import PART, THREADS, Progress, write_whole

CHECKSUM_BYTES = 16
"""Of an image: enough that no other bytes with the same can be found."""

CHUNK = 2**20
"""How many bytes of an image are in memory at a time."""


def note(index: Index, split: str, *, progress: Progress) -> Path:
    """Read every image and store their checksums; return where.

    Raises DataError where an image cannot be read, or the checksums can be written nowhere.
    """
    found, unread = _read_all(index, progress)
    if unread:
        row, problem = next(iter(unread.items()))
        raise DataError(f"{_name(index, row)}: cannot be read ({problem}); nothing was noted")
    content = pack({"digest": index.digest}, {"checksums": found})
    problems = []
    for place in _places(index.root, split):
        try:
            write_whole(place, content)
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
        else:
            return place
    raise DataError(f"the checksums can be written nowhere: {'; '.join(problems)}")


def differing(index: Index, split: str, *, progress: Progress) -> list[str]:
    """Read every image and return those whose bytes are not the ones that were noted, with why.

    Raises DataError where none were noted of the images in this index.
    """
    noted = _noted(index, split)
    found, unread = _read_all(index, progress)
    rows = np.flatnonzero((found != noted).any(axis=1)).tolist()
    reasons = dict.fromkeys(rows, "its bytes are not the ones that were noted") | unread
    return [f"{_name(index, row)}: {reasons[row]}" for row in sorted(reasons)]


def _noted(index: Index, split: str) -> Bytes:
    """Return what was noted; older checksums beside the images may hide those in the cache."""
    problem = f"{index.root}: there are no checksums of {split}"
    for place in _places(index.root, split):
        try:
            header, arrays = open_mapped(place)
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            problem = f"{place}: these checksums are damaged"
            continue
        if header.get("digest") == index.digest:
            return _checked(arrays, len(index), place)
        problem = f"{place}: these checksums are of another index"
    raise DataError(
        f"{problem}; note them, of images known to be good, with: "
        f"largebatch data verify {index.root} --write"
    )


def _checked(arrays: Arrays, number: int, place: Path) -> Bytes:
    noted = arrays.get("checksums")
    if noted is None or noted.dtype != np.uint8 or noted.shape != (number, CHECKSUM_BYTES):
        raise DataError(f"{place}: these are not the checksums of {number} images; remove the file")
    return noted


def _read_all(index: Index, progress: Progress) -> tuple[Bytes, dict[int, str]]:
    """Return the checksum of every image, and why some cannot be read."""
    found = np.zeros((len(index), CHECKSUM_BYTES), dtype=np.uint8)
    unread: dict[int, str] = {}

    def read(rows: range) -> int:
        for row in rows:
            try:
                found[row] = np.frombuffer(_checksum(index.locate(row)), dtype=np.uint8)
            except OSError as error:
                unread[row] = str(error.strerror or error)
        return rows.stop

    parts = [range(n, min(n + PART, len(index))) for n in range(0, len(index), PART)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="verify") as pool:
        for done in pool.map(read, parts):
            progress(done, len(index))
    return found, unread


def _checksum(location: Location) -> bytes:
    """Return the checksum of an image; of a file that is shorter now, of what there is."""
    digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
    for chunk in _chunks(location):
        digest.update(chunk)
    return digest.digest()


def _chunks(location: Location) -> Iterator[bytes]:
    file = os.open(location.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        start, end = location.offset, location.offset + location.num_bytes
        while start < end and (chunk := os.pread(file, min(CHUNK, end - start), start)):
            yield chunk
            start += len(chunk)
    finally:
        os.close(file)


def _name(index: Index, row: int) -> str:
    offset = "" if index.offsets is None else f" (byte {int(index.offsets[row])})"
    return f"{index.paths[row]}{offset}"


def _places(root: Path, split: str) -> tuple[Path, ...]:
    return tuple(place.with_suffix(".checksums") for place in places(root, split))

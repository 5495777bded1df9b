"""Compare the bytes of every image with stored checksums.

A run compares only lengths and times of files, because reading all of them takes an hour. Changes
that keep both, by a failing disk or a copy that preserves times, are detected only here.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from largebatch.data.decoders.reader import name_of, read
from largebatch.data.index.index import Index, pack, places, unpack
from largebatch.data.types import Bytes
from largebatch.errors import DataError
from largebatch.storage import PART, THREADS, Progress, write_whole

DIGEST_BYTES = 16  # length of an image's checksum


def note(index: Index, split: str, *, progress: Progress) -> Path:
    """Read every image, store the checksums and return the path of their file.

    Raises DataError if an image cannot be read, or if no place is writable.
    """
    checksums, unread = _read_all(index, progress)
    if unread:
        raise DataError(f"{next(iter(unread.values()))}; no checksums are stored")
    for place in _places(index.root, split):
        try:
            write_whole(place, pack({"digest": index.digest}, {"checksums": checksums}))
        except OSError as error:
            problem = f"{place}: the checksums cannot be written: {error.strerror}"
        else:
            return place
    raise DataError(problem)


def differing(index: Index, split: str, *, progress: Progress) -> list[str]:
    """Read every image and return those that differ from their checksums, with the reasons.

    Raises DataError if there are no checksums of this index.
    """
    stored = _stored(index, split)
    current, unread = _read_all(index, progress)
    rows = np.flatnonzero((current != stored).any(axis=1)).tolist()
    wrong = {
        row: f"{name_of(index.locate(row))}: its bytes do not match the stored checksum"
        for row in rows
    }
    return [line for _, line in sorted((wrong | unread).items())]


def _stored(index: Index, split: str) -> Bytes:
    problem = f"{index.root}: there are no checksums of {split}"
    for place in _places(index.root, split):
        try:
            header, arrays = unpack(place.read_bytes())
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
    checksums = np.zeros((len(index), DIGEST_BYTES), dtype=np.uint8)
    unread: dict[int, str] = {}

    def measure(rows: range) -> int:
        for row in rows:
            try:
                digest = hashlib.blake2b(read(index.locate(row)), digest_size=DIGEST_BYTES)
            except DataError as error:
                unread[row] = str(error)
            else:
                checksums[row] = np.frombuffer(digest.digest(), dtype=np.uint8)
        return rows.stop

    parts = [range(n, min(n + PART, len(index))) for n in range(0, len(index), PART)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="verify") as pool:
        for done in pool.map(measure, parts):
            progress(done, len(index))
    return checksums, unread


def _places(root: Path, split: str) -> tuple[Path, ...]:
    return tuple(place.with_suffix(".checksums") for place in places(root, split))

"""A data set in a folder, a bucket or on a web server: what there is, and shards to read.

Objects have the names of the files of a folder: `train/000000.tar`, `classes.txt` and so on. Only
shards are read from a bucket: a million objects of one image each would cost a request each.
"""

import io
import os
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from largebatch.address import WEB, Place
from largebatch.bucket import Bucket, Object, open_bucket
from largebatch.data.index import folder
from largebatch.data.index.folder import CLASSES, File, by_suffix, parse_classes, visible
from largebatch.errors import DataError
from largebatch.storage import write_whole

SHARD_NAME = "{:06d}.tar".format
"""Name of a shard, by its number, as imports write it; a web server has no list of others."""

SHORTEST_READ = 2**13
"""Bytes of a read at a new position. It begins `BEFORE` that position and holds the end of one
image, its label, and the headers of the next image."""

LONGEST_READ = 2**20  # a read that continues the one before it is twice as long, up to this
BEFORE = 1024
KEPT = 4  # number of reads that are kept: headers are read in turn with images before them


def layout(root: Place, split: str) -> tuple[tuple[str, ...], tuple[File, ...]]:
    """Return the names of the class folders and the shards, by name; one of them is empty."""
    if isinstance(root, Path):
        return folder.layout(root, split)
    bucket = open_bucket(root)
    shards = _probe(bucket, split) if root.scheme in WEB else _list(bucket, split)
    if not shards:
        out = "DIR" if root.scheme in WEB else root
        raise DataError(
            f"{root}: there is no {split}/{SHARD_NAME(0)}; expected shards as written by: "
            f"largebatch data import ... --out {out}"
        )
    return (), tuple(File(shard.name, shard.size, shard.version) for shard in shards)


def read_classes(root: Place) -> tuple[str, ...]:
    """Return the names of the classes of shards."""
    if isinstance(root, Path):
        return folder.read_classes(root)
    try:
        content = open_bucket(root).read(CLASSES)
    except FileNotFoundError as error:
        raise DataError(f"{error}; shards need it: a class name per line, by label") from None
    text = content.decode("utf-8", errors="surrogateescape")
    return parse_classes(text, name=str(root / CLASSES))


def list_ignored(root: Place, split: str) -> dict[str, int]:
    """Count the files that the index of a split leaves out, by their suffix."""
    if isinstance(root, Path):
        return folder.list_ignored(root, split)
    if root.scheme in WEB:
        return {}
    names = [entry.name.removeprefix(f"{split}/") for entry in open_bucket(root).objects(split)]
    return by_suffix(
        name
        for name in names
        if all(map(visible, name.split("/"))) and ("/" in name or not name.endswith(".tar"))
    )


def open_shard(root: Place, split: str, shard: File) -> BinaryIO:
    """Open a shard without a buffer: headers are read at positions far from each other."""
    name = f"{split}/{shard.name}"
    if isinstance(root, Path):
        return (root / name).open("rb", buffering=0)
    file = RangedFile(open_bucket(root), name, size=shard.size, version=f"{shard.version}")
    return cast("BinaryIO", file)


def read_place(place: Place, name: str) -> bytes:
    """Return the content of a file in a folder, or of an object below an address."""
    if isinstance(place, Path):
        return (place / name).read_bytes()
    return open_bucket(place).read(name)


def write_place(place: Place, name: str, content: bytes) -> None:
    """Write a file in a folder, or an object below an address, atomically."""
    if isinstance(place, Path):
        write_whole(place / name, content)
    else:
        open_bucket(place).write(name, content)


def _list(bucket: Bucket, split: str) -> list[Object]:
    names = (
        shard._replace(name=shard.name.removeprefix(f"{split}/"))
        for shard in bucket.objects(split)
        if shard.name.endswith(".tar")
    )
    # Not those of folders below, as in a folder.
    shards = (shard for shard in names if "/" not in shard.name and visible(shard.name))
    return sorted(shards, key=lambda shard: os.fsencode(shard.name))


def _probe(bucket: Bucket, split: str) -> list[Object]:
    """Return the shards of a web server: they are numbered, and the first missing one ends them."""
    shards: list[Object] = []
    while True:
        name = SHARD_NAME(len(shards))
        try:
            shards.append(bucket.object(f"{split}/{name}")._replace(name=name))
        except FileNotFoundError:
            return shards


class RangedFile(io.RawIOBase):
    """An object as a file that is read at positions in rising order, mostly.

    A position that follows the read before it is taken for reading on, and the next read is longer.
    """

    def __init__(self, bucket: Bucket, name: str, *, size: int, version: str) -> None:
        self._bucket = bucket
        self._name = name
        self._size = size
        self._version = version
        self._position = 0
        self._length = SHORTEST_READ
        self._reads: list[_Read] = []

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position and return it."""
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        self._position = starts[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, fewer at the end."""
        left = max(0, self._size - self._position)
        length = left if size < 0 else min(size, left)
        if not length:
            return b""
        start = self._position
        self._position += length
        for kept in self._reads:
            if kept.start <= start and start + length <= kept.start + len(kept.content):
                return bytes(kept.content[start - kept.start :][:length])
        return self._fetch(start, length)

    def _fetch(self, start: int, length: int) -> bytes:
        latest = self._reads[-1] if self._reads else _Read(0, memoryview(b""))
        if latest.start <= start <= latest.start + len(latest.content):
            self._length = min(2 * self._length, LONGEST_READ)
        else:
            self._length = SHORTEST_READ
        first = max(0, start - BEFORE)
        end = min(self._size, max(start + length, first + self._length))
        content = self._bucket.read_range(self._name, first, end - first, version=self._version)
        self._reads = [*self._reads[1 - KEPT :], _Read(first, content)]
        return bytes(content[start - first :][:length])


class _Read(NamedTuple):
    start: int
    content: memoryview

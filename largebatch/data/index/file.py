"""One uncompressed file of named arrays that processes map into memory instead of reading.

Mapped pages are shared by all processes of a machine and loaded when they are touched, so a file of
a million rows takes no memory of a process's own. Layout: eight bytes that name the format, the
CRC-32 of all that follows it and the length of a JSON header, both as uint64, the header, then the
arrays, each at a multiple of 64 bytes from where the header ends.
"""

import functools
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from largebatch.data.types import IntArray

Header = Mapping[str, Any]
Arrays = Mapping[str, npt.NDArray[Any]]

MAGIC = b"lbarray2"
START = len(MAGIC) + 16
"""Where the JSON header begins."""

ALIGNMENT = 64
CHUNK = 2**18
"""Bytes that are checked at a time: few enough to stay in a processor's cache."""

FORMAT = 3
"""Of a kept index; one of another format is not used."""


def pack(header: Header, arrays: Arrays) -> bytes:
    """Return the content of a file that holds `header` (plain JSON values) and `arrays`."""
    table, chunks, position = {}, [], 0
    for name, array in arrays.items():
        table[name] = [array.dtype.str, list(array.shape), position]
        padding = -array.nbytes % ALIGNMENT
        chunks += [array.tobytes(), b"\0" * padding]
        position += array.nbytes + padding
    text = json.dumps({"header": header, "arrays": table}).encode("ascii")
    text += b" " * (-(START + len(text)) % ALIGNMENT)
    parts = [struct.pack("<Q", len(text)), text, *chunks]
    checksum = functools.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0)
    return b"".join([MAGIC, struct.pack("<Q", checksum), *parts])


def unpack(content: bytes | mmap.mmap) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return header and arrays, which are views of `content` and cannot be written to.

    Raises ValueError where this is no such file. `open_mapped` sees that it is undamaged.
    """
    if len(content) < START or content[: len(MAGIC)] != MAGIC:
        raise ValueError("this is not a file of arrays")
    _, length = struct.unpack_from("<QQ", content, len(MAGIC))
    found = json.loads(content[START : START + length])
    arrays = {}
    for name, (kind, shape, position) in found["arrays"].items():
        flat = np.frombuffer(
            content, np.dtype(kind), math.prod(shape), offset=START + length + position
        )
        arrays[name] = flat.reshape(shape)
    return found["header"], arrays


def open_mapped(path: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Map a file and return its header and arrays; it stays open as long as one of them is used.

    Raises OSError where there is no such file, ValueError as `unpack` does and where it is not what
    was written: with wrong rows a run would train on wrong pictures and never know. Everyone who
    maps a file checks it, each machine may have one of its own; it is read for that, not mapped, so
    that only pages that are used count as this process's memory.
    """
    with path.open("rb", buffering=0) as file:
        expected = file.read(len(MAGIC) + 8)[len(MAGIC) :]
        checksum = 0
        while chunk := file.read(CHUNK):
            checksum = zlib.crc32(chunk, checksum)
        if struct.pack("<Q", checksum) != expected:
            raise ValueError("this is no file of arrays, or a damaged one")
        return unpack(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class Bad(NamedTuple):
    """A picture that cannot be used."""

    path: str
    """From the root; of one in a shard, the shard's with the member's name."""

    reason: str
    size: int = 0
    mtime: int = 0
    """Of its file, unless that is a shard: it may be mended in its place."""


class Content(NamedTuple):
    """What an index file holds: the pictures that can be used, and those that cannot."""

    header: dict[str, Any]
    arrays: Arrays
    file: Path | None = None
    """What the arrays are mapped from; None: they are in this process's memory."""

    @property
    def bad(self) -> tuple[Bad, ...]:
        """The pictures that were left out."""
        return tuple(Bad(*each) for each in self.header["bad"])


class Paths(Sequence[str]):
    """The path, from the root, of the file that holds each sample, worked out when asked for.

    A million path objects take hundreds of megabytes in every worker; the folders' names, one block
    of all file names and a number for each take thirty, which workers share.
    """

    def __init__(
        self,
        holders: Sequence[str],
        which: IntArray,
        *,
        names: npt.NDArray[np.uint8] | None = None,
        name_ends: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        self._holders: tuple[str, ...] = tuple(holders)
        self._which = which
        self._names = names
        self._ends = name_ends

    def __len__(self) -> int:
        return len(self._which)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[str]: ...
    def __getitem__(self, row: int | slice) -> str | Sequence[str]:
        if isinstance(row, slice):
            return tuple(self[each] for each in range(*row.indices(len(self))))
        row = range(len(self))[row]  # negative ones count from the end, others are IndexErrors
        holder = self._holders[int(self._which[row])]
        if self._names is None or self._ends is None:
            return holder
        start = int(self._ends[row - 1]) if row else 0
        return f"{holder}/{os.fsdecode(self._names[start : int(self._ends[row])].tobytes())}"


def paths(header: Header, arrays: Arrays) -> Paths:
    """Return the paths that an index file states: pictures in class folders, or shards."""
    split = header["split"]
    if "shards" in arrays:
        return Paths([f"{split}/{name}" for name, *_ in header["shards"]], arrays["shards"])
    return Paths(
        [f"{split}/{name}" for name in header["classes"]],
        arrays["labels"],
        names=arrays["names"],
        name_ends=arrays["name_ends"],
    )

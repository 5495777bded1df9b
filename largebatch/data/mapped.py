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
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Header = Mapping[str, Any]
Arrays = Mapping[str, npt.NDArray[Any]]

MAGIC = b"lbarray2"
START = len(MAGIC) + 16
"""Where the JSON header begins."""

ALIGNMENT = 64
CHUNK = 2**18
"""Bytes that are checked at a time: few enough to stay in a processor's cache."""


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

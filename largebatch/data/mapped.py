"""One uncompressed file of named arrays that processes map into memory instead of reading.

Mapped pages are shared by all processes of a machine and loaded when they are touched, so opening
a file of a million rows takes no time and no memory of its own. Layout: eight bytes that name the
format, the length of a JSON header as uint64, the header, then the arrays, each at a multiple of
64 bytes from where the header ends.
"""

import json
import math
import mmap
import struct
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Header = Mapping[str, Any]
Arrays = Mapping[str, npt.NDArray[Any]]

MAGIC = b"lbarray1"
ALIGNMENT = 64


def pack(header: Header, arrays: Arrays) -> bytes:
    """Return the content of a file that holds `header` (plain JSON values) and `arrays`."""
    table, chunks, position = {}, [], 0
    for name, array in arrays.items():
        table[name] = [array.dtype.str, list(array.shape), position]
        padding = -array.nbytes % ALIGNMENT
        chunks += [array.tobytes(), b"\0" * padding]
        position += array.nbytes + padding
    text = json.dumps({"header": header, "arrays": table}).encode("ascii")
    text += b" " * (-(len(MAGIC) + 8 + len(text)) % ALIGNMENT)
    return b"".join([MAGIC, struct.pack("<Q", len(text)), text, *chunks])


def unpack(content: bytes | mmap.mmap) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return header and arrays, which are views of `content` and cannot be written to.

    Raises ValueError where this is no such file or its end is missing.
    """
    start = len(MAGIC) + 8
    if len(content) < start or content[: len(MAGIC)] != MAGIC:
        raise ValueError("this is not a file of arrays")
    (length,) = struct.unpack_from("<Q", content, len(MAGIC))
    found = json.loads(content[start : start + length])
    arrays = {}
    for name, (kind, shape, position) in found["arrays"].items():
        flat = np.frombuffer(
            content, np.dtype(kind), math.prod(shape), offset=start + length + position
        )
        arrays[name] = flat.reshape(shape)
    return found["header"], arrays


def open_mapped(path: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Map a file and return its header and arrays; it stays open as long as one of them is used.

    Raises OSError where there is no such file, ValueError as `unpack` does.
    """
    with path.open("rb") as file:
        return unpack(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, and its folder, so that the file is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)

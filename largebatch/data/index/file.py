"""What an index file holds: named arrays, which processes map into memory instead of reading.

Mapped pages are shared by all processes of a machine and loaded when they are touched, so an index
of a million rows takes no memory of a process's own. The file is one of safetensors, in which the
header, plain JSON values, is an array of bytes like the others, and the checksum the last one.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from largebatch.data.types import IntArray
from largebatch.storage import CHECKSUM_BYTES, checksum, is_undamaged

Header = Mapping[str, Any]
Arrays = Mapping[str, npt.NDArray[Any]]

FORMAT = 5
"""Of an index file; one of another format is not used."""

HEADER = "header"
MAX_HEADER = 2**27
"""Bytes of a header: it lists the images that cannot be used, of which a million are that many."""

CHECKSUM = "~crc32"
"""Of all that comes before it in the file: safetensors puts bytes last, in the order of names."""


def pack(header: Header, arrays: Arrays) -> bytes:
    """Return the content of a file that holds `header` (plain JSON values) and `arrays`."""
    text = np.frombuffer(json.dumps(header).encode("ascii"), np.uint8)
    content = save({**arrays, HEADER: text, CHECKSUM: np.zeros(CHECKSUM_BYTES, np.uint8)})
    content = content[:-CHECKSUM_BYTES]
    return content + checksum([content])


def unpack(content: bytes) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return header and arrays, which cannot be written to, from the content of a file."""
    return _divide(load(content))


def open_mapped(path: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Map a file and return its header and arrays, which cannot be written to.

    Raises OSError where there is no such file, ValueError where it is not what was written: with
    wrong rows a run would train on wrong images and never know. Everyone who maps a file checks
    it, since each machine may have one of its own.
    """
    if not is_undamaged(path):
        raise ValueError(f"{path}: no index, or a damaged one")
    try:
        with safe_open(path, framework="pt") as file:  # NumPy's way would copy
            return _divide({name: file.get_tensor(name).numpy() for name in file.keys()})  # noqa: SIM118 -- no dict
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path}: no index ({error})") from None
    except (TypeError, RecursionError, RuntimeError) as error:  # types that NumPy lacks, brackets
        raise ValueError(f"{path}: no index ({error})") from None


def _divide(
    tensors: dict[str, npt.NDArray[Any]],
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Separate header and arrays."""
    del tensors[CHECKSUM]
    text = tensors.pop(HEADER)
    if text.nbytes > MAX_HEADER:
        raise ValueError(f"its header has {text.nbytes:,} bytes, expected at most {MAX_HEADER:,}")
    header = json.loads(text.tobytes())
    if not isinstance(header, dict):
        raise ValueError("its header is no mapping")  # noqa: TRY004 -- of a file
    for array in tensors.values():
        array.flags.writeable = False
    return header, tensors


class Bad(NamedTuple):
    """An image that cannot be used."""

    path: str
    """From the root; of one in a shard, the shard's with the member's name."""

    reason: str
    size: int = 0
    mtime: int = 0
    """Of its file, unless that is a shard: it may be mended in its place."""


class Ignored(NamedTuple):
    """Files of one kind that are not read."""

    kind: str
    """A suffix such as `.gif`, or where they lie."""

    number: int
    examples: list[str]


class Content(NamedTuple):
    """What an index file holds: the images that can be used, and those that cannot."""

    header: dict[str, Any]
    arrays: Arrays
    file: Path | None = None
    """What the arrays are mapped from; None: they are in this process's memory."""

    @property
    def bad(self) -> tuple[Bad, ...]:
        """The images that were left out."""
        return tuple(Bad(*each) for each in self.header["bad"])

    @property
    def ignored(self) -> tuple[Ignored, ...]:
        """The files that are not read, by kind, as they were when the index was made."""
        return tuple(Ignored(*kind) for kind in self.header["ignored"])


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
    """Return the paths that an index file states: images in class folders, or shards."""
    split = header["split"]
    if "shards" in arrays:
        return Paths([f"{split}/{name}" for name, *_ in header["shards"]], arrays["shards"])
    return Paths(
        [f"{split}/{name}" for name in header["classes"]],
        arrays["labels"],
        names=arrays["names"],
        name_ends=arrays["name_ends"],
    )

"""The format of an index file: named arrays that processes map into memory.

Mapped pages are shared by all processes of a machine and loaded on first use, so an index of a
million rows takes no private memory. The format is safetensors; the header, plain JSON values, is
one of the arrays, as bytes, and the checksum is the last one.
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
"""Version of the format; files of another version are not used."""

HEADER = "header"
MAX_HEADER = 2**27
"""Maximum length of a header in bytes, enough for a list of a million bad images."""

CHECKSUM = "~crc32"
"""Name of the checksum of all preceding bytes: safetensors sorts byte arrays last, by name."""


def pack(header: Header, arrays: Arrays) -> bytes:
    """Return the content of a file with `header` (plain JSON values) and `arrays`."""
    text = np.frombuffer(json.dumps(header).encode("ascii"), np.uint8)
    content = save({**arrays, HEADER: text, CHECKSUM: np.zeros(CHECKSUM_BYTES, np.uint8)})
    content = content[:-CHECKSUM_BYTES]
    return content + checksum([content])


def unpack(content: bytes) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return header and read-only arrays from the content of a file."""
    return _divide(load(content))


def open_mapped(path: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Map a file and return its header and read-only arrays.

    Raises OSError if there is no such file, ValueError if it is damaged: with wrong rows a run
    would silently train on wrong images. Every process that maps a file checks it, because each
    machine may have its own.
    """
    if not is_undamaged(path):
        raise ValueError(f"{path}: not an index, or a damaged one")
    try:
        with safe_open(path, framework="pt") as file:  # framework="np" would copy
            return _divide({name: file.get_tensor(name).numpy() for name in file.keys()})  # noqa: SIM118 -- no dict
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path}: not an index ({error})") from None
    except (TypeError, RecursionError, RuntimeError) as error:  # types NumPy lacks, deep nesting
        raise ValueError(f"{path}: not an index ({error})") from None


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
        raise ValueError("its header is not a mapping")  # noqa: TRY004 -- of a file
    for array in tensors.values():
        array.flags.writeable = False
    return header, tensors


class Bad(NamedTuple):
    """An image that cannot be used."""

    path: str
    """Path from the root; in a shard, the shard's path and the member's name."""

    reason: str
    size: int = 0
    mtime: int = 0
    """Length and modification time of its file, to detect a repaired file; 0 in a shard."""


class Ignored(NamedTuple):
    """Files of one kind that are not read."""

    kind: str
    """Suffix such as `.gif`, or the location."""

    number: int
    examples: list[str]


class Content(NamedTuple):
    """Content of an index file: the usable images and the bad ones."""

    header: dict[str, Any]
    arrays: Arrays
    file: Path | None = None
    """File that the arrays are mapped from; None if they are in this process's memory."""

    @property
    def bad(self) -> tuple[Bad, ...]:
        """Images that were left out."""
        return tuple(Bad(*fields) for fields in self.header["bad"])

    @property
    def ignored(self) -> tuple[Ignored, ...]:
        """Ignored files, by kind, at the time the index was built."""
        return tuple(Ignored(*kind) for kind in self.header["ignored"])


class Paths(Sequence[str]):
    """Path, from the root, of the file of each sample, computed on access.

    A million path objects would take hundreds of megabytes in every worker; the folders' names,
    one block of all file names and a number per file take thirty, which workers share.
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
            return tuple(self[index] for index in range(*row.indices(len(self))))
        row = range(len(self))[row]  # handles negative rows and raises IndexError
        holder = self._holders[int(self._which[row])]
        if self._names is None or self._ends is None:
            return holder
        start = int(self._ends[row - 1]) if row else 0
        return f"{holder}/{os.fsdecode(self._names[start : int(self._ends[row])].tobytes())}"


def paths(header: Header, arrays: Arrays) -> Paths:
    """Return the paths in an index file: images in class folders, or shards."""
    split = header["split"]
    if "shards" in arrays:
        return Paths([f"{split}/{name}" for name, *_ in header["shards"]], arrays["shards"])
    return Paths(
        [f"{split}/{name}" for name in header["classes"]],
        arrays["labels"],
        names=arrays["names"],
        name_ends=arrays["name_ends"],
    )

"""Where the encoded picture of every sample lies, kept small and worked out when it is asked for.

A million path objects take hundreds of megabytes in every worker; the folders' names, one block of
all file names and a number for each take thirty, which workers share.
"""

import os
from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from largebatch.contracts import IntArray
from largebatch.data.mapped import Arrays, Header


class Paths(Sequence[str]):
    """The path, from the root, of the file that holds each sample."""

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

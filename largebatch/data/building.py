"""Read the header of every picture of a split and put the results into arrays.

The arrays, with what a header of plain values says about them, are the content of an index file.
Threads, because they mostly wait for the storage; Python's lock lets them read tens of thousands of
headers a second, so a million pictures take less than a minute on any number of cores.
"""

import hashlib
import json
import os
import stat
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from largebatch.contracts import IntArray
from largebatch.data.headers import BadPictureError, Size, measure_part
from largebatch.data.mapped import Arrays, Header
from largebatch.data.scan import ClassFolder, Shard, Source
from largebatch.data.shards import Unusable, read_shard
from largebatch.errors import DataError
from largebatch.storage import OF_THE_FILE, PART, PAUSES, THREADS, Progress

FORMAT = 3
"""Of a kept index; one of another format is not used."""


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


def build(source: Source, *, progress: Progress | None = None) -> Content:
    """Measure every picture of a split; those that cannot be used are listed and left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of what is judged here
        build_kind = _build_shards if source.shards else _build_files
        arrays, bad = build_kind(source, progress or (lambda _done, _total: None))
    header: dict[str, Any] = {
        "format": FORMAT,
        "split": source.split,
        "classes": list(source.classes),
        "folders": [[folder.name, folder.mtime] for folder in source.folders],
        "shards": [[shard.name, shard.size, shard.mtime] for shard in source.shards],
        "bad": [list(each) for each in bad],
    }
    return Content({**header, "digest": _digest(header, arrays)}, arrays)


def _digest(header: dict[str, Any], arrays: Arrays) -> str:
    """Return a hash of everything listed; it does not depend on where the folder lies."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode("ascii"))
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _build_files(source: Source, progress: Progress) -> tuple[Arrays, list[Bad]]:
    jobs = list(_parts(source))
    total = sum(len(folder.names) for folder in source.folders)
    sizes: list[npt.NDArray[np.int64]] = []
    bad: list[Bad] = []
    done = 0
    with ThreadPoolExecutor(THREADS, thread_name_prefix="headers") as pool:
        results = pool.map(lambda job: _measure_files(source, *job), jobs)
        for (_, part), (found, unusable) in zip(jobs, results, strict=True):
            sizes.append(found)
            bad += unusable
            done += len(part)
            progress(done, total)
    counts = [len(folder.names) for folder in source.folders]
    measured = np.concatenate(sizes)
    names = [os.fsencode(name) for folder in source.folders for name in folder.names]
    usable = measured[:, 0] > 0
    kept = np.flatnonzero(usable)
    listed_names = [names[row] for row in kept.tolist()]
    blob = b"".join(listed_names)
    assert len(blob) < 2**32, "names of 4 GB and more need wider numbers"
    return {
        "labels": np.repeat(np.arange(len(counts), dtype=np.int64), counts)[usable],
        "heights": measured[usable, 0],
        "widths": measured[usable, 1],
        "num_bytes": _column(source, "sizes")[usable],
        "mtimes": _column(source, "mtimes")[usable],
        "names": np.frombuffer(blob, dtype=np.uint8),
        "name_ends": np.cumsum([len(name) for name in listed_names], dtype=np.uint32),
    }, bad


def _column(source: Source, field: str) -> IntArray:
    return np.array([x for folder in source.folders for x in getattr(folder, field)], np.int64)


def _parts(source: Source) -> Iterator[tuple[ClassFolder, range]]:
    """Divide the pictures into jobs of one class each."""
    for folder in source.folders:
        for start in range(0, len(folder.names), PART):
            yield folder, range(start, min(start + PART, len(folder.names)))


def _measure_files(source: Source, folder: ClassFolder, rows: range) -> tuple[IntArray, list[Bad]]:
    """Return the sizes of some pictures of a class, 0 x 0 for those that cannot be used."""
    sizes, bad = np.zeros((len(rows), 2), dtype=np.int64), []
    for place, row in enumerate(rows):
        path = f"{source.split}/{folder.name}/{folder.names[row]}"
        facts = folder.sizes[row], folder.mtimes[row]
        try:
            sizes[place] = _measure_file(f"{source.root}/{path}", folder.sizes[row])
        except BadPictureError as error:
            bad.append(Bad(path, str(error), *facts))
    return sizes, bad


def _measure_file(path: str, num_bytes: int) -> Size:
    """Measure a picture; what is wrong with the disk and not with the file is no bad picture."""
    for pause in (0.0, *PAUSES):
        if pause:  # sleep(0) would hand Python's lock over, for every file
            time.sleep(pause)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe too is opened at once
            try:
                # What is no file has no length.
                if not num_bytes and not stat.S_ISREG(os.fstat(file).st_mode):
                    raise BadPictureError("it is no file but a folder, a pipe or a device")
                return measure_part(file, 0, num_bytes)
            finally:
                os.close(file)
        except OSError as error:
            if error.errno in OF_THE_FILE:
                raise BadPictureError(os.strerror(error.errno)) from None
            problem = error
    raise DataError(
        f"{path}: cannot be read ({problem.strerror}), tried {1 + len(PAUSES)} times; see that the "
        "disk is well"
    )


def _build_shards(source: Source, progress: Progress) -> tuple[Arrays, list[Bad]]:
    rows: list[IntArray] = []
    bad: list[Bad] = []
    with ThreadPoolExecutor(THREADS, thread_name_prefix="headers") as pool:
        results = pool.map(lambda shard: _measure_shard(source, shard), source.shards)
        for done, (found, unusable) in enumerate(results, start=1):
            rows.append(found)
            bad += unusable
            progress(done, len(source.shards))
    columns = np.concatenate(rows).T.copy()
    names = ("labels", "heights", "widths", "offsets", "num_bytes")
    counts = [len(found) for found in rows]
    which = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return {**dict(zip(names, columns, strict=True)), "shards": which}, bad


def _measure_shard(source: Source, shard: Shard) -> tuple[IntArray, list[Bad]]:
    """Return label, height, width, offset and length of every picture of a shard."""
    path = source.root / source.split / shard.name
    rows, bad = [], []
    file = os.open(path, os.O_RDONLY)
    try:
        for found in read_shard(path, len(source.classes)):
            try:
                if isinstance(found, Unusable):
                    raise BadPictureError(found.reason)
                size = measure_part(file, found.offset, found.num_bytes)
                rows.append((found.label, *size, found.offset, found.num_bytes))
            except BadPictureError as error:
                bad.append(Bad(f"{source.split}/{shard.name}/{found.name}", str(error)))
    finally:
        os.close(file)
    return np.array(rows, dtype=np.int64).reshape(-1, 5), bad

"""The index of a split: location, label, height and width of every image.

A bad image must be reported with its path before a run starts, never in the middle of it. So the
header of every image is read once (`make`), and the index is stored in one file beside the images.
Every worker of a machine maps that file into memory: mapped pages are shared by all processes and
loaded on first use, so an index of a million rows takes no private memory. The file is rejected if
the folder has changed, and built again if it is damaged.

The format is safetensors; the header, plain JSON values, is one of the arrays, as bytes, and the
last array is a checksum.

When a run starts, the folder is compared with its index:

- every shard;
- the names of the class folders, and their times, which change when files are added, removed or
  renamed;
- every file of a class folder whose time has changed;
- of the other files at most `MOST`, evenly spaced: a new copy of the data set changes all of them,
  and checking a million files takes seconds on a disk and minutes over a network.

Other files that were overwritten in place are detected when they are read: `Index.locate` returns
the length and time that a file must have. `largebatch data index` compares every file.

Worker 0 opens the index and sends it to the others, with one copy in the memory of each machine: it
broadcasts the path and the digest, and workers that find the file map it. If some do not, because
the machines share no folder, worker 0 broadcasts the bytes, the first worker of each machine writes
them to the user's cache, and the others map that file. These workers compare the lengths of the
images' files but not the times: their folder may be a copy, with other times.
"""

import contextlib
import hashlib
import json
import os
import stat
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from largebatch.data.index.folder import (
    CLASSES,
    ClassFolder,
    Ignored,
    Shard,
    Source,
    layout,
    list_ignored,
    read_classes,
    scan,
    scan_class,
)
from largebatch.data.index.headers import BadImageError, Size, measure_part
from largebatch.data.index.shards import Unusable, read_shard
from largebatch.data.types import Bytes, IntArray
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import broadcast_bytes
from largebatch.errors import DataError, shorten
from largebatch.storage import (
    CHECKSUM_BYTES,
    OF_THE_FILE,
    PART,
    THREADS,
    Mapped,
    Progress,
    checksum,
    is_undamaged,
    read_again,
    silent,
    user_cache,
    write_whole,
)

Arrays = Mapping[str, npt.NDArray[Any]]

FORMAT = 5  # version of the format; files of another version are not used
MOST = 20_000  # maximum number of compared files of unchanged folders, unless all are compared
HEADER = "header"
CHECKSUM = "~crc32"  # of all preceding bytes: safetensors sorts byte arrays last, by name


class Location(NamedTuple):
    """Location of one encoded image."""

    path: Path
    offset: int
    num_bytes: int
    mtime: int | None = None
    """Modification time of the file in nanoseconds; None for a shard, which was compared at the
    start of the run."""


class Bad(NamedTuple):
    """An image that cannot be used."""

    path: str  # path from the root; in a shard, the shard's path and the member's name
    reason: str
    size: int = 0
    mtime: int = 0
    """Length and modification time of its file, to detect a repaired file; 0 in a shard."""


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
        names: Bytes | None = None,
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

    @property
    def paths(self) -> Paths:
        """Paths of the samples: images in class folders, or shards."""
        header, arrays, split = self.header, self.arrays, self.header["split"]
        if "shards" in arrays:
            return Paths([f"{split}/{name}" for name, *_ in header["shards"]], arrays["shards"])
        return Paths(
            [f"{split}/{name}" for name in header["classes"]],
            arrays["labels"],
            names=arrays["names"],
            name_ends=arrays["name_ends"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The images of one split in a fixed order. A sample's number is its row."""

    root: Path  # folder of the splits; `paths` are relative to it
    classes: tuple[str, ...]  # names of the classes, by label
    paths: Sequence[str]  # path of the file of each sample: an image, or a shard of many
    labels: IntArray
    heights: IntArray
    widths: IntArray
    """Height and width of the displayed images in pixels: EXIF orientation is applied."""

    orientations: Bytes | None = None
    """EXIF orientations of the stored images; None if all are upright."""

    num_bytes: IntArray | None = None  # lengths of the encoded images; None for synthetic images
    offsets: IntArray | None = None
    """Positions of the images in their files; None if each is a whole file."""

    mtimes: IntArray | None = None
    """Modification times in nanoseconds; None for shards and synthetic images."""

    bad: tuple[Bad, ...] = ()  # images that cannot be used and were left out
    ignored: tuple[Ignored, ...] = ()  # ignored files, by kind, at the time the index was built
    digest: str = ""  # digest of the content: indexes with the same digest list the same images
    trained: IntArray | None = None
    """Samples that a run may train on, in rising order; None for all."""

    mapped: Mapped | None = None
    """File that the columns are mapped from; None if they are in this process's memory."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def identity(self) -> dict[str, object]:
        """Number of images and digest, for the log; the digest is None for synthetic images."""
        return {"samples": len(self), "digest": self.digest or None}

    def require_whole(self) -> None:
        """Raise DataError if the file that the columns are mapped from was truncated."""
        if self.mapped is not None:
            self.mapped.require_whole()

    def file(self, sample: int) -> str:
        """Return the path of a sample's file as a string, without the cost of a Path."""
        return f"{self.root}/{self.paths[sample]}"

    def locate(self, sample: int) -> Location:
        """Return the file of a sample, and the position of the encoded image in it."""
        assert self.num_bytes is not None, "synthetic images are not read"
        offset = 0 if self.offsets is None else int(self.offsets[sample])
        mtime = None if self.mtimes is None else int(self.mtimes[sample])
        return Location(Path(self.file(sample)), offset, int(self.num_bytes[sample]), mtime)


class BadImagesError(DataError):
    """Some images cannot be used; `bad` lists all of them, the message only the first."""

    def __init__(self, root: Path, split: str, content: Content) -> None:
        self.bad = content.bad
        lines = [f"{path}: {reason}" for path, reason, *_ in self.bad]
        total = len(self.bad) + len(content.arrays["labels"])
        super().__init__(
            f"{root}: {len(self.bad)} of {total} images in {split} cannot be used; replace or "
            f"remove them, or leave them out with: largebatch data index {root} --drop-bad\n  "
            + shorten(lines, between="\n  ")
        )


def pack(header: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Return the content of a file with `header` (plain JSON values) and `arrays`."""
    text = np.frombuffer(json.dumps(header).encode("ascii"), np.uint8)
    content = save({**arrays, HEADER: text, CHECKSUM: np.zeros(CHECKSUM_BYTES, np.uint8)})
    content = content[:-CHECKSUM_BYTES]
    return content + checksum([content])


def unpack(content: bytes) -> tuple[dict[str, Any], Arrays]:
    """Return header and read-only arrays from the content of a file."""
    return _divide(load(content))


def open_mapped(path: Path) -> tuple[dict[str, Any], Arrays]:
    """Map a file and return its header and read-only arrays.

    Raises OSError if there is no such file, ValueError if it is damaged: with wrong rows a run
    would silently train on wrong images. Every process that maps a file checks it, because each
    machine may have its own.
    """
    try:
        if not is_undamaged(path):
            raise ValueError(f"{path}: not an index, or a damaged one")
        with safe_open(path, framework="pt") as file:  # framework="np" would copy
            return _divide({name: file.get_tensor(name).numpy() for name in file.keys()})  # noqa: SIM118 -- no dict
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path}: not an index ({error})") from None


def _divide(tensors: dict[str, npt.NDArray[Any]]) -> tuple[dict[str, Any], Arrays]:
    del tensors[CHECKSUM]
    header = json.loads(tensors.pop(HEADER).tobytes())
    for array in tensors.values():
        array.flags.writeable = False
    return header, tensors


def cached_at(root: Path, name: str) -> Path:
    """Return the path of an index of images in `root` in the user's cache."""
    number = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    return user_cache() / "index" / f"{number}-{name}.index"


def places(root: Path, split: str) -> tuple[Path, Path]:
    """Return the places where the index of a split may be stored, the preferred one first."""
    return root / f".largebatch-{split}.index", cached_at(root, split)


def load_or_read(root: Path, split: str) -> Index:
    """Return the index of a split, stored or built by `open_content`."""
    return index_of(open_content(root, split), root)


def read_folder(root: Path, split: str) -> Index:
    """Read the header of every image of a split and return the index, without storing it.

    Labels number the class folders, sorted bytewise like the images in them; samples in shards
    keep their order. Raises DataError if the folder or an image is invalid.
    """
    return index_of(_read(root, split), root)


def open_content(
    root: Path, split: str, *, every_file: bool = False, progress: Progress = silent
) -> Content:
    """Return the index stored for this folder; build and store one if there is none.

    `every_file` compares all files now, for a run that will not read them. Raises DataError if the
    folder has changed since its index was built.
    """
    reasons = []
    for content in find_stored(root, split):
        changed = difference(content, root, every_file=every_file)
        if changed is None:
            return content
        reasons.append(f"{changed} (the index is {content.file})")
    if reasons:
        raise DataError(
            f"{root}: the folder has changed since its index was built: {reasons[0]}. Rebuild the "
            f"index with: largebatch data index {root}"
        )
    return make(root, split, progress=progress)


def require_stored(root: Path, *, purpose: str) -> None:
    """Raise DataError unless both splits of a folder have a stored index."""
    if root.is_dir() and not all(any(find_stored(root, split)) for split in ("train", "val")):
        raise DataError(
            f"{purpose}: {root}: no index is stored, and a run would build it before the log's "
            f"clock starts; build it now with: largebatch data index {root}"
        )


def find_stored(root: Path, split: str) -> Iterator[Content]:
    """Yield the indexes stored for this folder, the preferred place first; any may be outdated.

    One beside the images is outdated if that folder became read-only: a newer one is in the cache.
    """
    for place in places(root, split):
        with contextlib.suppress(OSError, ValueError):
            content = load_file(place)
            if content.header["split"] == split:
                yield content


def load_file(file: Path) -> Content:
    """Map a stored index; raise OSError or ValueError if it is missing, damaged or outdated."""
    content = Content(*open_mapped(file), file)
    if not isinstance(content.header, dict):
        raise ValueError("not an index")  # noqa: TRY004 -- as other damage
    if content.header.get("format") != FORMAT:
        raise ValueError(f"index format {content.header.get('format')}, expected {FORMAT}")
    return content


def make(root: Path, split: str, *, drop_bad: bool = False, progress: Progress = silent) -> Content:
    """Read the header of every image of a split and store the index.

    Raises BadImagesError if there are bad images, unless `drop_bad`. The index is stored beside
    the images, or in the user's cache if that folder is read-only, or nowhere if both are.
    """
    return _store(_read(root, split, drop_bad=drop_bad, progress=progress), root, split)


def _store(content: Content, root: Path, split: str) -> Content:
    for place in places(root, split):
        with contextlib.suppress(OSError, ValueError):
            write_whole(place, pack(content.header, content.arrays))
            return load_file(place)
    return content


def refresh(root: Path, split: str, *, drop_bad: bool, progress: Progress) -> Content:
    """Return a stored index if every file matches it; otherwise build it again."""
    for content in find_stored(root, split):
        if difference(content, root, every_file=True) is None:
            ignored = list_ignored(root, split)
            if content.ignored == tuple(ignored):
                return content
            # The images are the same, and so is their digest.
            header = {**content.header, "ignored": [list(kind) for kind in ignored]}
            return _store(Content(header, content.arrays), root, split)
    return make(root, split, drop_bad=drop_bad, progress=progress)


def index_of(content: Content, root: Path) -> Index:
    """Return the index with this content, for the images in `root`."""
    header, arrays, _ = content
    return Index(
        root=root,
        classes=tuple(header["classes"]),
        paths=content.paths,
        labels=arrays["labels"],
        heights=arrays["heights"],
        widths=arrays["widths"],
        orientations=arrays["orientations"],
        num_bytes=arrays["num_bytes"],
        offsets=arrays.get("offsets"),
        mtimes=arrays.get("mtimes"),
        bad=content.bad,
        ignored=content.ignored,
        digest=header["digest"],
        mapped=None if content.file is None else Mapped.of(content.file),
    )


def check_same_classes(
    root: Path, train: Sequence[str], val: Sequence[str], *, remedy: str = ""
) -> None:
    """Raise DataError if the classes of the splits differ, so that labels would differ in meaning.

    Also if two names look the same: one class would be two, or be missing under its other form.
    """
    forms: dict[str, set[str]] = {}
    for name in (*train, *val):
        forms.setdefault(unicodedata.normalize("NFC", name), set()).add(name)
    twins = [ascii(name) for names in forms.values() if len(names) > 1 for name in sorted(names)]
    if twins:
        raise DataError(
            f"{root}: these names of classes look the same and differ in Unicode normalisation "
            f"alone: {shorten(twins)}; rename the folders, so that each class has one name"
        )
    if tuple(train) != tuple(val):
        only_train, only_val = sorted(set(train) - set(val)), sorted(set(val) - set(train))
        raise DataError(
            f"{root}: the splits must have the same classes; only in train: {shorten(only_train)}; "
            f"only in val: {shorten(only_val)}{remedy}"
        )


def difference(content: Content, root: Path, *, every_file: bool) -> str | None:
    """Return the first difference between an index and its folder, or None."""
    header = content.header
    try:
        names, shards = layout(root, header["split"])
        if bool(shards) != bool(header["shards"]):
            now, then = ("shards", "class folders") if shards else ("class folders", "shards")
            return f"{header['split']} holds {now}, it held {then}"
        if shards:
            return _shards_differ(header, root, shards)
        return _names_differ(
            header["split"], "class folders", header["classes"], names
        ) or _class_folders_differ(content, root, every_file=every_file)
    except OSError as error:
        raise DataError(f"{root}: cannot be read: {error}") from error


def changed(path: str, then: tuple[int, int], now: tuple[int, int]) -> str | None:
    """Return the difference between a file's (length, time in nanoseconds) pairs, or None.

    >>> changed("a.png", (7, 10**18), (7, 10**18 + 1))  # doctest: +NORMALIZE_WHITESPACE
    'a.png was changed 2001-09-09 01:46:40.000000001 UTC,
     it had been changed 2001-09-09 01:46:40.000000000 UTC'
    """

    def written(nanoseconds: int) -> str:
        seconds, rest = divmod(nanoseconds, 10**9)
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{rest:09d} UTC"

    if then[0] != now[0]:
        return f"{path} has {now[0]:,} bytes, it had {then[0]:,}"
    if then[1] != now[1]:
        return f"{path} was changed {written(now[1])}, it had been changed {written(then[1])}"
    return None


def _shards_differ(header: Mapping[str, Any], root: Path, shards: Sequence[Shard]) -> str | None:
    split = header["split"]
    then = {name: (size, mtime) for name, size, mtime in header["shards"]}
    now = {shard.name: (shard.size, shard.mtime) for shard in shards}
    found = _names_differ(split, "shards", then, now)
    if found:
        return found
    if list(read_classes(root)) != header["classes"]:
        return f"{CLASSES} names other classes"
    return _first(changed(f"{split}/{name}", then[name], now[name]) for name in then)


def _class_folders_differ(content: Content, root: Path, *, every_file: bool) -> str | None:
    header, arrays, _ = content
    paths, sizes, mtimes = content.paths, arrays["num_bytes"], arrays["mtimes"]
    start = f"{root}/"

    def files(rows: range) -> str | None:
        for row in rows:
            path = paths[row]
            try:
                now = os.stat(start + path)  # noqa: PTH116 -- a path object takes longer than the call
            except OSError as error:
                return f"{path}: {error.strerror}"
            then = (int(sizes[row]), int(mtimes[row]))
            if then != (now.st_size, now.st_mtime_ns):
                return changed(path, then, (now.st_size, now.st_mtime_ns))
        return None

    def folder(label: int) -> str | None:
        name, mtime = header["folders"][label]
        place = f"{header['split']}/{name}"
        if (root / place).stat().st_mtime_ns == mtime:
            return None
        rows = range(*np.searchsorted(arrays["labels"], [label, label + 1]).tolist())
        then = [paths[row] for row in rows] + [path for path, *_ in content.bad]
        then = [path.removeprefix(f"{place}/") for path in then if path.startswith(f"{place}/")]
        now = scan_class(root / header["split"], name).names
        return _names_differ(place, "images", then, now) or files(rows)

    def bad(image: Bad) -> str | None:
        try:
            now = (root / image.path).stat()
        except OSError:  # a broken link
            now = (root / image.path).lstat()
        return changed(image.path, image[2:], (now.st_size, now.st_mtime_ns))

    rows = range(0, len(sizes), 1 if every_file else -(-len(sizes) // MOST))
    parts = [rows[start : start + PART] for start in range(0, len(rows), PART)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="compare") as pool:
        return (
            _first(pool.map(folder, range(len(header["folders"]))))
            or _first(pool.map(files, parts))
            or _first(map(bad, content.bad))
        )


def _first(differences: Iterable[str | None]) -> str | None:
    return next(filter(None, differences), None)


def _names_differ(place: str, kind: str, then: Iterable[str], now: Iterable[str]) -> str | None:
    before, after = set(then), set(now)
    if before == after:
        return None
    return (
        f"{place} holds {len(after)} {kind}, it held {len(before)} (new: "
        f"{shorten(sorted(after - before))}; gone: {shorten(sorted(before - after))})"
    )


def _read(
    root: Path, split: str, *, drop_bad: bool = False, progress: Progress = silent
) -> Content:
    """Measure every image of a split, in threads, because they mostly wait for the storage.

    Under Python's lock they read ten thousand headers per second, so a million images take less
    than two minutes on any number of cores.
    """
    try:
        source = scan(root, split)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about what is checked here
            measure = _measure_shards if source.shards else _measure_folders
            arrays, bad = measure(source, progress)
        ignored = [list(kind) for kind in list_ignored(root, split)]
    except OSError as error:
        raise DataError(f"{root}: cannot be read: {error}") from error
    header: dict[str, Any] = {
        "format": FORMAT,
        "split": split,
        "classes": list(source.classes),
        "folders": [[folder.name, folder.mtime] for folder in source.folders],
        "shards": [[shard.name, shard.size, shard.mtime] for shard in source.shards],
        "bad": [list(image) for image in bad],
    }
    # The digest does not depend on the location of the folder, nor on ignored files.
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode("ascii"))
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).data)
    content = Content({**header, "digest": digest.hexdigest(), "ignored": ignored}, arrays)
    if bad and not drop_bad:
        raise BadImagesError(root, split, content)
    counts = np.bincount(arrays["labels"], minlength=len(source.classes))
    missing = [name for name, count in zip(source.classes, counts, strict=True) if not count]
    if missing:
        raise DataError(
            f"{root / split}: {len(missing)} of {len(source.classes)} classes have no image that "
            f"can be used: {shorten(missing)}"
        )
    return content


def _measure_folders(source: Source, progress: Progress) -> tuple[Arrays, list[Bad]]:
    jobs = [
        (folder, range(start, min(start + PART, len(folder.names))))
        for folder in source.folders
        for start in range(0, len(folder.names), PART)
    ]
    total = sum(len(folder.names) for folder in source.folders)
    sizes: list[IntArray] = []
    bad: list[Bad] = []
    done = 0
    with ThreadPoolExecutor(THREADS, thread_name_prefix="headers") as pool:
        results = pool.map(lambda job: _measure_files(source, *job), jobs)
        for (_, rows), (measured_part, unusable) in zip(jobs, results, strict=True):
            sizes.append(measured_part)
            bad += unusable
            done += len(rows)
            progress(done, total)
    counts = [len(folder.names) for folder in source.folders]
    measured = np.concatenate(sizes)
    usable = measured[:, 0] > 0
    all_names = [os.fsencode(name) for folder in source.folders for name in folder.names]
    names = [all_names[row] for row in np.flatnonzero(usable).tolist()]
    blob = b"".join(names)
    assert len(blob) < 2**32, "names of 4 GB and more need wider integers"
    return {
        "labels": np.repeat(np.arange(len(counts), dtype=np.int64), counts)[usable],
        "heights": measured[usable, 0],
        "widths": measured[usable, 1],
        "orientations": measured[usable, 2].astype(np.uint8),
        "num_bytes": np.array([x for f in source.folders for x in f.sizes], np.int64)[usable],
        "mtimes": np.array([x for f in source.folders for x in f.mtimes], np.int64)[usable],
        "names": np.frombuffer(blob, dtype=np.uint8),
        "name_ends": np.cumsum([len(name) for name in names], dtype=np.uint32),
    }, bad


def _measure_files(source: Source, folder: ClassFolder, rows: range) -> tuple[IntArray, list[Bad]]:
    """Return the sizes of some images of a class, zeros for bad ones."""
    sizes, bad = np.zeros((len(rows), len(Size._fields)), dtype=np.int64), []
    for place, row in enumerate(rows):
        path = f"{source.split}/{folder.name}/{folder.names[row]}"
        read = partial(_measure_file, f"{source.root}/{path}", folder.sizes[row])
        try:
            try:
                sizes[place] = read()
            except OSError as error:  # of the disk, which does not make it a bad image
                sizes[place] = read_again(read, error, name=f"{source.root}/{path}")
        except BadImageError as error:
            bad.append(Bad(path, str(error), folder.sizes[row], folder.mtimes[row]))
    return sizes, bad


def _measure_file(path: str, num_bytes: int) -> Size:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not block
        try:
            # Only special files and empty ones have length 0.
            if not num_bytes and not stat.S_ISREG(os.fstat(file).st_mode):
                raise BadImageError("it is not a file but a folder, a pipe or a device")
            return measure_part(file, 0, num_bytes)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in OF_THE_FILE:
            raise BadImageError(os.strerror(error.errno)) from None
        raise


def _measure_shards(source: Source, progress: Progress) -> tuple[Arrays, list[Bad]]:
    rows: list[IntArray] = []
    bad: list[Bad] = []
    with ThreadPoolExecutor(THREADS, thread_name_prefix="headers") as pool:
        results = pool.map(lambda shard: _measure_shard(source, shard), source.shards)
        for done, (measured, unusable) in enumerate(results, start=1):
            rows.append(measured)
            bad += unusable
            progress(done, len(source.shards))
    columns = np.concatenate(rows).T.copy()
    names = ("labels", "heights", "widths", "orientations", "offsets", "num_bytes")
    counts = [len(measured) for measured in rows]
    shards = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    arrays = {**dict(zip(names, columns, strict=True)), "shards": shards}
    return {**arrays, "orientations": arrays["orientations"].astype(np.uint8)}, bad


def _measure_shard(source: Source, shard: Shard) -> tuple[IntArray, list[Bad]]:
    """Return label, height, width, orientation, offset and length of every image of a shard."""
    path = source.root / source.split / shard.name
    rows, bad = [], []
    with path.open("rb", buffering=0) as file:
        for member in read_shard(path, len(source.classes)):
            try:
                if isinstance(member, Unusable):
                    raise BadImageError(member.reason)
                size = measure_part(file.fileno(), member.offset, member.num_bytes)
                rows.append((member.label, *size, member.offset, member.num_bytes))
            except BadImageError as error:
                bad.append(Bad(f"{source.split}/{shard.name}/{member.name}", str(error)))
    return np.array(rows, dtype=np.int64).reshape(-1, 6), bad


def share_index(root: Path | None, content: Content | None, backend: Backend) -> Index:
    """Return worker 0's index of the images in `root` on every worker; other workers pass None."""
    note = None
    if content is not None:
        file = None if content.file is None else str(content.file.resolve())
        about = [str(root), content.header["split"], content.header["digest"]]
        note = json.dumps([*about, file, _identity(content.file)]).encode("ascii")
    folder, split, digest, file, identity = json.loads(broadcast_bytes(note, backend))
    if content is None and file is not None:
        content = _find(Path(file), digest)
    original = backend.rank == 0 or (content is not None and _identity(content.file) == identity)
    missing = torch.tensor([content is None], dtype=torch.int64, device=backend.device)
    backend.all_reduce(missing).wait()
    if missing.item():  # sync: once, before training
        packed = None
        if backend.rank == 0:
            assert content is not None
            packed = pack(content.header, content.arrays)
        packed = broadcast_bytes(packed, backend)
        # Named by the folder, not the digest, so that a rebuilt index replaces the previous one.
        place = cached_at(Path(folder), f"{split}-sent")
        if backend.local_rank == 0:
            with contextlib.suppress(OSError):
                write_whole(place, packed)
        backend.barrier()
        content = content or _find(place, digest) or Content(*unpack(packed))
    assert content is not None
    index = index_of(content, Path(folder))
    # A machine may have a copy of the folder, whose files have other times.
    return index if original else replace(index, mtimes=None)


def _identity(file: Path | None) -> list[int] | None:
    """Return what identifies a file on all machines that share it, but differs in a copy."""
    try:
        status = None if file is None else file.stat()
    except OSError:
        return None
    return None if status is None else [status.st_ino, status.st_mtime_ns]


def _find(file: Path, digest: str) -> Content | None:
    with contextlib.suppress(OSError, ValueError):
        content = load_file(file)
        if content.header["digest"] == digest:
            return content
    return None

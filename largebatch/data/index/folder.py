"""List the files of one split without opening any, and compare them with what an index says.

Both lie in `root/split`: `<class>/*`, with the class folders' names as classes, or `*.tar` with the
names of the classes in `root/classes.txt`. Which it is shows in what is there.

When a run starts, these are compared with its index: every shard; of class folders their names, and
their own times, which show files that came, went or were renamed; every file of a folder with
another time; and of the rest at most `MOST`, spread evenly, since a copy made anew shows in any of
them, and to ask for a million files takes seconds on a disk and minutes over a network. What this
leaves out, files overwritten in place, shows when they are read: `Index.locate` gives the length
and time that a file must have when it is opened. `largebatch data index` compares every file. In
threads, because over a network they mostly wait.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from largebatch.data.index.file import Content, Paths, paths
from largebatch.errors import DataError, shorten
from largebatch.storage import PART, THREADS

JPEG = (".jfif", ".jpe", ".jpeg", ".jpg")
EXTENSIONS = (".bmp", *JPEG, ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""What both decoders read. Other files are ignored, and counted by `ignored`; names that begin with
a dot are not looked at."""

CLASSES = "classes.txt"
"""Beside shards: the names of the classes, one a line, in the order of their labels."""

MOST = 20_000
"""Files of unchanged folders whose length and time are compared, unless all are to be."""


@dataclass(frozen=True, slots=True)
class ClassFolder:
    """The images of one class, sorted bytewise, with their lengths and times of change."""

    name: str
    mtime: int
    """Of the folder, in nanoseconds: adding, removing and renaming files changes it."""

    names: list[str]
    sizes: list[int]
    mtimes: list[int]


@dataclass(frozen=True, slots=True)
class Shard:
    """One tar file."""

    name: str
    size: int
    mtime: int


@dataclass(frozen=True, slots=True)
class Source:
    """What `root/split` holds: class folders or shards."""

    root: Path
    split: str
    classes: tuple[str, ...]
    folders: tuple[ClassFolder, ...] = ()
    shards: tuple[Shard, ...] = ()


def scan(root: Path, split: str) -> Source:
    """List what there is; raise DataError where it is neither class folders nor shards."""
    names, shards = layout(root, split)
    if shards:
        return Source(root, split, classes=read_classes(root), shards=shards)
    folder = root / split
    folders = tuple(scan_class(folder, name) for name in names)
    empty = [scanned.name for scanned in folders if not scanned.names]
    if empty:
        raise DataError(
            f"{folder}: {len(empty)} of {len(names)} class folders hold no images "
            f"({' '.join(EXTENSIONS)}): {shorten(empty)}; add images or remove the folders, or "
            "copy what lies in folders below: largebatch data import imagefolder"
        )
    return Source(root, split, classes=names, folders=folders)


def layout(root: Path, split: str) -> tuple[tuple[str, ...], tuple[Shard, ...]]:
    """Return the names of the class folders and the shards, of which one is empty."""
    folder = root / split
    expected = f"expected {root}/{split}/<class>/*.jpg or {root}/{split}/*.tar"
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder; {expected}")
    if not folder.is_dir():
        raise DataError(
            f"{folder}: there is no such folder; {expected}; found {_found(root)}. Class folders "
            "alone are divided, and splits of other names are taken, by: largebatch data import "
            "imagefolder (--val-fraction, --val-name)"
        )
    with os.scandir(folder) as scanned:
        entries = sorted(
            (entry for entry in scanned if visible(entry.name)), key=lambda e: os.fsencode(e.name)
        )
    names = tuple(entry.name for entry in entries if entry.is_dir())
    tars = [entry for entry in entries if entry.name.endswith(".tar") and entry.is_file()]
    shards = tuple(Shard(e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in tars)
    if names and shards:
        raise DataError(
            f"{folder}: there are both class folders ({shorten(names)}) and shards "
            f"({shorten([shard.name for shard in shards])}); leave one of them"
        )
    if not names and not shards:
        raise DataError(
            f"{folder}: there are no class folders and no shards; {expected}; "
            f"found {_found(folder)}"
        )
    return names, shards


def scan_class(folder: Path, name: str) -> ClassFolder:
    """List the images of one class."""
    mtime = (folder / name).stat().st_mtime_ns  # before listing: what is added later shows
    with os.scandir(folder / name) as entries:
        found = [
            (os.fsencode(entry.name), entry.name, _stat(entry))
            for entry in entries
            if is_image(entry.name) and not entry.is_dir()
        ]
    found.sort(key=lambda image: image[0])
    return ClassFolder(
        name=name,
        mtime=mtime,
        names=[text for _, text, _ in found],
        sizes=[stat.st_size for *_, stat in found],
        mtimes=[stat.st_mtime_ns for *_, stat in found],
    )


def read_classes(root: Path) -> tuple[str, ...]:
    """Return the names of the classes of shards."""
    path = root / CLASSES
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; beside shards it gives the names of the classes, one a "
            f"line, in the order of their labels"
        ) from None
    names = tuple(text.removesuffix("\n").split("\n"))
    if len(set(names)) < len(names) or not all(map(is_class_name, names)):
        raise DataError(
            f"{path}: expected one different name a line, in the order of the labels; found "
            f"{shorten(names)}"
        )
    return names


def is_class_name(name: str) -> bool:
    r"""Return whether a line of CLASSES can hold this name, and every reader sees where it ends.

    >>> [is_class_name(name) for name in ("cat", "", "c\0at", "c\nat", "c\x0bat")]
    [True, False, False, False, False]
    """
    return name.splitlines() == [name] and "\0" not in name


def is_image(name: str) -> bool:
    """Return whether a file of this name is taken for an image."""
    return visible(name) and name.lower().endswith(EXTENSIONS)


def visible(name: str) -> bool:
    """Return whether a name is not a hidden one."""
    return not name.startswith(".")


def _stat(entry: os.DirEntry[str]) -> os.stat_result:
    return entry.stat(follow_symlinks=entry.is_file())  # of a link to nowhere, the link's own


def _found(folder: Path) -> str:
    return shorten(sorted(path.name for path in folder.iterdir()))


def difference(content: Content, root: Path, *, every_file: bool) -> str | None:
    """Return the first difference found between an index and its folder, None if there is none."""
    header = content.header
    names, shards = layout(root, header["split"])
    if bool(shards) != bool(header["shards"]):
        now, then = ("shards", "class folders") if shards else ("class folders", "shards")
        return f"{header['split']} holds {now}, it held {then}"
    if shards:
        return _shards(content, root, {shard.name: (shard.size, shard.mtime) for shard in shards})
    names_differ = _names(header["split"], "class folders", header["classes"], names)
    return names_differ or _class_folders(content, root, every_file=every_file)


def changed(path: str, then: tuple[int, int], now: tuple[int, int]) -> str | None:
    """Compare a file's lengths, then its times of change in nanoseconds; None: they are the same.

    >>> changed("a.png", (7, 10**18), (7, 10**18 + 1))  # doctest: +NORMALIZE_WHITESPACE
    'a.png was changed 2001-09-09 01:46:40.000000001 UTC,
     it had been changed 2001-09-09 01:46:40.000000000 UTC'
    """
    if then[0] != now[0]:
        return f"{path} has {now[0]:,} bytes, it had {then[0]:,}"
    if then[1] != now[1]:
        return f"{path} was changed {_time(now[1])}, it had been changed {_time(then[1])}"
    return None


def _shards(content: Content, root: Path, found: dict[str, tuple[int, int]]) -> str | None:
    header = content.header
    then = {name: (size, mtime) for name, size, mtime in header["shards"]}
    differing = _names(header["split"], "shards", tuple(then), tuple(found))
    if differing:
        return differing
    if list(read_classes(root)) != header["classes"]:
        return f"{CLASSES} names other classes"
    for name, (size, mtime) in then.items():
        differing = changed(f"{header['split']}/{name}", (size, mtime), found[name])
        if differing:
            return differing
    return None


def _class_folders(content: Content, root: Path, *, every_file: bool) -> str | None:
    number = len(content.arrays["labels"])
    rows = range(0, number, 1 if every_file else -(-number // MOST))
    parts = [rows[start : start + PART] for start in range(0, len(rows), PART)]
    known = paths(content.header, content.arrays)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="compare") as pool:
        labels = range(len(content.header["folders"]))
        return (
            _first(pool.map(lambda label: _folder(content, known, root, label), labels))
            or _first(pool.map(lambda part: _files(content, known, root, part), parts))
            or _bad_files(content, root)
        )


def _first(found: Iterator[str | None]) -> str | None:
    return next(filter(None, found), None)


def _folder(content: Content, known: Paths, root: Path, label: int) -> str | None:
    """Compare a class folder if its time is another."""
    header, arrays, _ = content
    name, mtime = header["folders"][label]
    place = f"{header['split']}/{name}"
    if (root / place).stat().st_mtime_ns == mtime:
        return None
    rows = range(*np.searchsorted(arrays["labels"], [label, label + 1]).tolist())
    then = [os.path.basename(known[row]) for row in rows]  # noqa: PTH119 -- a string
    bad = [path for path, *_ in content.bad if path.startswith(f"{place}/")]
    then += [path.removeprefix(f"{place}/") for path in bad]
    now = scan_class(root / header["split"], name).names
    return _names(place, "images", then, now) or _files(content, known, root, rows)


def _bad_files(content: Content, root: Path) -> str | None:
    for path, _, size, mtime in content.bad:
        try:
            stat = (root / path).stat()
        except OSError:  # a link to nowhere
            stat = (root / path).lstat()
        differing = changed(path, (size, mtime), (stat.st_size, stat.st_mtime_ns))
        if differing:
            return differing
    return None


def _files(content: Content, known: Paths, root: Path, rows: range) -> str | None:
    sizes, mtimes = content.arrays["num_bytes"], content.arrays["mtimes"]
    start = f"{root}/"
    for row in rows:
        path = known[row]
        try:
            stat = os.stat(start + path)  # noqa: PTH116 -- a path object takes longer than the call
        except OSError as error:
            return f"{path}: {error.strerror}"
        then = (int(sizes[row]), int(mtimes[row]))
        if then != (stat.st_size, stat.st_mtime_ns):
            return changed(path, then, (stat.st_size, stat.st_mtime_ns))
    return None


def _names(place: str, kind: str, then: Iterable[str], now: Iterable[str]) -> str | None:
    before, after = set(then), set(now)
    if before == after:
        return None
    return (
        f"{place} holds {len(after)} {kind}, it held {len(before)} (new: "
        f"{shorten(sorted(after - before))}; gone: {shorten(sorted(before - after))})"
    )


def _time(nanoseconds: int) -> str:
    """Return a time with all its digits: two that differ must look it."""
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{rest:09d} UTC"

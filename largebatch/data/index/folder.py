"""List the files of one split without opening any, and compare them with an index.

A split is in `root/split`: either class folders, `<class>/*`, or shards, `*.tar`, with the names of
the classes in `root/classes.txt`. The content of the folder decides which.

When a run starts, the folder is compared with its index:

- every shard;
- the names of the class folders, and their times, which change when files are added, removed or
  renamed;
- every file of a class folder whose time has changed;
- of the other files at most `MOST`, evenly spaced: a new copy of the data set changes all of them,
  and checking a million files takes seconds on a disk and minutes over a network.

Other files that were overwritten in place are detected when they are read: `Index.locate` returns
the length and time that a file must have. `largebatch data index` compares every file. Threads are
used because over a network they mostly wait.
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
"""Suffixes that both decoders read. Other files are ignored and counted by `ignored`; hidden files
are skipped."""

SYSTEM = frozenset(
    (
        *("@eadir", "@recently-snapshot", "@recycle", "@sharebin", "@synoresource", "@tmp"),
        *("#recycle", "#snapshot", "~snapshot", "$recycle.bin", "recycler", "lost+found"),
        *("__macosx", "network trash folder", "system volume information", "temporary items"),
    )
)
"""Folders, in lower case, in which systems and their storage keep thumbnails, deleted files and
older copies of a user's. They are counted by `ignored`."""

CLASSES = "classes.txt"
"""File beside shards with the names of the classes, one per line, in the order of their labels."""

MOST = 20_000
"""Maximum number of compared files of unchanged folders, unless all are compared."""


@dataclass(frozen=True, slots=True)
class ClassFolder:
    """The images of one class, sorted bytewise, with their lengths and modification times."""

    name: str
    mtime: int
    """Modification time of the folder in nanoseconds: adding and removing files changes it."""

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
    """Content of `root/split`: class folders or shards."""

    root: Path
    split: str
    classes: tuple[str, ...]
    folders: tuple[ClassFolder, ...] = ()
    shards: tuple[Shard, ...] = ()


def scan(root: Path, split: str) -> Source:
    """List class folders or shards; raise DataError if there are neither."""
    names, shards = layout(root, split)
    if shards:
        return Source(root, split, classes=read_classes(root), shards=shards)
    folder = root / split
    folders = tuple(scan_class(folder, name) for name in names)
    empty = [scanned.name for scanned in folders if not scanned.names]
    if empty:
        raise DataError(
            f"{folder}: {len(empty)} of {len(names)} class folders hold no images "
            f"({' '.join(EXTENSIONS)}): {shorten(empty)}; add images, remove the folders, or "
            "import images of subfolders: largebatch data import imagefolder"
        )
    return Source(root, split, classes=names, folders=folders)


def layout(root: Path, split: str) -> tuple[tuple[str, ...], tuple[Shard, ...]]:
    """Return the names of the class folders and the shards; one of them is empty."""
    folder = root / split
    expected = f"expected {root}/{split}/<class>/*.jpg or {root}/{split}/*.tar"
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder; {expected}")
    if not folder.is_dir():
        raise DataError(
            f"{folder}: there is no such folder; {expected}; found {_found(root)}. To divide class "
            "folders, or for splits of other names: largebatch data import imagefolder "
            "(--val-fraction, --val-name)"
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
            f"({shorten([shard.name for shard in shards])}); keep only one kind"
        )
    if not names and not shards:
        raise DataError(
            f"{folder}: there are no class folders and no shards; {expected}; found "
            f"{_found(folder)}. For images with a list of classes, such as ImageNet's val: "
            "largebatch data import imagefolder"
        )
    return names, shards


def scan_class(folder: Path, name: str) -> ClassFolder:
    """List the images of one class."""
    mtime = (folder / name).stat().st_mtime_ns  # before listing, so that later files are detected
    with os.scandir(folder / name) as entries:
        images = [
            # A broken link has the facts of the link itself.
            (entry.name, entry.stat(follow_symlinks=entry.is_file()))
            for entry in entries
            if is_image(entry.name) and not entry.is_dir()
        ]
    images.sort(key=lambda image: os.fsencode(image[0]))
    return ClassFolder(
        name=name,
        mtime=mtime,
        names=[name for name, _ in images],
        sizes=[stat.st_size for _, stat in images],
        mtimes=[stat.st_mtime_ns for _, stat in images],
    )


def read_classes(root: Path) -> tuple[str, ...]:
    """Return the names of the classes of shards."""
    path = root / CLASSES
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; shards need this file, with the names of the classes, one "
            f"per line, in the order of their labels"
        ) from None
    names = tuple(text.removesuffix("\n").split("\n"))
    if len(set(names)) < len(names) or not all(map(is_class_name, names)):
        raise DataError(
            f"{path}: expected one unique name per line, in the order of the labels; found "
            f"{shorten(names)}"
        )
    return names


def is_class_name(name: str) -> bool:
    r"""Return True if a name fits on a line of CLASSES for any line-splitting rule.

    >>> [is_class_name(name) for name in ("cat", "", "c\0at", "c\nat", "c\x0bat")]
    [True, False, False, False, False]
    """
    return name.splitlines() == [name] and "\0" not in name


def is_image(name: str) -> bool:
    """Return True if a file of this name is read as an image."""
    return visible(name) and name.lower().endswith(EXTENSIONS)


def visible(name: str) -> bool:
    """Return True if a name is neither hidden nor one of SYSTEM."""
    return not name.startswith(".") and name.lower() not in SYSTEM


def is_system(path: str) -> bool:
    """Return True if a path leads through a folder of SYSTEM.

    >>> [is_system(path) for path in ("cat/@eaDir/a.jpg/S.jpg", "cat/lost+found.jpg")]
    [True, False]
    """
    return not SYSTEM.isdisjoint(path.lower().split("/"))


def _found(folder: Path) -> str:
    return shorten(sorted(path.name for path in folder.iterdir()))


def difference(content: Content, root: Path, *, every_file: bool) -> str | None:
    """Return the first difference between an index and its folder, or None."""
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
    """Return the difference between a file's (length, time in nanoseconds) pairs, or None.

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


def _first(differences: Iterator[str | None]) -> str | None:
    return next(filter(None, differences), None)


def _folder(content: Content, known: Paths, root: Path, label: int) -> str | None:
    """Return the first difference in a class folder whose time has changed, or None."""
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
        except OSError:  # a broken link
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
    """Format a time with all its digits, so that different times look different."""
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{rest:09d} UTC"

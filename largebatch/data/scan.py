"""List the files of one split without opening any: class folders of pictures, or tar shards.

Both lie in `root/split`: `<class>/*`, with the class folders' names as classes, or `*.tar` with the
names of the classes in `root/classes.txt`. Which it is shows in what is there.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from largebatch.errors import DataError

EXTENSIONS = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""What both decoders read. Other files, and names that begin with a dot, are ignored."""

CLASSES = "classes.txt"
"""Beside shards: the names of the classes, one a line, in the order of their labels."""

SHOWN = 10
"""How many names a message lists."""


@dataclass(frozen=True, slots=True)
class ClassFolder:
    """The pictures of one class, sorted bytewise, with their lengths and times of change."""

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
            f"{folder}: {len(empty)} of {len(names)} class folders hold no pictures "
            f"({' '.join(EXTENSIONS)}): {listed(empty)}; add pictures or remove the folders, or "
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
        raise DataError(f"{folder}: there is no such folder; {expected}; found {_found(root)}")
    with os.scandir(folder) as scanned:
        entries = sorted(
            (entry for entry in scanned if visible(entry.name)), key=lambda e: os.fsencode(e.name)
        )
    names = tuple(entry.name for entry in entries if entry.is_dir())
    tars = [entry for entry in entries if entry.name.endswith(".tar") and entry.is_file()]
    shards = tuple(Shard(e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in tars)
    if names and shards:
        raise DataError(
            f"{folder}: there are both class folders ({listed(names)}) and shards "
            f"({listed([shard.name for shard in shards])}); leave one of them"
        )
    if not names and not shards:
        raise DataError(
            f"{folder}: there are no class folders and no shards; {expected}; "
            f"found {_found(folder)}"
        )
    return names, shards


def scan_class(folder: Path, name: str) -> ClassFolder:
    """List the pictures of one class."""
    mtime = (folder / name).stat().st_mtime_ns  # before listing: what is added later shows
    with os.scandir(folder / name) as entries:
        found = [
            (os.fsencode(entry.name), entry.name, _stat(entry))
            for entry in entries
            if is_picture(entry.name) and not entry.is_dir()
        ]
    found.sort(key=lambda picture: picture[0])
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
        names = tuple(path.read_text(encoding="utf-8", errors="surrogateescape").splitlines())
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; beside shards it gives the names of the classes, one a "
            f"line, in the order of their labels"
        ) from None
    if not names or len(set(names)) < len(names) or "" in names:
        raise DataError(
            f"{path}: expected one different name a line, in the order of the labels; found "
            f"{listed(names)}"
        )
    return names


def is_picture(name: str) -> bool:
    """Say whether a file of this name is taken for a picture."""
    return visible(name) and name.lower().endswith(EXTENSIONS)


def visible(name: str) -> bool:
    """Say whether a name is not a hidden one."""
    return not name.startswith(".")


def listed(names: Sequence[str]) -> str:
    """Return the first few names in words."""
    shown = ", ".join(names[:SHOWN]) or "nothing"
    return f"{shown}, ..." if len(names) > SHOWN else shown


def _stat(entry: os.DirEntry[str]) -> os.stat_result:
    return entry.stat(follow_symlinks=entry.is_file())  # of a link to nowhere, the link's own


def _found(folder: Path) -> str:
    return listed(sorted(path.name for path in folder.iterdir()))

"""List the files of one split without opening any, and count the ignored ones.

A split is in `root/split`: either class folders, `<class>/*`, or shards, `*.tar`, with the names of
the classes in `root/classes.txt`. The content of the folder decides which.

Images of other formats or in other places must not be lost silently: `data index` and `data import`
print the counts of ignored files, by kind and with the first names of each, and a run logs them at
its start. Hidden files belong to the system or to this package and are not counted, except in
folders of the system. Nor are other members of a sample in a shard; a sample without an image is a
bad one.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from largebatch.errors import DataError, shorten

JPEG = (".jfif", ".jpe", ".jpeg", ".jpg")
EXTENSIONS = (".bmp", *JPEG, ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Suffixes that both decoders read. Other files are ignored and counted; hidden files are
skipped."""

SYSTEM = frozenset(
    (
        *("@eadir", "@recently-snapshot", "@recycle", "@sharebin", "@synoresource", "@tmp"),
        *("#recycle", "#snapshot", "~snapshot", "$recycle.bin", "recycler", "lost+found"),
        *("__macosx", "network trash folder", "system volume information", "temporary items"),
    )
)
"""Folders, in lower case, in which systems and their storage keep thumbnails, deleted files and
older copies of a user's. They are counted."""

CLASSES = "classes.txt"
"""File beside shards with the names of the classes, one per line, in the order of their labels."""

EXAMPLES = 3  # number of example names per kind of ignored files
LOOSE = "beside the class folders or shards"
NESTED = "in subfolders of a class (`largebatch data import imagefolder` reads those)"
SYSTEMS = "in folders of the system, such as @eaDir and #recycle"


class Ignored(NamedTuple):
    """Files of one kind that are not read."""

    kind: str  # suffix such as `.gif`, or the location
    number: int
    examples: list[str]


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


def list_ignored(root: Path, split: str) -> list[Ignored]:
    """Count the files that the index of `root/split` leaves out."""
    return by_kind(_in_split(root, split))


def by_kind(found: Iterable[tuple[str, str]]) -> list[Ignored]:
    """Group (kind, path) pairs by kind, the most frequent first."""
    groups: dict[str, list[str]] = {}
    for kind, path in found:
        groups.setdefault(kind, []).append(path)
    counted = [Ignored(k, len(paths), sorted(paths)[:EXAMPLES]) for k, paths in groups.items()]
    return sorted(counted, key=lambda ignored: (-ignored.number, ignored.kind))


def kind_of(path: str) -> str:
    """Return the kind of an ignored file: its place, its suffix, or a phrase if it has none.

    >>> [kind_of(path) for path in ("a.GIF", "cat/a.b.heic", "cat.d/README")]
    ['.gif', '.heic', 'without a suffix']
    """
    if is_system(path):
        return SYSTEMS
    return os.path.splitext(path)[1].lower() or "without a suffix"  # noqa: PTH122 -- a string


def describe(ignored: Sequence[Ignored], *, where: str) -> list[str]:
    """Return a line with the total and one line per kind; an empty list if there are none.

    >>> describe([Ignored(".gif", 4, ["a.gif", "b.gif", "c.gif"])], where="train")[1]
    '  4 .gif: a.gif, b.gif, c.gif, ...'
    """
    if not ignored:
        return []
    lines = [f"{where}: {number_of(ignored)} files ignored (read are {' '.join(EXTENSIONS)}):"]
    for kind, number, examples in ignored:
        more = ", ..." if number > len(examples) else ""
        lines.append(f"  {number} {kind}: {', '.join(examples)}{more}")
    return lines


def number_of(ignored: Iterable[Ignored]) -> int:
    """Return the number of files of all kinds."""
    return sum(kind.number for kind in ignored)


def _in_split(root: Path, split: str) -> Iterator[tuple[str, str]]:
    with os.scandir(root / split) as entries:
        for entry in filter(_counts, entries):
            path = f"{split}/{entry.name}"
            if entry.is_dir():
                yield from (files_below if is_system(entry.name) else _in_class)(root, path)
            elif not entry.name.endswith(".tar"):
                yield LOOSE, path


def _in_class(root: Path, folder: str) -> Iterator[tuple[str, str]]:
    with os.scandir(root / folder) as entries:
        for entry in filter(_counts, entries):
            path = f"{folder}/{entry.name}"
            if entry.is_dir():
                yield from files_below(root, path)
            elif not is_image(entry.name):
                yield kind_of(path), path


def files_below(root: Path, folder: str) -> Iterator[tuple[str, str]]:
    """Yield kind and path of the files in a folder and its subfolders, as far as they are readable.

    Links to folders are not followed, hidden files are left out except in folders of the system.
    """
    for place, folders, names in os.walk(root / folder):
        inside = Path(place).relative_to(root).as_posix()
        system = is_system(inside)
        folders[:] = [name for name in folders if system or visible(name) or is_system(name)]
        yield from (
            (SYSTEMS if system else NESTED, f"{inside}/{name}")
            for name in names
            if system or visible(name)
        )


def _counts(entry: os.DirEntry[str]) -> bool:
    return visible(entry.name) or is_system(entry.name)

"""List the files of one split without opening any, and count the ignored ones.

A split is in `root/split`: class folders, `<class>/*`, or shards, `*.tar`, with the names of the
classes in `root/classes.txt`. Images of other formats or places must not be lost silently.
"""

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import NamedTuple

from largebatch.errors import DataError, shorten
from largebatch.optional import INSTALL_HEIF, has_heif

HEIC = (".heic", ".heif")
"""Suffixes of photographs of phones, which are read where pillow-heif is installed."""

EXTENSIONS = (".jpeg", ".jpg", ".png", ".webp", *(HEIC if has_heif() else ()))
"""Suffixes of the images that are read, in lower case."""

CONVERTIBLE = (*HEIC, ".avif", ".bmp", ".jfif", ".jp2", ".tif", ".tiff")
"""Suffixes of images that ImageMagick converts to one JPEG each."""

SYSTEM = frozenset({"@eadir", "#recycle", "$recycle.bin", "lost+found", "__macosx"})
"""Folders, in lower case, of thumbnails and deleted files; they are skipped like hidden ones."""

CLASSES = "classes.txt"
"""File beside shards with the names of the classes, one per line, in the order of their labels."""

MISPLACED = "images in other places"


class File(NamedTuple):
    """A shard or an image."""

    name: str
    size: int
    version: int | str
    """Modification time in nanoseconds; ETag of an object in a bucket."""


def layout(root: Path, split: str) -> tuple[tuple[str, ...], tuple[File, ...]]:
    """Return the names of the class folders and the shards; one of them is empty."""
    folder = root / split
    expected = f"expected {root}/{split}/<class>/*.jpg or {root}/{split}/*.tar"
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder; {expected}")
    if not folder.is_dir():
        raise DataError(
            f"{folder}: there is no such folder; {expected}; found {_found(root)}. To divide class "
            f"folders: largebatch data import imagefolder {shlex.quote(str(root))} --val-fraction "
            f"0.2 --out {shlex.quote(f'{root}-data')} (for a split of another name: --val-name)"
        )
    with os.scandir(folder) as scanned:
        # By bytes: labels are numbers of sorted names, which must be the same on every machine,
        # also for names that are not UTF-8.
        entries = sorted(
            (entry for entry in scanned if visible(entry.name)), key=lambda e: os.fsencode(e.name)
        )
    names = tuple(entry.name for entry in entries if entry.is_dir())
    tars = [entry for entry in entries if entry.name.endswith(".tar") and entry.is_file()]
    shards = tuple(_facts(entry) for entry in tars)
    if bool(names) == bool(shards):
        raise DataError(
            f"{folder}: {expected}, and only one of them; found {_found(folder)}. For images with "
            "a list of classes, such as ImageNet's val: largebatch data import imagefolder"
        )
    return names, shards


def scan_class(folder: Path, name: str) -> tuple[int, list[File]]:
    """Return the time of a class folder, which changes with its files, and its images, sorted."""
    mtime = (folder / name).stat().st_mtime_ns  # before listing, so that later files are detected
    with os.scandir(folder / name) as entries:
        images = [_facts(entry) for entry in entries if is_image(entry.name) and not entry.is_dir()]
    return mtime, sorted(images, key=lambda image: os.fsencode(image.name))


def _facts(entry: os.DirEntry[str]) -> File:
    status = entry.stat(follow_symlinks=entry.is_file())  # of a broken link the link's own
    return File(entry.name, status.st_size, status.st_mtime_ns)


def read_classes(root: Path) -> tuple[str, ...]:
    """Return the names of the classes of shards."""
    path = root / CLASSES
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; shards need it: a class name per line, by label"
        ) from None
    return parse_classes(text, name=str(path))


def parse_classes(text: str, *, name: str) -> tuple[str, ...]:
    """Return the lines of CLASSES, whose path or address is `name`; DataError for broken ones."""
    names = tuple(text.removesuffix("\n").split("\n"))
    if len(set(names)) < len(names) or not all(map(is_class_name, names)):
        raise DataError(
            f"{name}: expected a unique name per line, by label; found {shorten(names)}"
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


def _found(folder: Path) -> str:
    return shorten(sorted(path.name for path in folder.iterdir() if visible(path.name)))


def list_ignored(root: Path, split: str) -> dict[str, int]:
    """Count the files that the index of `root/split` leaves out, by their suffix."""

    def left_out() -> Iterator[str]:
        for directory, folders, names in os.walk(root / split):
            # In place: os.walk does not enter what is missing from its own list.
            folders[:] = filter(visible, folders)
            depth = len(Path(directory).relative_to(root).parts)  # 1: the split, 2: a class
            for name in filter(visible, names):
                if not (is_image(name) if depth == 2 else depth == 1 and name.endswith(".tar")):
                    yield name

    return by_suffix(left_out())


def by_suffix(paths: Iterable[str]) -> dict[str, int]:
    """Count ignored files by their suffix, the most frequent first."""
    suffixes = (PurePath(path).suffix.lower() or "without a suffix" for path in paths)
    kinds = Counter(MISPLACED if suffix in EXTENSIONS else suffix for suffix in suffixes)
    return dict(kinds.most_common())


def describe(ignored: Mapping[str, int], *, where: str, folder: Path | None = None) -> str:
    """Return a line with the numbers of ignored files; empty if there are none.

    The command that converts them is for the files in `folder`; None: they are in an archive.

    >>> describe({".gif": 4}, where="train").partition(";")[0]
    'train: ignored files: 4 .gif'
    """
    if not ignored:
        return ""
    kinds = ", ".join(f"{number} {kind}" for kind, number in ignored.items())
    text = f"{where}: ignored files: {kinds}; read are {' '.join(EXTENSIONS)}"
    if not set(HEIC).isdisjoint(ignored):
        text += f". To read {' and '.join(HEIC)}: {INSTALL_HEIF}"
    convertible = [kind for kind in ignored if kind in CONVERTIBLE]
    if convertible:
        argument = "DIR" if folder is None else shlex.quote(str(folder))
        names = " -o ".join(f"-iname '*{kind}'" for kind in convertible)
        # find's -o binds less than the -exec that follows it.
        if len(convertible) > 1:
            names = rf"\( {names} \)"
        # The name of each file is kept, so that none replaces a JPEG beside it.
        command = rf"find {argument} {names} -exec convert {{}} {{}}.jpg \;"
        unpack = "unpack it into DIR, and " if folder is None else ""
        text += f". To convert them, with ImageMagick: {unpack}{command}"
    return text

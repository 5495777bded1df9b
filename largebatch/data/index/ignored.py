"""What lies among images and is not read: counted by kind, with the first names of each.

An image of a format that is not read, or in a place that is not looked at, must not vanish in
silence: `data index` and `data import` print the counts, and a run notes them when it begins.
Hidden names, which begin with a dot, belong to the system or to this package and are not counted.
Nor are members of shards beside an image and its label; a sample without an image is a bad one.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from largebatch.data.index.file import Ignored
from largebatch.data.index.folder import EXTENSIONS, is_image, visible

EXAMPLES = 3
"""How many files of a kind are named."""

LOOSE = "beside the class folders or shards"
NESTED = "in folders below a class (`largebatch data import imagefolder` takes those)"


def list_ignored(root: Path, split: str) -> list[Ignored]:
    """Count what the index of `root/split` leaves out."""
    return by_kind(_in_split(root, split))


def by_kind(found: Iterable[tuple[str, str]]) -> list[Ignored]:
    """Count kinds and paths, the most frequent kind first."""
    groups: dict[str, list[str]] = {}
    for kind, path in found:
        groups.setdefault(kind, []).append(path)
    counted = [Ignored(k, len(paths), sorted(paths)[:EXAMPLES]) for k, paths in groups.items()]
    return sorted(counted, key=lambda each: (-each.number, each.kind))


def suffix_of(name: str) -> str:
    """Return the suffix of a file that is not read, as a kind.

    >>> [suffix_of(name) for name in ("a.GIF", "cat/a.b.heic", "cat.d/README")]
    ['.gif', '.heic', 'without a suffix']
    """
    return os.path.splitext(name)[1].lower() or "without a suffix"  # noqa: PTH122 -- a string


def describe(ignored: Sequence[Ignored], *, where: str) -> list[str]:
    """Return a line that gives the number, and one for each kind; nothing where there is none.

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
    """Return how many files there are of all kinds."""
    return sum(each.number for each in ignored)


def _in_split(root: Path, split: str) -> Iterator[tuple[str, str]]:
    with os.scandir(root / split) as entries:
        for entry in filter(_is_visible, entries):
            path = f"{split}/{entry.name}"
            if entry.is_dir():
                yield from _in_class(root, path)
            elif not entry.name.endswith(".tar"):
                yield LOOSE, path


def _in_class(root: Path, folder: str) -> Iterator[tuple[str, str]]:
    with os.scandir(root / folder) as entries:
        for entry in filter(_is_visible, entries):
            path = f"{folder}/{entry.name}"
            if entry.is_dir():
                yield from ((NESTED, each) for each in _below(root, path))
            elif not is_image(entry.name):
                yield suffix_of(entry.name), path


def _below(root: Path, folder: str) -> Iterator[str]:
    """Give the files in a folder and in those below; links to folders are not followed there."""
    for place, folders, names in os.walk(root / folder):
        folders[:] = filter(visible, folders)
        for name in filter(visible, names):
            yield (Path(place) / name).relative_to(root).as_posix()


def _is_visible(entry: os.DirEntry[str]) -> bool:
    return visible(entry.name)

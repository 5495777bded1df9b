"""Files among images that are not read: counted by kind, with the first names of each.

Images of other formats or in other places must not be lost silently: `data index` and `data
import` print the counts, and a run logs them at its start. Hidden files belong to the system or to
this package and are not counted, except in folders of the system. Nor are other members of a sample
in a shard; a sample without an image is a bad one.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from largebatch.data.index.file import Ignored
from largebatch.data.index.folder import EXTENSIONS, is_image, is_system, visible

EXAMPLES = 3
"""Number of example names per kind."""

LOOSE = "beside the class folders or shards"
NESTED = "in subfolders of a class (`largebatch data import imagefolder` reads those)"


SYSTEMS = "in folders of the system, such as @eaDir and #recycle"


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

"""Find out whether a folder is still what its index says.

Every shard's length and time are compared. A folder of a million files cannot be asked for all of
them whenever a run starts, so class folders are asked for their times, which show files that came,
went or were renamed; all files of a folder with another time are compared, and of the rest a fixed
number, spread evenly: a copy made anew shows in any of them.
"""

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from largebatch.data.building import Content
from largebatch.data.places import paths
from largebatch.data.scan import CLASSES, layout, listed, read_classes, scan_class

MOST = 20_000
"""Files of unchanged folders whose length and time are compared, unless all are to be."""


def difference(content: Content, root: Path, *, every_file: bool) -> str | None:
    """Return the first difference found between an index and its folder, None if there is none."""
    header = content.header
    names, shards = layout(root, header["split"])
    if bool(shards) != bool(header["shards"]):
        now, then = ("shards", "class folders") if shards else ("class folders", "shards")
        return f"{header['split']} holds {now}, it held {then}"
    if shards:
        return _shards(content, root, {shard.name: (shard.size, shard.mtime) for shard in shards})
    return (
        _names(header["split"], "class folders", header["classes"], names)
        or _folders(content, root)
        or _files(content, root, _spread(len(content.arrays["labels"]), every_file=every_file))
        or _bad_files(content, root)
    )


def _shards(content: Content, root: Path, found: dict[str, tuple[int, int]]) -> str | None:
    header = content.header
    then = {name: (size, mtime) for name, size, mtime in header["shards"]}
    differing = _names(header["split"], "shards", tuple(then), tuple(found))
    if differing:
        return differing
    if list(read_classes(root)) != header["classes"]:
        return f"{CLASSES} names other classes"
    for name, (size, mtime) in then.items():
        differing = _facts(f"{header['split']}/{name}", (size, mtime), found[name])
        if differing:
            return differing
    return None


def _folders(content: Content, root: Path) -> str | None:
    """Compare the class folders whose time is another."""
    header, arrays, _ = content
    listed_paths = paths(header, arrays)
    for label, (name, mtime) in enumerate(header["folders"]):
        place = f"{header['split']}/{name}"
        if (root / place).stat().st_mtime_ns == mtime:
            continue
        rows = range(*np.searchsorted(arrays["labels"], [label, label + 1]).tolist())
        then = [os.path.basename(listed_paths[row]) for row in rows]  # noqa: PTH119 -- a string
        bad = [path for path, *_ in content.bad if path.startswith(f"{place}/")]
        then += [path.removeprefix(f"{place}/") for path in bad]
        now = scan_class(root / header["split"], name).names
        differing = _names(place, "pictures", then, now) or _files(content, root, rows)
        if differing:
            return differing
    return None


def _bad_files(content: Content, root: Path) -> str | None:
    for path, _, size, mtime in content.bad:
        try:
            stat = (root / path).stat()
        except OSError:  # a link to nowhere
            stat = (root / path).lstat()
        differing = _facts(path, (size, mtime), (stat.st_size, stat.st_mtime_ns))
        if differing:
            return differing
    return None


def _files(content: Content, root: Path, rows: Iterable[int]) -> str | None:
    listed_paths = paths(content.header, content.arrays)
    sizes, mtimes = content.arrays["num_bytes"], content.arrays["mtimes"]
    start = f"{root}/"
    for row in rows:
        path = listed_paths[row]
        try:
            stat = os.stat(start + path)  # noqa: PTH116 -- a path object takes longer than the call
        except OSError as error:
            return f"{path}: {error.strerror}"
        then = (int(sizes[row]), int(mtimes[row]))
        if then != (stat.st_size, stat.st_mtime_ns):
            return _facts(path, then, (stat.st_size, stat.st_mtime_ns))
    return None


def _spread(number: int, *, every_file: bool) -> range:
    return range(0, number, 1 if every_file else -(-number // MOST))


def _names(place: str, kind: str, then: Iterable[str], now: Iterable[str]) -> str | None:
    before, after = set(then), set(now)
    if before == after:
        return None
    return (
        f"{place} holds {len(after)} {kind}, it held {len(before)} (new: "
        f"{listed(sorted(after - before))}; gone: {listed(sorted(before - after))})"
    )


def _facts(path: str, then: tuple[int, int], now: tuple[int, int]) -> str | None:
    """Compare lengths, then times."""
    if then[0] != now[0]:
        return f"{path} has {now[0]:,} bytes, it had {then[0]:,}"
    if then[1] != now[1]:
        return f"{path} was changed {_time(now[1])}, it had been changed {_time(then[1])}"
    return None


def _time(nanoseconds: int) -> str:
    time = datetime.fromtimestamp(nanoseconds / 1e9, UTC)
    return time.isoformat(sep=" ", timespec="milliseconds")

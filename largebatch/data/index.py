"""What pictures exist: path, label, height and width, read and checked once.

A broken picture must be reported before a run starts, with its path, and never in the middle of
it, so every picture is decoded once. The result is kept beside the pictures and used for as long
as the folder has not changed; worker 0 hands the same bytes to the other workers.
"""

import contextlib
import hashlib
import io
import os
import uuid
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from largebatch.contracts import IntArray
from largebatch.errors import DataError
from largebatch.workers import available_cores

EXTENSIONS = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""What both decoders read. Other files, and names that begin with a dot, are ignored."""

MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")
"""Pillow's names for the kinds of pixels that both decoders turn into the same RGB."""

FORMAT = 1
"""Of a kept index; one of another format is not used."""

SHOWN = 10
"""How many broken pictures or class names a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The pictures of one split in a fixed order. A sample's number is its row."""

    root: Path
    """The folder that holds the splits; `paths` begin from it."""

    classes: tuple[str, ...]
    """Names, by label."""

    paths: tuple[str, ...]
    labels: IntArray
    heights: IntArray
    widths: IntArray
    """In pixels as stored: no decoder applies EXIF orientation, so it is not applied here."""

    signature: str = ""
    """Of the folder when it was read; equal as long as the folder has not changed."""

    def __len__(self) -> int:
        return len(self.paths)


def user_cache() -> Path:
    """Return the folder where this package keeps what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "largebatch"


class _ClassFolder(NamedTuple):
    """The pictures of one class; anything that changes them changes at least one field."""

    name: str
    pictures: list[str]
    total_bytes: int
    newest: int


def load_or_read(root: Path, split: str) -> Index:
    """Return the index kept in `root` if the folder is as it was then, else read it and keep it.

    Where that folder cannot be written to, the index is kept in the user's cache.
    """
    folders = _scan(root, split)
    number = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    places = (root / f".largebatch-{split}.npz", user_cache() / "index" / f"{number}-{split}.npz")
    for place in places:
        with contextlib.suppress(OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
            kept = from_bytes(place.read_bytes())
            if kept.signature == _signature(folders):
                return replace(kept, root=root)  # the folder may have been moved
    index = _read(root, split, folders)
    for place in places:
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            _write(place, to_bytes(index))
            break
    return index


def read_folder(root: Path, split: str) -> Index:
    """List `root/split/<class>/*` and decode every picture once.

    Labels number the class folders, sorted bytewise like the pictures in them. Raises one DataError
    that names the broken pictures, or says what is wrong with the folder.
    """
    return _read(root, split, _scan(root, split))


def check_same_classes(train: Index, val: Index) -> None:
    """Raise DataError if a class is missing from either split: labels would differ in meaning."""
    if train.classes == val.classes:
        return
    only_train = sorted(set(train.classes) - set(val.classes))
    only_val = sorted(set(val.classes) - set(train.classes))
    raise DataError(
        f"{train.root}: the splits must have the same classes; only in train: "
        f"{_list(only_train)}; only in val: {_list(only_val)}"
    )


def to_bytes(index: Index) -> bytes:
    """Return the index as the content of an npz file, without pickle."""
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        format=np.array(FORMAT),
        root=np.array(os.fsencode(index.root)),
        classes=np.array([os.fsencode(name) for name in index.classes]),
        paths=np.array([os.fsencode(path) for path in index.paths]),
        labels=index.labels,
        heights=index.heights,
        widths=index.widths,
        signature=np.array(index.signature),
    )
    return buffer.getvalue()


def from_bytes(content: bytes) -> Index:
    """Return the index that `to_bytes` was given."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        if arrays["format"] != FORMAT:
            raise ValueError(f"index format {arrays['format']}, expected {FORMAT}")
        return Index(
            root=Path(os.fsdecode(arrays["root"].item())),
            classes=tuple(os.fsdecode(name) for name in arrays["classes"].tolist()),
            paths=tuple(os.fsdecode(path) for path in arrays["paths"].tolist()),
            labels=arrays["labels"],
            heights=arrays["heights"],
            widths=arrays["widths"],
            signature=str(arrays["signature"]),
        )


def _scan(root: Path, split: str) -> list[_ClassFolder]:
    """List the pictures of every class without opening any; raise DataError if there are none."""
    folder = root / split
    layout = f"expected the layout {root}/{split}/<class>/*.jpg"
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder; {layout}")
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder; {layout}; found {_found(root)}")
    names = [entry.name for entry in os.scandir(folder) if entry.is_dir() and _visible(entry)]
    if not names:
        raise DataError(f"{folder}: there are no class folders; {layout}; found {_found(folder)}")
    folders = [_scan_class(folder, name) for name in sorted(names, key=os.fsencode)]
    empty = [scanned.name for scanned in folders if not scanned.pictures]
    if empty:
        raise DataError(
            f"{folder}: {len(empty)} of {len(names)} class folders hold no pictures "
            f"({' '.join(EXTENSIONS)}): {_list(empty)}; add pictures or remove the folders"
        )
    return folders


def _scan_class(folder: Path, name: str) -> _ClassFolder:
    with os.scandir(folder / name) as entries:
        found = {
            entry.name: entry.stat(follow_symlinks=entry.is_file())  # a dangling link is broken
            for entry in entries
            if _visible(entry) and entry.name.lower().endswith(EXTENSIONS) and not entry.is_dir()
        }
    times = [stat.st_mtime_ns for stat in found.values()]
    return _ClassFolder(
        name=name,
        pictures=sorted(found, key=os.fsencode),
        total_bytes=sum(stat.st_size for stat in found.values()),
        newest=max([(folder / name).stat().st_mtime_ns, *times]),
    )


def _signature(folders: Sequence[_ClassFolder]) -> str:
    digest = hashlib.sha256()
    for name, pictures, total_bytes, newest in folders:
        digest.update(os.fsencode(f"{name}/{len(pictures)}/{total_bytes}/{newest}/"))
    return digest.hexdigest()


def _read(root: Path, split: str, folders: Sequence[_ClassFolder]) -> Index:
    paths: list[str] = []
    results: list[tuple[int, int] | str] = []
    with ThreadPoolExecutor(available_cores()) as pool:
        for folder in folders:  # one class at a time keeps the queue short
            names = [f"{split}/{folder.name}/{picture}" for picture in folder.pictures]
            results.extend(pool.map(_measure, [root / name for name in names]))
            paths.extend(names)
    broken = [
        f"{p}: {reason}"
        for p, reason in zip(paths, results, strict=True)
        if isinstance(reason, str)
    ]
    if broken:
        raise DataError(
            f"{root}: {len(broken)} of {len(paths)} pictures in {split} cannot be used; replace or "
            f"remove them:\n  " + "\n  ".join(broken[:SHOWN] + ["..."] * (len(broken) > SHOWN))
        )
    sizes = np.array(results, dtype=np.int64)
    counts = [len(folder.pictures) for folder in folders]
    return Index(
        root=root,
        classes=tuple(folder.name for folder in folders),
        paths=tuple(paths),
        labels=np.repeat(np.arange(len(folders), dtype=np.int64), counts),
        heights=sizes[:, 0],
        widths=sizes[:, 1],
        signature=_signature(folders),
    )


def _measure(path: Path) -> tuple[int, int] | str:
    """Decode a picture and return its height and width, or why it cannot be used."""
    try:
        with Image.open(path) as image:
            image.load()
            if image.mode not in MODES:
                return f"its pixels are {image.mode}, expected 8 bits per channel"
            return image.height, image.width
    except UnidentifiedImageError:
        return "no readable picture"
    except Exception as error:  # Pillow raises all kinds over a damaged file
        return str(error) or type(error).__name__


def _write(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _visible(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".")


def _found(folder: Path) -> str:
    return _list(sorted(path.name for path in folder.iterdir()))


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN]) or "nothing"
    return f"{shown}, ..." if len(names) > SHOWN else shown

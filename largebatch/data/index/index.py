"""The index of a split: location, label, height and width of every image.

A bad image must be reported with its path before a run starts, never in the middle of it. The
index is stored in one file beside the images, which every worker of a machine maps into memory. It
is rejected if the folder has changed.
"""

import contextlib
import hashlib
import os
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from largebatch.data.index.build import build
from largebatch.data.index.contents import fault_in
from largebatch.data.index.file import FORMAT, Bad, Content, Ignored, open_mapped, pack, paths
from largebatch.data.index.folder import difference, scan
from largebatch.data.index.ignored import list_ignored
from largebatch.data.types import Bytes, IntArray
from largebatch.errors import DataError, shorten
from largebatch.storage import Mapped, Progress, silent, user_cache, write_whole


class Location(NamedTuple):
    """Location of one encoded image."""

    path: Path
    offset: int
    num_bytes: int
    mtime: int | None = None
    """Modification time of the file in nanoseconds; None for a shard, which was compared at the
    start of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The images of one split in a fixed order. A sample's number is its row."""

    root: Path
    """Folder of the splits; `paths` are relative to it."""

    classes: tuple[str, ...]
    """Names of the classes, by label."""

    paths: Sequence[str]
    """Path of the file of each sample: an image, or a shard of many."""

    labels: IntArray
    heights: IntArray
    widths: IntArray
    """Height and width of the displayed images in pixels: EXIF orientation is applied."""

    orientations: Bytes | None = None
    """EXIF orientations of the stored images; None if all are upright."""

    num_bytes: IntArray | None = None
    """Lengths of the encoded images; None for synthetic images."""

    offsets: IntArray | None = None
    """Positions of the images in their files; None if each is a whole file."""

    mtimes: IntArray | None = None
    """Modification times in nanoseconds; None for shards and synthetic images."""

    bad: tuple[Bad, ...] = ()
    """Images that cannot be used and were left out."""

    ignored: tuple[Ignored, ...] = ()
    """Ignored files, by kind, at the time the index was built."""

    digest: str = ""
    """Digest of the content: indexes with the same digest list the same images."""

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


def cached_at(root: Path, name: str) -> Path:
    """Return the path of an index of images in `root` in the user's cache."""
    number = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    return user_cache() / "index" / f"{number}-{name}.index"


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
        changed = _difference(content, root, every_file=every_file)
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
        try:
            content = load_file(place)
        except (OSError, ValueError):
            continue
        if content.header["split"] != split:
            raise _inconsistent(place, f"it is of {content.header['split']}, expected {split}")
        yield content


def load_file(file: Path) -> Content:
    """Map a stored index; raise OSError or ValueError if it is missing, damaged or outdated.

    Raises DataError if it is undamaged but inconsistent.
    """
    content = Content(*open_mapped(file), file)
    if content.header.get("format") != FORMAT:
        raise ValueError(f"index format {content.header.get('format')}, expected {FORMAT}")
    fault = fault_in(content.header, content.arrays)
    if fault is not None:
        raise _inconsistent(file, fault)
    return content


def _inconsistent(file: Path, fault: str) -> DataError:
    return DataError(
        f"{file}: its checksum is right but its content is not a valid index ({fault}); another "
        "program wrote it: remove it, and the index is built again"
    )


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
        if _difference(content, root, every_file=True) is None:
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
        paths=paths(header, arrays),
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


def _difference(content: Content, root: Path, *, every_file: bool) -> str | None:
    try:
        return difference(content, root, every_file=every_file)
    except OSError as error:
        raise DataError(f"{root}: cannot be read: {error}") from error


def _read(
    root: Path, split: str, *, drop_bad: bool = False, progress: Progress = silent
) -> Content:
    try:
        content = build(scan(root, split), progress=progress)
    except OSError as error:
        raise DataError(f"{root}: cannot be read: {error}") from error
    if content.bad and not drop_bad:
        raise BadImagesError(root, split, content)
    classes = content.header["classes"]
    counts = np.bincount(content.arrays["labels"], minlength=len(classes))
    missing = [name for name, count in zip(classes, counts, strict=True) if not count]
    if missing:
        raise DataError(
            f"{root / split}: {len(missing)} of {len(classes)} classes have no image that can be "
            f"used: {shorten(missing)}"
        )
    return content


def places(root: Path, split: str) -> tuple[Path, Path]:
    """Return the places where the index of a split may be stored, the preferred one first."""
    return root / f".largebatch-{split}.index", cached_at(root, split)

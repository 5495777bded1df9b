"""What images exist: where, label, height and width, read and checked once.

A broken image must be reported before a run starts, with its path, and never in the middle of
it. What was found is stored in one file beside the images, which every worker of a machine maps
into memory, and refused once the folder is another than it was.
"""

import contextlib
import hashlib
import os
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
    """The bytes of one encoded image."""

    path: Path
    offset: int
    num_bytes: int
    mtime: int | None = None
    """Modification time of the file in nanoseconds; None for a shard, which was compared when the
    run started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The images of one split in a fixed order. A sample's number is its row."""

    root: Path
    """The folder that holds the splits; `paths` begin from it."""

    classes: tuple[str, ...]
    """Names, by label."""

    paths: Sequence[str]
    """Paths of the files that hold the samples: one each, or the same shard for many."""

    labels: IntArray
    heights: IntArray
    widths: IntArray
    """In pixels of the image that is seen: EXIF orientation is applied."""

    orientations: Bytes | None = None
    """EXIF's numbers of how the stored images are to be turned; None: not at all."""

    num_bytes: IntArray | None = None
    """Lengths of the encoded images; None where there are none to read."""

    offsets: IntArray | None = None
    """Where they begin in their files; None: each is a whole file."""

    mtimes: IntArray | None = None
    """Modification times in nanoseconds; None where files hold many images, or there are none."""

    bad: tuple[Bad, ...] = ()
    """Images that cannot be used and were left out."""

    ignored: tuple[Ignored, ...] = ()
    """Files that are not read, by kind, as they were when the index was made."""

    digest: str = ""
    """Digest of the content: two indexes with one digest list the same images."""

    trained: IntArray | None = None
    """The samples that a run may train on, rising; None: all of them."""

    mapped: Mapped | None = None
    """The file that the columns are mapped from; None: they are in this process's memory."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def identity(self) -> dict[str, object]:
        """How many images there are, and the digest, as in a record; None: they are made up."""
        return {"samples": len(self), "digest": self.digest or None}

    def require_whole(self) -> None:
        """Raise DataError if the file that the columns are mapped from was cut off."""
        if self.mapped is not None:
            self.mapped.require_whole()

    def file(self, sample: int) -> str:
        """Return the path of the file that holds a sample, without making a path object."""
        return f"{self.root}/{self.paths[sample]}"

    def locate(self, sample: int) -> Location:
        """Return the file that holds a sample, and which bytes of it are the encoded image."""
        assert self.num_bytes is not None, "these images are made up, not read"
        offset = 0 if self.offsets is None else int(self.offsets[sample])
        mtime = None if self.mtimes is None else int(self.mtimes[sample])
        return Location(Path(self.file(sample)), offset, int(self.num_bytes[sample]), mtime)


class BadImagesError(DataError):
    """Some images cannot be used; `bad` lists all of them, the message the first ones."""

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
    """Return where the user's cache holds an index of images in `root`."""
    number = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    return user_cache() / "index" / f"{number}-{name}.index"


def load_or_read(root: Path, split: str) -> Index:
    """Return the index of a split as `open_content` finds or makes it."""
    return index_of(open_content(root, split), root)


def read_folder(root: Path, split: str) -> Index:
    """Read the header of every image of a split and return the index, without keeping it.

    Labels number the class folders, sorted bytewise like the images in them; samples in shards
    stay in their order. Raises DataError that says what is wrong with the folder or the images.
    """
    return index_of(_read(root, split), root)


def open_content(
    root: Path, split: str, *, every_file: bool = False, progress: Progress = silent
) -> Content:
    """Return the index stored for this folder; where there is none, read the folder and store one.

    `every_file`: compare them all now, since they will not be read. Raises DataError where the
    folder is no longer what its index says.
    """
    reasons = []
    for content in find_stored(root, split):
        changed = _difference(content, root, every_file=every_file)
        if changed is None:
            return content
        reasons.append(f"{changed} (the index is {content.file})")
    if reasons:
        raise DataError(
            f"{root}: the folder is not what its index was made from: {reasons[0]}. Rebuild the "
            f"index with: largebatch data index {root}"
        )
    return make(root, split, progress=progress)


def require_stored(root: Path, *, purpose: str) -> None:
    """Raise DataError unless both splits of a folder have an index, so that none will be made."""
    if root.is_dir() and not all(any(find_stored(root, split)) for split in ("train", "val")):
        raise DataError(
            f"{purpose}: {root}: no index is stored, and a run would make it from every image's "
            f"header before the log's clock starts; make it now with: largebatch data index {root}"
        )


def find_stored(root: Path, split: str) -> Iterator[Content]:
    """Give the indexes stored for this folder, the best place first; any may be out of date.

    One beside the images may be: where nothing can be written there, a newer one is elsewhere.
    """
    for place in places(root, split):
        try:
            content = load_file(place)
        except (OSError, ValueError):
            continue
        if content.header["split"] != split:
            raise _foreign(place, f"it is of {content.header['split']}, expected {split}")
        yield content


def load_file(file: Path) -> Content:
    """Map a stored index; raise OSError or ValueError where no whole one of this format is.

    Raises DataError where there is one that this program cannot have written.
    """
    content = Content(*open_mapped(file), file)
    if content.header.get("format") != FORMAT:
        raise ValueError(f"index format {content.header.get('format')}, expected {FORMAT}")
    fault = fault_in(content.header, content.arrays)
    if fault is not None:
        raise _foreign(file, fault)
    return content


def _foreign(file: Path, fault: str) -> DataError:
    return DataError(
        f"{file}: its checksum is right and its contents are not those of an index ({fault}); it "
        "was not written by this program: remove it, and it is made anew"
    )


def make(root: Path, split: str, *, drop_bad: bool = False, progress: Progress = silent) -> Content:
    """Read the header of every image of a split and store the index; refuse or drop bad ones.

    It is stored beside the images, in the user's cache where that folder cannot be written to, and
    nowhere if that cannot be written to either.
    """
    return _store(_read(root, split, drop_bad=drop_bad, progress=progress), root, split)


def _store(content: Content, root: Path, split: str) -> Content:
    for place in places(root, split):
        with contextlib.suppress(OSError, ValueError):
            write_whole(place, pack(content.header, content.arrays))
            return load_file(place)
    return content


def refresh(root: Path, split: str, *, drop_bad: bool, progress: Progress) -> Content:
    """Return a stored index if every file is as it states, else make it anew."""
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
    """Return the index whose content this is, of the images in `root`."""
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


def check_same_classes(train: Index, val: Index) -> None:
    """Raise DataError if a class is missing from either split: labels would differ in meaning."""
    if train.classes == val.classes:
        return
    only_train = sorted(set(train.classes) - set(val.classes))
    only_val = sorted(set(val.classes) - set(train.classes))
    raise DataError(
        f"{train.root}: the splits must have the same classes; only in train: "
        f"{shorten(only_train)}; only in val: {shorten(only_val)}"
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
    """Return where the index of a split may be stored, the best first."""
    return root / f".largebatch-{split}.index", cached_at(root, split)

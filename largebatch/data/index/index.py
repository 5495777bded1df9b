"""The index of a split: location, label, height and width of every image.

A bad image must be reported with its path before a run starts. So the header of every image is read
once (`make`), and the index is stored in one file beside the images: safetensors, one of whose
arrays is a JSON header, with a checksum at its end. Worker 0 reads it and sends it to the others.

When a run starts, the folder is compared with its index: every shard; every class folder whose name
or time has changed; and at most `MOST` other files, evenly spaced, since checking a million takes
minutes over a network. The rest are checked when they are read: see `Index.locate`.
"""

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from largebatch.address import WEB, Address, Place, place_of
from largebatch.data.index.folder import CLASSES, EXTENSIONS, File, scan_class
from largebatch.data.index.headers import BadImageError, Size, measure, measure_part
from largebatch.data.index.remote import (
    layout,
    list_ignored,
    open_shard,
    read_classes,
    read_place,
    write_place,
)
from largebatch.data.index.shards import Unusable, read_shard
from largebatch.data.types import Bytes, HostCache, IntArray
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import broadcast_bytes
from largebatch.errors import DataError, shorten
from largebatch.storage import (
    CHECKSUM_BYTES,
    OF_THE_FILE,
    PART,
    THREADS,
    ReadProgress,
    checksum,
    read_again,
    silent,
    user_cache,
)

Arrays = Mapping[str, npt.NDArray[Any]]

FORMAT = 8  # version of the format; files of another version are not used
MOST = 20_000  # maximum number of compared files of unchanged folders, unless all are compared
HEADER = "header"
SIZES = ("heights", "widths", "orientations", "by_pillow")  # arrays of the fields of Size


class Location(NamedTuple):
    """Location of one encoded image."""

    path: str  # not a Path, which takes longer to make than a cached file to read
    offset: int
    num_bytes: int
    mtime: int | None = None
    """Modification time of the file in nanoseconds; None for a shard, which was compared at the
    start of the run."""


class Paths:
    """Path of the file of each sample; a million strings would take too much memory."""

    def __init__(
        self, holders: Sequence[str], which: IntArray, *, names: Bytes | None = None
    ) -> None:
        self.holders = tuple(holders)
        """Paths of the shards or of the class folders."""

        self.which = which  # number of the holder of each sample
        self._names = names  # N x length of the longest, filled with zeros

    def __len__(self) -> int:
        return len(self.which)

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, row: int) -> str:
        holder = self.holders[int(self.which[row])]
        if self._names is None:
            return holder
        name = self._names[row].tobytes().rstrip(b"\0")
        return f"{holder}/{os.fsdecode(name)}"


class Content(NamedTuple):
    """Content of an index file: the usable images and the bad ones."""

    header: dict[str, Any]
    arrays: Arrays
    file: Place | None = None
    """File or object that it is stored in; None if no place is writable."""

    @property
    def bad(self) -> tuple[Unusable, ...]:
        """Images that were left out."""
        return tuple(Unusable(*fields) for fields in self.header["bad"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The images of one split in a fixed order. A sample's number is its row."""

    root: Place  # folder or address of the splits; `paths` are relative to it
    classes: tuple[str, ...]  # names of the classes, by label
    paths: Paths | Sequence[str]  # path of the file of each sample: an image, or a shard of many
    labels: IntArray
    heights: IntArray
    widths: IntArray
    """Height and width of the displayed images in pixels: EXIF orientation is applied."""

    orientations: Bytes | None = None
    """EXIF orientations of the stored images; None if all are upright."""

    by_pillow: Bytes | None = None
    """1 for the images that every decoder leaves to Pillow (see headers.py); None without any."""

    num_bytes: IntArray | None = None  # lengths of the encoded images; None for synthetic images
    offsets: IntArray | None = None
    """Positions of the images in their files; None if each is a whole file."""

    mtimes: IntArray | None = None
    """Modification times in nanoseconds; None for shards and synthetic images."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """ETags of shards in a bucket, by their paths; empty for files."""

    bad: tuple[Unusable, ...] = ()
    """Images that were left out, by their path from the root, in a shard with the member's name."""

    ignored: Mapping[str, int] = field(default_factory=dict)
    """Numbers of ignored files, by suffix, at the time the index was built."""

    cache: HostCache | None = None
    """Where this host keeps blocks of a bucket; None: every image is a request."""

    digest: str = ""  # digest of the content: indexes with the same digest list the same images
    trained: IntArray | None = None
    """Samples that a run may train on, in rising order; None for all."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def identity(self) -> dict[str, object]:
        """Number of images and digest, for the log; the digest is None for synthetic images."""
        return {"samples": len(self), "digest": self.digest or None}

    def file(self, sample: int) -> str:
        """Return the path of a sample's file as a string, without the cost of a Path."""
        return f"{self.root}/{self.paths[sample]}"

    def locate(self, sample: int) -> Location:
        """Return the file of a sample, and the position of the encoded image in it."""
        assert self.num_bytes is not None, "synthetic images are not read"
        offset = 0 if self.offsets is None else int(self.offsets[sample])
        mtime = None if self.mtimes is None else int(self.mtimes[sample])
        return Location(self.file(sample), offset, int(self.num_bytes[sample]), mtime)


class BadImagesError(DataError):
    """Some images cannot be used; `bad` lists all of them, the message only the first."""

    def __init__(self, root: Place, split: str, content: Content) -> None:
        self.bad = content.bad
        total = len(self.bad) + len(content.arrays["labels"])
        super().__init__(
            f"{root}: {len(self.bad)} of {total} images in {split} cannot be used; replace or "
            f"remove them, or leave them out with: largebatch data index {root} --drop-bad\n  "
            + shorten([f"{path}: {reason}" for path, reason in self.bad], between="\n  ")
        )


def pack(header: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Return the content of a file with `header` (plain JSON values) and `arrays`."""
    # safetensors stores tensors; a header with lists and numbers becomes one of bytes.
    text = np.frombuffer(json.dumps(header).encode("ascii"), np.uint8)
    content = save({**arrays, HEADER: text})
    return content + checksum([content])


def unpack(content: bytes) -> tuple[dict[str, Any], Arrays]:
    """Return header and arrays from the content of a file; raise ValueError if it is damaged."""
    # The checksum first: the parsers trust the lengths that they read.
    whole = content[:-CHECKSUM_BYTES]
    try:
        if content != whole + checksum([whole]):
            raise ValueError("not an index, or a damaged one")
        arrays = load(whole)
        return json.loads(arrays.pop(HEADER).tobytes()), arrays
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"not an index ({error})") from None


def places(root: Place, split: str) -> tuple[tuple[Place, str], tuple[Place, str]]:
    """Return the places where the index of a split may be stored, the preferred one first.

    Each is a folder or an address, and the name of the index in it.
    """
    whole = os.fsencode(root.resolve()) if isinstance(root, Path) else root.url.encode()
    number = hashlib.sha256(whole).hexdigest()[:16]
    cached = user_cache() / "index", f"{number}-{split}.index"
    return (root, f".largebatch-{split}.index"), cached


def load_or_read(root: Place, split: str) -> Index:
    """Return the index of a split, stored or built by `open_content`."""
    return index_of(open_content(root, split), root)


def read_folder(root: Path, split: str) -> Index:
    """Return the index of a split without storing it; labels number the sorted class folders."""
    return index_of(_read(root, split), root)


def open_content(
    root: Place, split: str, *, every_file: bool = False, progress: ReadProgress = silent
) -> Content:
    """Return the index stored for this folder; build and store one if there is none.

    `every_file` compares all files now. Raises DataError if the folder has changed since.
    """
    reasons = []
    # Both places may have one: a user who may not write to the folder stores it in the cache, and
    # its owner may store one beside the images later.
    for content in find_stored(root, split):
        changed = (
            _read_now(content)
            or _other_storage(content, root)
            or difference(content, root, every_file=every_file)
        )
        if changed is None:
            return content
        reasons.append(f"{changed} (the index is {content.file})")
    if reasons:
        raise DataError(
            f"{root}: changed since it was indexed: {reasons[0]}; run: largebatch data index {root}"
        )
    return make(root, split, progress=progress)


def require_stored(root: Place, *, purpose: str) -> None:
    """Raise DataError unless both splits of a folder have a stored index."""
    exists = not isinstance(root, Path) or root.is_dir()
    if exists and not all(any(find_stored(root, split)) for split in ("train", "val")):
        raise DataError(
            f"{purpose}: {root}: the log's clock needs an index; run: largebatch data index {root}"
        )


def find_stored(root: Place, split: str) -> Iterator[Content]:
    """Yield the undamaged indexes stored for this folder, the preferred place first.

    Raises DataError if a bucket cannot be reached: its index may be there.
    """
    for place, name in places(root, split):
        try:
            header, arrays = unpack(read_place(place, name))
        except FileNotFoundError:
            continue
        except OSError as error:
            # Web servers often deny names that begin with a dot.
            is_hidden = isinstance(error, PermissionError) and _is_web(place)
            if isinstance(place, Address) and not is_hidden:
                raise DataError(f"{error}") from None
        except ValueError:
            continue
        else:
            if header.get("format") == FORMAT and header["split"] == split:
                yield Content(header, arrays, place / name)


def _is_web(place: Place) -> bool:
    return isinstance(place, Address) and place.scheme in WEB


def make(
    root: Place, split: str, *, drop_bad: bool = False, progress: ReadProgress = silent
) -> Content:
    """Read the header of every image of a split and store the index, beside them or in the cache.

    Raises BadImagesError if there are bad images, unless `drop_bad`.
    """
    content = _read(root, split, drop_bad=drop_bad, progress=progress)
    for place, name in places(root, split):
        # A web server raises DataError; a bucket may be read-only.
        with contextlib.suppress(OSError, DataError):
            write_place(place, name, pack(content.header, content.arrays))
            return content._replace(file=place / name)
    return content


def index_of(content: Content, root: Place) -> Index:
    """Return the index with this content, for the images in `root`."""
    header, arrays, _ = content
    split = header["split"]
    labels = arrays["labels"]
    if "shards" in arrays:
        paths = Paths([f"{split}/{name}" for name, *_ in header["shards"]], arrays["shards"])
    else:
        folders = [f"{split}/{name}" for name in header["classes"]]
        paths = Paths(folders, labels, names=arrays["names"])
    return Index(
        root=root,
        classes=tuple(header["classes"]),
        paths=paths,
        labels=labels,
        heights=arrays["heights"],
        widths=arrays["widths"],
        orientations=arrays["orientations"],
        by_pillow=arrays["by_pillow"],
        num_bytes=arrays["num_bytes"],
        offsets=arrays.get("offsets"),
        mtimes=arrays.get("mtimes"),
        versions={
            f"{split}/{name}": version
            for name, _, version in header["shards"]
            if isinstance(version, str)
        },
        bad=content.bad,
        ignored=header["ignored"],
        digest=header["digest"],
    )


def check_classes(root: Place, train: Sequence[str], val: Sequence[str]) -> None:
    """Raise DataError for one class, or other classes in val, where labels differ in meaning."""
    if tuple(train) != tuple(val):
        only_train = sorted(set(train) - set(val))
        only_val = sorted(set(val) - set(train))
        raise DataError(
            f"{root}: the splits must have the same classes; only in train: {shorten(only_train)}; "
            f"only in val: {shorten(only_val)}"
        )
    if len(train) == 1:
        raise DataError(f"{root}: has one class, {train[0]}; expected two or more")


def _read_now(content: Content) -> str | None:
    """Return which files were left out when an index was built and are images now."""
    kinds = [kind for kind in content.header["ignored"] if kind in EXTENSIONS]
    return f"its {shorten(kinds)} files are read now" if kinds else None


def _other_storage(content: Content, root: Place) -> str | None:
    """Return that an index of files was copied to a bucket, or an index of a bucket to a folder.

    The times of files say nothing about objects, and ETags nothing about files.
    """
    is_of_bucket = any(isinstance(version, str) for _, _, version in content.header["shards"])
    if is_of_bucket == isinstance(root, Address):
        return None
    return "the index is of a bucket" if is_of_bucket else "the index is of a folder"


def difference(content: Content, root: Place, *, every_file: bool) -> str | None:
    """Return the first difference between an index and its folder, or None."""
    header = content.header
    split = header["split"]
    try:
        names, shards = layout(root, split)
        stored: dict[str, object] = {name: tuple(about) for name, *about in header["shards"]}
        names_and_sizes: dict[str, object] = {shard.name: shard[1:] for shard in shards}
        # Class folders are compared by their names here, and by their times in `_files_differ`.
        if not shards:
            names_and_sizes |= dict.fromkeys(names)
        if not stored:
            stored = dict.fromkeys(header["classes"])
        changed = _first_change(split, stored, names_and_sizes)
        if not shards and isinstance(root, Path):  # a bucket has only shards
            changed = changed or _files_differ(content, root, every_file=every_file)
        elif not changed and list(read_classes(root)) != header["classes"]:
            changed = f"{CLASSES} names other classes"
    except OSError as error:
        raise DataError(f"{root}: cannot be read: {error}") from error
    return changed


def _first_change(label: str, then: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    for name in sorted(then.keys() | now.keys()):
        if name not in then or name not in now:
            return f"{label}/{name} is {'new' if name in now else 'missing'}"
        if then[name] != now[name]:
            return f"{label}/{name} was changed"
    return None


def _files_differ(content: Content, root: Path, *, every_file: bool) -> str | None:
    header = content.header
    arrays = content.arrays
    split = content.header["split"]
    paths = index_of(content, root).paths
    sizes = arrays["num_bytes"]
    mtimes = arrays["mtimes"]
    bad = {path for path, _ in content.bad}

    def folder(label: int) -> str | None:
        name = header["classes"][label]
        mtime = header["folders"][label]
        label_folder = f"{split}/{name}"
        if not every_file and (root / label_folder).stat().st_mtime_ns == mtime:
            return None
        _, images = scan_class(root / split, name)
        now = {file: facts for file, *facts in images if f"{label_folder}/{file}" not in bad}
        # Images are sorted by class, so a class is one range of rows.
        rows = range(*np.searchsorted(arrays["labels"], [label, label + 1]).tolist())
        then = {
            paths[row].removeprefix(f"{label_folder}/"): [int(sizes[row]), int(mtimes[row])]
            for row in rows
        }
        return _first_change(label_folder, then, now)

    def files(rows: range) -> str | None:
        for row in rows:
            status = (root / paths[row]).stat()
            if (sizes[row], mtimes[row]) != (status.st_size, status.st_mtime_ns):
                return f"{paths[row]} was changed"
        return None

    examined = range(0, 0 if every_file else len(sizes), -(-len(sizes) // MOST))
    parts = [examined[start : start + PART] for start in range(0, len(examined), PART)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="compare") as pool:
        labels = range(len(header["folders"]))
        return next(filter(None, chain(pool.map(folder, labels), pool.map(files, parts))), None)


def _read(
    root: Place, split: str, *, drop_bad: bool = False, progress: ReadProgress = silent
) -> Content:
    """Measure every image of a split, in threads, because they mostly wait for the storage."""
    try:
        names, shards = layout(root, split)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about what is checked here
            if shards:
                # Labels of shards are numbers, whose names are in one file.
                names = read_classes(root)
                arrays, bad = _measure_shards(root, split, shards, len(names), progress)
                folders: list[int] = []
            else:
                assert isinstance(root, Path), "a bucket has only shards"
                arrays, bad, folders = _measure_folders(root, split, names, progress)
        ignored = list_ignored(root, split)
    except OSError as error:
        raise DataError(f"{root}: cannot be read: {error}") from error
    header: dict[str, Any] = {
        "format": FORMAT,
        "split": split,
        "classes": list(names),
        "folders": folders,
        "shards": shards,
        "bad": bad,
    }
    # Class folders' times are in it: a restored copy of the data with other times is another
    # index.
    # The digest does not depend on the location of the folder, nor on ignored files.
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode("ascii"))
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).data)
    content = Content({**header, "digest": digest.hexdigest(), "ignored": ignored}, arrays)
    if bad and not drop_bad:
        raise BadImagesError(root, split, content)
    # A class without images cannot be learned, which accuracy would show late and without its
    # name.
    counts = np.bincount(arrays["labels"], minlength=len(names))
    missing = [name for name, count in zip(names, counts, strict=True) if not count]
    if missing:
        raise DataError(
            f"{root / split}: {len(missing)} of {len(names)} classes have no usable image: "
            f"{shorten(missing)}; add some, or: largebatch data import imagefolder SOURCE --out DIR"
        )
    return content


def _measure_folders(
    root: Path, split: str, classes: Sequence[str], progress: ReadProgress
) -> tuple[Arrays, list[Unusable], list[int]]:
    folders = {name: scan_class(root / split, name) for name in classes}
    images = [image for _, class_images in folders.values() for image in class_images]
    paths = [
        f"{split}/{name}/{image.name}" for name, (_, all_) in folders.items() for image in all_
    ]
    measured = np.zeros((len(paths), len(Size._fields)), dtype=np.int64)  # zeros: a bad image
    reasons: dict[int, str] = {}

    def measure(rows: range) -> int:
        for row in rows:
            read = partial(_measure_file, f"{root}/{paths[row]}", images[row].size)
            try:
                try:
                    measured[row] = read()
                except OSError as error:  # of the disk, which does not make it a bad image
                    measured[row] = read_again(read, error, name=f"{root}/{paths[row]}")
            except BadImageError as error:
                reasons[row] = str(error)
        return rows.stop

    parts = [range(n, min(n + PART, len(paths))) for n in range(0, len(paths), PART)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="headers") as pool:
        for done in pool.map(measure, parts):
            progress(done, len(paths))
    # A bad image has kept the zeros of its row.
    usable = np.flatnonzero(measured[:, 0])
    # One array of bytes: a list of a million strings would take about 100 MB in each worker.
    names = np.array([os.fsencode(image.name) for image in images] or [b"-"])[usable]
    counts = [len(class_images) for _, class_images in folders.values()]
    facts = np.array([image[1:] for image in images], dtype=np.int64).reshape(-1, 2)[usable]
    arrays = {
        "labels": np.repeat(np.arange(len(counts), dtype=np.int64), counts)[usable],
        "heights": measured[usable, 0],
        "widths": measured[usable, 1],
        "orientations": measured[usable, 2].astype(np.uint8),
        "by_pillow": measured[usable, 3].astype(np.uint8),
        "num_bytes": facts[:, 0].copy(),
        "mtimes": facts[:, 1].copy(),
        "names": names.view(np.uint8).reshape(len(usable), names.itemsize),
    }
    bad = [Unusable(paths[row], reasons[row]) for row in sorted(reasons)]
    return arrays, bad, [mtime for mtime, _ in folders.values()]


def _measure_file(path: str, num_bytes: int) -> Size:
    if not num_bytes:  # also a pipe or a device, which must not be opened
        raise BadImageError("the file is empty")
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            return measure(
                lambda position, length: os.pread(file, min(length, num_bytes), position), num_bytes
            )
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in OF_THE_FILE:
            raise BadImageError(os.strerror(error.errno)) from None
        raise


def _measure_shards(
    root: Place, split: str, shards: Sequence[File], num_classes: int, progress: ReadProgress
) -> tuple[Arrays, list[Unusable]]:
    def measure(number: int) -> tuple[IntArray, list[Unusable]]:
        path = f"{split}/{shards[number].name}"
        rows = []
        bad = []
        with open_shard(root, split, shards[number]) as file:
            for member in read_shard(file, num_classes, name=f"{root}/{path}"):
                try:
                    if isinstance(member, Unusable):
                        raise BadImageError(member.reason)
                    size = measure_part(file, member.offset, member.num_bytes)
                    rows.append((member.label, *size, member.offset, member.num_bytes, number))
                except BadImageError as error:
                    bad.append(Unusable(f"{path}/{member.name}", str(error)))
        return np.array(rows, dtype=np.int64).reshape(-1, 8), bad

    parts: list[IntArray] = []
    bad: list[Unusable] = []
    with ThreadPoolExecutor(THREADS, thread_name_prefix="headers") as pool:
        for rows, unusable in pool.map(measure, range(len(shards))):
            parts.append(rows)
            bad += unusable
            progress(len(parts), len(shards))
    names = ("labels", *SIZES, "offsets", "num_bytes", "shards")
    arrays = dict(zip(names, np.concatenate(parts).T.copy(), strict=True))
    small = {name: arrays[name].astype(np.uint8) for name in ("orientations", "by_pillow")}
    return {**arrays, **small}, bad


def share_index(root: Place | None, content: Content | None, backend: Backend) -> Index:
    """Return worker 0's index of the images in `root` on every worker; other workers pass None."""
    # Worker 0 alone reads the folder: a thousand workers would ask a shared file system for the
    # same million entries at once.
    packed = None
    if content is not None:
        packed = pack({**content.header, "root": str(root)}, content.arrays)
    header, arrays = unpack(broadcast_bytes(packed, backend))
    index = index_of(Content(header, arrays), place_of(header["root"]))
    if index.mtimes is not None:
        # A machine may have a copy of the folder, whose files have other times.
        with contextlib.suppress(OSError):
            if Path(index.file(0)).stat().st_mtime_ns != index.mtimes[0]:
                return replace(index, mtimes=None)
    return index

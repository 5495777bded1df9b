"""Write data sets as WebDataset shards: `out/{train,val}/000000.tar` ... and `out/classes.txt`.

Images keep their bytes and their order, so a sample has the same number in the shards as in the
original folder, and a run on either sees the same images in the same order. (Readers that read
shards front to back, without this package's index, should shuffle: they are sorted by class.)
"""

import hashlib
import io
import math
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from largebatch.data.decoders.reader import read
from largebatch.data.index.folder import CLASSES, is_class_name
from largebatch.data.index.index import Index, check_same_classes, load_or_read
from largebatch.data.index.shards import BLOCK, LABEL, Unusable
from largebatch.data.index.verify import CHECKSUM_BYTES
from largebatch.errors import SHOWN, DataError, shorten
from largebatch.storage import THREADS, Progress, new_folder

TRAIN, VAL = SPLITS = ("train", "val")

PART = 256  # number of samples prepared together, in several threads
STARTS = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG": "png",
    b"BM": "bmp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
    **{f"P{n}".encode(): "pgm" for n in (2, 5)},
    **{f"P{n}".encode(): "ppm" for n in (1, 3, 4, 6)},
}
"""File extension of an encoded image, by its first bytes."""

S = TypeVar("S")


class Sample(NamedTuple):
    """One encoded image."""

    content: bytes
    extension: str  # extension of the file name, without a dot
    label: int
    origin: object = None  # what `str` turns into the image's name in its source, if it has one


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set to be written as shards."""

    classes: Sequence[str]
    sizes: Mapping[str, int]  # number of samples of each split, for the progress
    samples: Callable[[str], Iterable[Sample | Unusable]]
    """Function that yields the samples of a split in order."""

    remarks: Sequence[str] = ()  # lines to print after the import: ignored files, and the division


def pack_folder(root: Path, out: Path, *, shard_bytes: int, progress: Progress) -> None:
    """Copy the images of `root/{train,val}` into new shards, in the same order.

    Images dropped from the indexes are left out.
    """
    indexes = {split: load_or_read(root, split) for split in SPLITS}
    check_same_classes(root, *(indexes[split].classes for split in SPLITS))
    data_set = DataSet(
        indexes[TRAIN].classes,
        {split: len(index) for split, index in indexes.items()},
        lambda split: _copies(indexes[split]),
    )
    write_shards(data_set, out, shard_bytes=shard_bytes, progress=progress)


def write_shards(
    data_set: DataSet, out: Path, *, shard_bytes: int, progress: Progress, drop_bad: bool = False
) -> list[str]:
    """Write a data set atomically into a new folder.

    Returns lines that name the bad images, which are left out, and the images of val that are equal
    to one of train. Raises DataError that lists the first bad images, unless `drop_bad`.
    """
    broken = [name for name in data_set.classes if not is_class_name(name)]
    if broken:
        raise DataError(
            f"{broken[0]!r} is not a valid class name: {CLASSES} has one per line; rename it"
        )
    total, done = sum(data_set.sizes.values()), 0
    bad: list[str] = []
    trained: dict[bytes, object] = {}
    equal: list[str] = []
    used: dict[str, set[int]] = {split: set() for split in data_set.sizes}
    with new_folder(out) as folder:
        text = "".join(f"{name}\n" for name in data_set.classes)
        (folder / CLASSES).write_text(text, encoding="utf-8", errors="surrogateescape")
        for split in data_set.sizes:
            with closing(ShardWriter(folder / split, shard_bytes=shard_bytes)) as writer:
                for sample in _read_samples(data_set, split):
                    done += 1
                    if isinstance(sample, Unusable):
                        bad.append(str(sample))
                    else:
                        origin = sample.origin or f"{split}, image {writer.num_samples}"
                        key = hashlib.blake2b(sample.content, digest_size=CHECKSUM_BYTES).digest()
                        if split == TRAIN:
                            trained.setdefault(key, origin)
                        elif key in trained:
                            equal.append(f"{origin} = {trained[key]}")
                        writer.add(sample.content, extension=sample.extension, label=sample.label)
                        used[split].add(sample.label)
                    if done % PART == 0 or done == total:
                        progress(done, total)
        if bad and not drop_bad:
            raise DataError(
                f"{out}: not written: {len(bad)} of {total} images cannot be used; replace them, "
                "or leave them out: the same `largebatch data import` with --drop-bad\n  "
                + shorten(bad, between="\n  ")
            )
        for split, labels in used.items():
            names = data_set.classes
            missing = [name for label, name in enumerate(names) if label not in labels]
            if missing:
                raise DataError(
                    f"{out}: not written: {len(missing)} of {len(names)} classes have no image in "
                    f"{split} that can be used: {shorten(missing)}; replace images of these "
                    "classes, or leave the classes out"
                )
    remarks = [[f"{len(bad)} of {total} images left out:", *bad]] if bad else []
    if equal:
        head = f"{len(equal)} of {data_set.sizes[VAL]} images of val are equal to one of train, "
        remarks.append([f"{head}byte by byte; remove one of each two:", *equal])
    return [shorten(lines, most=1 + SHOWN, between="\n  ") for lines in remarks]


def _read_samples(data_set: DataSet, split: str) -> Iterator[Sample | Unusable]:
    """Yield the samples; convert an OSError of reading, so that others are errors of writing."""
    try:
        yield from data_set.samples(split)
    except OSError as error:
        raise DataError(f"the images of {split} cannot be read ({error})") from error


def in_parts(prepare: Callable[[int], S], number: int) -> Iterator[S]:
    """Call `prepare` for 0 .. number - 1 in threads; yield the results in order, holding few."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="prepare") as pool:
        for start in range(0, number, PART):
            yield from pool.map(prepare, range(start, min(start + PART, number)))


def _copies(index: Index) -> Iterator[Sample]:
    def copy(row: int) -> Sample:
        location = index.locate(row)
        content = read(location)
        in_shard = index.offsets is not None
        extension = extension_of(content) if in_shard else location.path.suffix[1:]
        return Sample(content, extension, int(index.labels[row]))

    return in_parts(copy, len(index))


def extension_of(content: bytes) -> str:
    """Return the file extension of an encoded image's format; `bin` if it is unknown.

    >>> extension_of(b"P6 1 1 255 rgb")
    'ppm'
    """
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    return next((name for start, name in STARTS.items() if content.startswith(start)), "bin")


class ShardWriter:
    """Writes samples into `folder/000000.tar` and so on, each at most `shard_bytes` long.

    The same samples give the same bytes: owners, modes and times are omitted. A sample longer than
    the limit gets its own shard. Close it at the end.
    """

    def __init__(self, folder: Path, *, shard_bytes: int) -> None:
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes must be at least 1, got {shard_bytes}")
        self._folder = folder
        self._limit = shard_bytes
        self._tar: tarfile.TarFile | None = None
        self._used = 0
        self.num_samples = 0
        self.num_shards = 0

    def add(self, content: bytes, *, extension: str, label: int) -> None:
        """Write one encoded image with its label; `extension` is without a dot."""
        files = {extension.lower(): content, LABEL: str(label).encode("ascii")}
        blocks = sum(1 + math.ceil(len(data) / BLOCK) for data in files.values())  # 1: the header
        end = tarfile.RECORDSIZE  # the longest end that tarfile writes
        if self._tar is None or self._used + BLOCK * blocks + end > self._limit:
            self._open_shard()
        assert self._tar is not None
        for name, data in files.items():
            member = tarfile.TarInfo(f"{self.num_samples:09d}.{name}")
            member.size = len(data)
            self._tar.addfile(member, io.BytesIO(data))
        self._used += BLOCK * blocks
        self.num_samples += 1

    def close(self) -> None:
        """Close the last shard."""
        if self._tar is not None:
            self._tar.close()
            self._tar = None

    def _open_shard(self) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self.num_shards:06d}.tar"
        self._tar = tarfile.open(path, "x", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 -- closed by close()
        self._used = 0
        self.num_shards += 1

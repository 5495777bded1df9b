"""Write data sets as WebDataset shards: `out/{train,val}/000000.tar` ... and `out/classes.txt`.

Images keep their bytes. Training images are shuffled, so that consecutive ones are a random part
of the data set: a reader of whole chunks or shards needs no large buffer. The name of an image is
its row in the source, which records the order.
"""

import io
import math
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

from largebatch.address import Place
from largebatch.bucket import open_bucket
from largebatch.data.datasets.copies import MOST, Copies, Fingerprint, fingerprint
from largebatch.data.decoders.reader import read
from largebatch.data.decoders.sources import open_source
from largebatch.data.index.folder import CLASSES, is_class_name
from largebatch.data.index.headers import JPEG, is_heic, is_webp
from largebatch.data.index.index import check_classes, load_or_read
from largebatch.data.index.remote import SHARD_NAME
from largebatch.data.index.shards import BLOCK, LABEL, Unusable
from largebatch.data.order import import_order
from largebatch.errors import DataError, shorten
from largebatch.formatting import plural
from largebatch.storage import PART, THREADS, ReadProgress, new_folder, require_new

AT_A_TIME = 32  # number of samples whose fingerprints are taken together; photographs are large

TRAIN, VAL = SPLITS = ("train", "val")

S = TypeVar("S")


class Sample(NamedTuple):
    """One encoded image."""

    content: bytes
    extension: str  # extension of the file name, without a dot
    label: int


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set to be written as shards."""

    classes: Sequence[str]
    sizes: Mapping[str, int]  # number of samples of each split, for the progress
    samples: Callable[[str, Sequence[int]], Iterable[Sample | Unusable]]
    """Function that yields the samples of these rows of a split, in their order."""

    remarks: Sequence[str] = ()  # lines to print after the import: ignored files, and the division
    name: Callable[[str, int], str] = "{} image {}".format
    """Name of a sample in the source, by its split and position, for messages."""


@contextmanager
def open_packed(source: Place) -> Iterator[DataSet]:
    """Read the images of `source/{train,val}`; rows are those of its indexes."""
    indexes = {split: load_or_read(source, split) for split in SPLITS}
    classes = indexes[TRAIN].classes
    check_classes(source, classes, indexes[VAL].classes)

    def samples(split: str, rows: Sequence[int]) -> Iterator[Sample]:
        index = indexes[split]
        images = open_source(index)

        def copy(row: int) -> Sample:
            content = read(index.locate(row), images)
            return Sample(content, extension_of(content), int(index.labels[row]))

        return in_parts(copy, rows)

    yield DataSet(classes, {split: len(index) for split, index in indexes.items()}, samples)


def write_shards(
    data_set: DataSet,
    out: Place,
    *,
    shard_bytes: int,
    progress: ReadProgress,
    drop_bad: bool = False,
    seed: int | None = 0,
) -> list[str]:
    """Write a data set atomically into a new folder or bucket; return lines to print about it.

    These are the bad images, which are left out, and copies. `seed` draws the order of the training
    images; None keeps the source's. Raises DataError that lists the first bad images, unless
    `drop_bad`.
    """
    broken = [name for name in data_set.classes if not is_class_name(name)]
    if broken:
        raise DataError(
            f"{broken[0]!r} is not a valid class name: {CLASSES} has one per line; rename it"
        )
    total = sum(data_set.sizes.values())
    done = 0
    bad: list[str] = []
    copies = Copies(data_set.name)
    with _new_place(out) as (folder, finish):
        text = "".join(f"{name}\n" for name in data_set.classes)
        (folder / CLASSES).write_text(text, encoding="utf-8", errors="surrogateescape")
        # Training first: `Copies` calls an image of validation the copy.
        for split in data_set.sizes:
            used: set[int] = set()
            bad_rows: dict[int, str] = {}
            prints: dict[int, tuple[int, Fingerprint]] = {}
            rows: Sequence[int] = range(data_set.sizes[split])
            if split == TRAIN and seed is not None:
                rows = import_order(len(rows), seed=seed).tolist()
            with open_shards(folder / split, shard_bytes=shard_bytes, finish=finish) as write:
                samples = _with_fingerprints(data_set.samples(split, rows), looks=total <= MOST)
                for row, (sample, packed) in zip(rows, samples, strict=True):
                    done += 1
                    if isinstance(sample, Unusable):
                        bad_rows[row] = str(sample)
                    else:
                        write(sample, row)
                        used.add(sample.label)
                        prints[row] = sample.label, packed
                    if done % PART == 0 or done == total:
                        progress(done, total)
            # Messages name the images in the order of the source.
            bad += [bad_rows[row] for row in sorted(bad_rows)]
            for row in sorted(prints):
                copies.add(split, row, *prints[row])
            # Bad images are reported first: they are often the reason for a missing class.
            missing = set(range(len(data_set.classes))) - used
            if missing and (drop_bad or not bad):
                names = [data_set.classes[label] for label in sorted(missing)]
                raise DataError(
                    f"{out}: not written: {len(missing)} of {len(data_set.classes)} classes have "
                    f"no image in {split} that can be used: {shorten(names)}"
                )
        if bad and not drop_bad:
            raise DataError(
                f"{out}: not written: {len(bad)} of {total} images cannot be used; replace them, "
                "or leave them out: the same `largebatch data import` with --drop-bad\n  "
                + shorten(bad, between="\n  ")
            )
    left_out = (
        [f"{plural(len(bad), 'image')} left out:\n  " + shorten(bad, between="\n  ")] if bad else []
    )
    shuffled = [] if seed is None else [f"{TRAIN}: shuffled with seed {seed}"]
    return [*shuffled, *left_out, *copies.remarks()]


@contextmanager
def _new_place(out: Place) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """Yield a folder to fill, and a function to call with the path of each finished shard.

    In a bucket the classes are written last, without which it is no data set; if the block fails,
    its objects are removed.
    """
    if isinstance(out, Path):
        with new_folder(out) as folder:
            yield folder, lambda _: None
        return
    bucket = open_bucket(out)
    written: list[str] = []
    with TemporaryDirectory(prefix="largebatch-") as name:
        folder = Path(name)

        def send(path: Path) -> None:
            bucket.write(path.relative_to(folder).as_posix(), path)
            written.append(path.relative_to(folder).as_posix())
            path.unlink()

        try:
            yield folder, send
            send(folder / CLASSES)
        except BaseException as error:
            for name_of_object in written:
                with suppress(OSError):
                    bucket.remove(name_of_object)
            if isinstance(error, OSError):
                raise DataError(f"{error}; nothing was written") from None
            raise


def require_new_place(out: Place) -> None:
    """Raise DataError unless `out` is a free name for a new folder, or an address without objects.

    Also for a bucket that is not there, or not this user's.
    """
    if isinstance(out, Path):
        require_new(out)
        return
    try:
        if out.scheme == "file":
            out.folder.mkdir(parents=True, exist_ok=True)
        is_empty = open_bucket(out).is_empty
    except OSError as error:
        raise DataError(f"{error}; create the bucket, or correct the address") from None
    if not is_empty:
        raise DataError(f"{out}: has objects already; remove them or choose another address")


def _with_fingerprints(
    samples: Iterable[Sample | Unusable], *, looks: bool
) -> Iterator[tuple[Sample | Unusable, Fingerprint]]:
    def prepare(sample: Sample | Unusable) -> tuple[Sample | Unusable, Fingerprint]:
        content = b"" if isinstance(sample, Unusable) else sample.content
        return sample, fingerprint(content, looks=looks)

    rest = iter(samples)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="copies") as pool:
        while part := list(islice(rest, AT_A_TIME)):
            yield from pool.map(prepare, part)


def in_parts(prepare: Callable[[int], S], rows: Sequence[int]) -> Iterator[S]:
    """Call `prepare` for each row in threads; yield the results in order, holding few."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="prepare") as pool:
        # pool.map submits all of its items at once, and would hold every image of the data set.
        for start in range(0, len(rows), PART):
            yield from pool.map(prepare, rows[start : start + PART])


def extension_of(content: bytes) -> str:
    """Return the file extension of an encoded image."""
    if content.startswith(JPEG):
        return "jpg"
    if is_webp(content):
        return "webp"
    return "heic" if is_heic(content) else "png"


@contextmanager
def open_shards(
    folder: Path, *, shard_bytes: int, finish: Callable[[Path], None] = lambda _: None
) -> Iterator[Callable[[Sample, int], None]]:
    """Yield a function that writes a sample, named by its row, into `folder/000000.tar` and so on.

    Each shard is at most `shard_bytes` long; a longer sample gets its own. The same samples give
    the same bytes: owners, modes and times are omitted. `finish` gets the path of each shard that
    is complete.
    """
    used = shard_bytes
    shards: list[tarfile.TarFile] = []

    def add(sample: Sample, row: int) -> None:
        nonlocal used
        files = {sample.extension.lower(): sample.content, LABEL: f"{sample.label}".encode("ascii")}
        length = sum(BLOCK * (1 + math.ceil(len(data) / BLOCK)) for data in files.values())
        # A tar ends with two zero blocks, padded to a whole record.
        if used + length + tarfile.RECORDSIZE > shard_bytes:  # the longest end of a tar
            if shards:
                shards[-1].close()
                finish(_path_of(folder, len(shards) - 1))
            folder.mkdir(parents=True, exist_ok=True)
            path = _path_of(folder, len(shards))
            shards.append(tarfile.open(path, "x", format=tarfile.USTAR_FORMAT))  # noqa: SIM115 -- closed
            used = 0
        for name, data in files.items():
            member = tarfile.TarInfo(f"{row:09d}.{name}")
            member.size = len(data)
            shards[-1].addfile(member, io.BytesIO(data))
        used += length

    try:
        yield add
    finally:
        if shards:
            shards[-1].close()
    if shards:
        finish(_path_of(folder, len(shards) - 1))


def _path_of(folder: Path, shard: int) -> Path:
    return folder / SHARD_NAME(shard)

"""Data sets published as arrays: CIFAR-10, Fashion-MNIST, and MNIST's layout.

torchvision reads the official archives of the first two (arXiv:1708.07747) and states the MD5 of
each. It is checked before anything is unpacked, because CIFAR-10's archive contains pickles, which
can run any program when they are loaded.
"""

import gzip
import hashlib
import io
import math
import struct
import tarfile
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from largebatch.data.datasets.archives import DAMAGED, fault, require_no_bomb, unpacking
from largebatch.data.datasets.packing import SPLITS, TRAIN, VAL, DataSet, Sample, in_parts
from largebatch.errors import DataError, shorten
from largebatch.optional import require_torchvision

UNSIGNED_BYTES = 8
"""Type code of unsigned bytes, the third byte of an idx file."""

OTHERS = (
    "for MNIST: largebatch data import mnist; for others of this layout: largebatch data import idx"
)

DIGITS = tuple(map(str, range(10)))
"""MNIST's classes."""


class Split(NamedTuple):
    """Images, N x H x W or N x H x W x 3, and their N labels."""

    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.integer]


def data_set(classes: Sequence[str], splits: Mapping[str, Split]) -> DataSet:
    """Return a data set of the images as PNGs."""

    def samples(split: str) -> Iterator[Sample]:
        pixels, labels = splits[split]
        return in_parts(lambda row: Sample(png(pixels[row]), "png", int(labels[row])), len(labels))

    return DataSet(classes, {split: len(labels) for split, (_, labels) in splits.items()}, samples)


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return an image, H x W or H x W x 3, as the content of a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png")
    return buffer.getvalue()


@contextmanager
def open_cifar10(source: Path, *, scratch: Path) -> Iterator[DataSet]:
    """Read cifar-10-python.tar.gz at or in `source`; it is unpacked in `scratch`."""
    require_torchvision()
    from torchvision.datasets import CIFAR10

    archive = source if source.is_file() else source / CIFAR10.filename
    _require_official({archive: CIFAR10.tgz_md5}, CIFAR10.url.removesuffix(CIFAR10.filename))
    with _folder_in(scratch, archive) as root:
        with tarfile.open(archive) as tar:
            tar.extractall(root, filter="data")
        read = {split: CIFAR10(root, train=split == TRAIN) for split in SPLITS}
    splits = {split: Split(data.data, np.array(data.targets)) for split, data in read.items()}
    yield data_set(read[TRAIN].classes, splits)


@contextmanager
def open_fashion_mnist(source: Path, *, scratch: Path) -> Iterator[DataSet]:
    """Read the four gzip files in the folder `source`; they are unpacked in `scratch`."""
    require_torchvision()
    from torchvision.datasets import FashionMNIST

    archives = {source / name: md5 for name, md5 in FashionMNIST.resources}
    _require_official(archives, FashionMNIST.mirrors[0], otherwise=f"; {OTHERS}")
    with _folder_in(scratch, source) as root:
        raw = root / "FashionMNIST" / "raw"
        raw.mkdir(parents=True)
        for archive in archives:
            (raw / archive.stem).write_bytes(gzip.decompress(archive.read_bytes()))
        read = {split: FashionMNIST(root, train=split == TRAIN) for split in SPLITS}
    splits = {split: Split(data.data.numpy(), data.targets.numpy()) for split, data in read.items()}
    yield data_set(FashionMNIST.classes, splits)


@contextmanager
def open_idx(
    source: Path,
    *,
    scratch: Path,  # noqa: ARG001 -- all openers have this argument
    classes: Sequence[str] | None = None,
) -> Iterator[DataSet]:
    """Read the four files of MNIST's layout in the folder `source`, with or without gzip.

    `classes` are the names of the labels; the default is 0 to the highest training label.
    """
    train = _read_split(source, "train", classes)
    names = classes or tuple(map(str, range(int(train.labels.max()) + 1)))
    yield data_set(names, {TRAIN: train, VAL: _read_split(source, "t10k", names)})


def _read_split(source: Path, prefix: str, classes: Sequence[str] | None) -> Split:
    """Read the files of a split, whose names begin with `prefix`."""
    images = _find_idx(source, f"{prefix}-images", 3)
    labels = _find_idx(source, f"{prefix}-labels", 1)
    split = Split(read_idx(images, 3), read_idx(labels, 1))
    if len(split.pixels) != len(split.labels):
        raise DataError(
            f"{images}: has {len(split.pixels)} images, {labels.name} {len(split.labels)} labels; "
            "expected the same number of both: download both again"
        )
    distinct = np.unique(split.labels).tolist()
    expected = classes or tuple(map(str, range(distinct[-1] + 1)))
    if distinct != list(range(len(expected))):
        raise DataError(
            f"{labels}: holds the labels {shorten(list(map(str, distinct)))}; expected 0 to "
            f"{len(expected) - 1}, one for each class ({shorten(expected)})"
        )
    return split


def _find_idx(source: Path, name: str, axes: int) -> Path:
    names = [f"{name}{dot}idx{axes}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    path = next((source / name for name in names if (source / name).is_file()), None)
    if path is None:
        present = [path.name for path in sorted(source.iterdir())] if source.is_dir() else []
        raise DataError(f"{source}: expected {names[0]} or {names[1]}; found {shorten(present)}")
    return path


def read_idx(path: Path, axes: int) -> npt.NDArray[np.uint8]:
    """Read an idx file: two zeros, type code, number of axes, their lengths, then the values."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4)
            if head != bytes([0, 0, UNSIGNED_BYTES, axes]):
                raise ValueError(f"it begins with {head.hex(' ')}, expected 00 00 08 0{axes}")
            lengths = struct.unpack(f">{axes}I", file.read(4 * axes))
            number = math.prod(lengths)
            require_no_bomb(path, number)
            content = file.read(number + 1)
    except DAMAGED as error:
        raise fault(path, error, expected="idx file") from error
    if len(content) != number or number == 0:
        raise DataError(
            f"{path}: its header states {' x '.join(map(str, lengths))} bytes, and "
            f"{'more' if len(content) > number else len(content)} follow; download it again"
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(lengths)


def _require_official(archives: Mapping[Path, str], url: str, *, otherwise: str = "") -> None:
    """Raise DataError if an archive is missing or its MD5 is not the official one."""
    missing = [archive for archive in archives if not archive.is_file()]
    if missing:
        raise DataError(
            f"{missing[0].parent}: {len(missing)} of {len(archives)} archives are missing; "
            f"download into this folder: {', '.join(url + archive.name for archive in missing)}"
            f"{otherwise}"
        )
    for archive, expected in archives.items():
        try:
            with archive.open("rb") as file:
                actual = hashlib.file_digest(file, "md5").hexdigest()
        except OSError as error:
            raise fault(archive, error, expected="archive") from error
        if actual != expected:
            raise DataError(
                f"{archive}: its MD5 is {actual}, the official archive's is {expected}; download "
                f"it again from {url}{otherwise}"
            )


@contextmanager
def _folder_in(scratch: Path, archive: Path) -> Iterator[Path]:
    """Yield a temporary folder in `scratch` to unpack into; it is removed at the end."""
    with unpacking(archive, scratch), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about types in old pickles
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=scratch) as root:
            yield Path(root)

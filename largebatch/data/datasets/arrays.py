"""Data sets that are published as arrays of pixels: CIFAR-10 and Fashion-MNIST.

CIFAR-10 comes as the official Python and binary archives, and as lossless mosaics of its pictures.
The Python archive holds pickles, which can run any program when they are read; the reader here
makes nothing but lists, dicts, strings, numbers and NumPy arrays.

Fashion-MNIST (arXiv:1708.07747) comes as four gzip files of arrays in the idx format: two zero
bytes, the kind of number (8: bytes), the number of axes, each axis' length as a big-endian uint32,
and the numbers.
"""

import gzip
import io
import math
import pickle
import struct
import tarfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from largebatch.data.datasets.archives import DAMAGED, fault, reason
from largebatch.data.datasets.packing import DataSet, Sample, in_parts
from largebatch.errors import DataError

Pixels = npt.NDArray[np.uint8]

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/"

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

CIFAR10_SIDE, CHANNELS = 32, 3

CIFAR10_BATCHES = {"train": tuple(f"data_batch_{n}" for n in range(1, 6)), "val": ("test_batch",)}
"""The files of either split."""

CIFAR10_ARCHIVES = {
    "cifar-10-python.tar.gz": "cifar-10-batches-py",
    "cifar-10-binary.tar.gz": "cifar-10-batches-bin",
}
"""The folder that either holds."""

MOSAICS = {"train": "train", "val": "test"}
"""Our names of the splits and the mosaics'."""

MOSAIC_ROWS, MOSAIC_COLUMNS = 100, 50

PlainUnpickler: Any = pickle._Unpickler
"""The one written in Python: C's takes gigabytes where a damaged byte numbers an object so high."""

FASHION_MNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"

FASHION_MNIST_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

FASHION_MNIST_SIDE = 28

FASHION_MNIST_SPLITS = {"train": "train", "val": "t10k"}
"""Our names and the archives'."""


class Split(NamedTuple):
    """Pictures, N x H x W or N x H x W x 3, and their N labels."""

    pixels: Pixels
    labels: npt.NDArray[np.integer]


def data_set(source: Path, classes: Sequence[str], splits: Mapping[str, Split]) -> DataSet:
    """Return the pictures as PNGs, after a check of the labels."""
    for split, (pixels, labels) in splits.items():
        if len(pixels) != len(labels) or not len(labels):
            raise DataError(
                f"{source}: {split} has {len(pixels)} pictures and {len(labels)} labels, expected "
                f"as many of both"
            )
        if labels.min() < 0 or labels.max() >= len(classes):
            raise DataError(
                f"{source}: the labels of {split} go from {labels.min()} to {labels.max()}, "
                f"expected 0 to {len(classes) - 1}"
            )

    def samples(split: str) -> Iterator[Sample]:
        pixels, labels = splits[split]
        return in_parts(lambda row: Sample(png(pixels[row]), "png", int(labels[row])), len(labels))

    return DataSet(classes, {split: len(labels) for split, (_, labels) in splits.items()}, samples)


def png(pixels: Pixels) -> bytes:
    """Return a picture, H x W or H x W x 3, as the content of a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png")
    return buffer.getvalue()


@contextmanager
def open_cifar10(source: Path) -> Iterator[DataSet]:
    """Read what `source` is or holds: an archive, the folder unpacked from it, or the mosaics."""
    if (source / "train_labels.npy").is_file():
        splits = {ours: _mosaics(source, theirs) for ours, theirs in MOSAICS.items()}
    else:
        splits = _batches(source, _files(source))
    yield data_set(source, CIFAR10_CLASSES, splits)


def _files(source: Path) -> dict[str, bytes]:
    """Return the official files by name, from the archive or the folder that has them."""
    places = [source, *(source / name for pair in CIFAR10_ARCHIVES.items() for name in pair)]
    for place in places:
        if place.is_file():
            return _from_archive(place)
        files = {path.name: path for path in place.glob("*_batch*") if path.is_file()}
        if files:
            return {name: _content(path) for name, path in files.items()}
    names = " or ".join(CIFAR10_URL + name for name in CIFAR10_ARCHIVES)
    raise DataError(
        f"{source}: CIFAR-10 not found; download {names} into this folder, or name a folder with "
        f"what one of them holds, unpacked ({' or '.join(CIFAR10_ARCHIVES.values())}), or with "
        f"mosaics (train-*.webp and test-*.webp, 5,000 pictures in 100 rows each, with "
        f"train_labels.npy and test_labels.npy)"
    )


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise fault(path, error, expected="file") from error


def _from_archive(path: Path) -> dict[str, bytes]:
    try:
        with tarfile.open(path, "r:*") as tar:
            found = {
                member.name.rpartition("/")[2]: tar.extractfile(member)
                for member in tar
                if member.isfile() and "_batch" in member.name.rpartition("/")[2]
            }
            return {name: file.read() for name, file in found.items() if file is not None}
    except DAMAGED as error:
        raise fault(path, error, expected="archive") from error


def _batches(source: Path, files: Mapping[str, bytes]) -> dict[str, Split]:
    """Put the batches of either split together."""
    binary = any(name.endswith(".bin") for name in files)
    ending, read = (".bin", _read_binary) if binary else ("", _read_pickle)
    names = {split: [name + ending for name in each] for split, each in CIFAR10_BATCHES.items()}
    missing = [name for each in names.values() for name in each if name not in files]
    if missing:
        raise DataError(
            f"{source}: {', '.join(missing)} not found; expected data_batch_1 to data_batch_5 and "
            f"test_batch, each{f' with {ending}' if ending else ''}"
        )
    return {split: _join(source, each, files, read) for split, each in names.items()}


def _join(
    source: Path, names: list[str], files: Mapping[str, bytes], read: Callable[[bytes], Split]
) -> Split:
    parts = []
    for name in names:
        try:
            parts.append(read(files[name]))
        except Exception as error:  # unpickling raises all kinds over damaged bytes
            raise DataError(
                f"{source}: {name} cannot be read: {reason(error)}; fetch it again"
            ) from error
    return Split(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _planes(flat: Pixels) -> Pixels:
    """Turn rows of red, then green, then blue pixels into N x H x W x 3."""
    return flat.reshape(-1, CHANNELS, CIFAR10_SIDE, CIFAR10_SIDE).transpose(0, 2, 3, 1)


def _read_binary(content: bytes) -> Split:
    """Read records of one byte of label and 3,072 bytes of pixels."""
    records = np.frombuffer(content, np.uint8).reshape(
        -1, 1 + CHANNELS * CIFAR10_SIDE * CIFAR10_SIDE
    )
    return Split(_planes(records[:, 1:]), records[:, 0])


def _read_pickle(content: bytes) -> Split:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, of how old pickles state a type
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= batch.keys():
        raise ValueError("it does not hold the data and the labels")
    pixels, labels = batch[b"data"], np.array(batch[b"labels"])
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
        raise ValueError("its data is not an array of bytes")
    if pixels.ndim != 2 or pixels.shape[1] != CHANNELS * CIFAR10_SIDE * CIFAR10_SIDE:
        raise ValueError(
            f"its data is {pixels.shape}, expected rows of {CHANNELS * CIFAR10_SIDE * CIFAR10_SIDE}"
        )
    _require_labels(labels, len(pixels))
    return Split(_planes(pixels), labels)


def _require_labels(labels: object, number: int) -> None:
    """Raise ValueError if these are not as many labels."""
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu":
        raise ValueError("its labels are not whole numbers")
    if labels.shape != (number,):
        raise ValueError(f"its labels are {labels.shape}, expected one for each of {number}")


class _Unpickler(PlainUnpickler):  # type: ignore[misc]  # private, so not in the stubs
    """Makes NumPy arrays and plain values, and refuses everything else a pickle may ask for."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 -- as pickle declares it
        """Return what a pickle may call: only what an array is made with."""
        permitted = {
            ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
            ("numpy._core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
        if (module, name) not in permitted:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which CIFAR-10 does not")
        return permitted[module, name]


def _mosaics(source: Path, split: str) -> Split:
    """Cut the mosaics of a split, in the order of their names, into pictures row by row."""
    paths = sorted(source.glob(f"{split}-*.webp"))
    if not paths:
        raise DataError(f"{source}: no mosaics {split}-*.webp beside {split}_labels.npy")
    pixels = np.concatenate([_cut(path) for path in paths])
    path = source / f"{split}_labels.npy"
    try:
        labels = np.load(path, allow_pickle=False)
        _require_labels(labels, len(pixels))
    except Exception as error:  # NumPy raises all kinds over a damaged header
        raise fault(path, error, expected="file of labels") from error
    return Split(pixels, labels)


def _cut(path: Path) -> Pixels:
    expected = (MOSAIC_COLUMNS * CIFAR10_SIDE, MOSAIC_ROWS * CIFAR10_SIDE)
    try:
        with Image.open(path, formats=["WEBP"]) as image:
            if image.size != expected:
                raise ValueError(f"{image.size} pixels, expected {expected}")
            pixels = np.asarray(image.convert("RGB"))
    except Exception as error:  # Pillow raises all kinds over a damaged file
        raise fault(path, error, expected="mosaic") from error
    parts = pixels.reshape(MOSAIC_ROWS, CIFAR10_SIDE, MOSAIC_COLUMNS, CIFAR10_SIDE, CHANNELS)
    return parts.transpose(0, 2, 1, 3, 4).reshape(-1, CIFAR10_SIDE, CIFAR10_SIDE, CHANNELS)


@contextmanager
def open_fashion_mnist(source: Path) -> Iterator[DataSet]:
    """Read the four files in the folder `source`."""
    names = [name for split in FASHION_MNIST_SPLITS.values() for name in _idx_names(split)]
    missing = [name for name in names if not (source / name).is_file()]
    if missing:
        raise DataError(
            f"{source}: {len(missing)} of the 4 files of Fashion-MNIST are not in this folder; "
            f"download into it: {', '.join(FASHION_MNIST_URL + name for name in missing)}"
        )
    splits = {}
    for ours, theirs in FASHION_MNIST_SPLITS.items():
        pixels, labels = (
            _read_idx(source / name, axes=axes)
            for name, axes in zip(_idx_names(theirs), (3, 1), strict=True)
        )
        if pixels.shape[1:] != (FASHION_MNIST_SIDE, FASHION_MNIST_SIDE):
            raise DataError(
                f"{source / _idx_names(theirs)[0]}: holds {' x '.join(map(str, pixels.shape))} "
                f"pixels, expected pictures of {FASHION_MNIST_SIDE} x {FASHION_MNIST_SIDE}; "
                f"fetch it again"
            )
        splits[ours] = Split(pixels, labels)
    yield data_set(source, FASHION_MNIST_CLASSES, splits)


def _idx_names(split: str) -> tuple[str, str]:
    return f"{split}-images-idx3-ubyte.gz", f"{split}-labels-idx1-ubyte.gz"


def _read_idx(path: Path, *, axes: int) -> Pixels:
    try:
        content = gzip.decompress(path.read_bytes())
    except DAMAGED as error:
        raise fault(path, error, expected="gzip file") from error
    start = 4 + 4 * axes
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) < start:
        raise DataError(
            f"{path}: begins with {content[:4]!r}, expected {bytes([0, 0, 8, axes])!r}: bytes in "
            f"the idx format with {axes} axes; fetch it again"
        )
    shape = struct.unpack(f">{axes}I", content[4:start])
    if len(content) != start + math.prod(shape):
        raise DataError(
            f"{path}: has {len(content) - start} numbers, expected {' x '.join(map(str, shape))}; "
            f"fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)

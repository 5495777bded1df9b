"""Data sets published as arrays: CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST.

torchvision reads the official archives and states the MD5 of each. It is checked before anything is
unpacked, because CIFAR's archives contain pickles, which can run any program when they are loaded.
Nothing is downloaded.
"""

import gzip
import hashlib
import io
import tarfile
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from largebatch.data.datasets.archives import DAMAGED, fault, unpacking
from largebatch.data.datasets.packing import SPLITS, TRAIN, DataSet, Sample, in_parts
from largebatch.errors import DataError
from largebatch.optional import require_torchvision


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
def open_official(source: Path, *, name: str, scratch: Path) -> Iterator[DataSet]:
    """Read the official archives of `name` in the folder `source`; unpack them in `scratch`.

    CIFAR's one archive may also be `source` itself.
    """
    require_torchvision()
    from torchvision.datasets import CIFAR10, CIFAR100, MNIST, FashionMNIST

    kinds: dict[str, Any] = {
        "cifar10": CIFAR10,
        "cifar100": CIFAR100,
        "mnist": MNIST,
        "fashion-mnist": FashionMNIST,
    }
    kind = kinds[name]
    if issubclass(kind, CIFAR10):
        archive = source if source.is_file() else source / kind.filename
        archives, url = {archive: kind.tgz_md5}, kind.url.removesuffix(kind.filename)
    else:
        archives, url = {source / file: md5 for file, md5 in kind.resources}, kind.mirrors[0]
    _require_official(archives, url)
    with unpacking(source, scratch), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about types in old pickles
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=scratch) as root:
            for path in archives:
                if issubclass(kind, CIFAR10):
                    with tarfile.open(path) as tar:
                        tar.extractall(root, filter="data")
                else:
                    raw = Path(root) / kind.__name__ / "raw"
                    raw.mkdir(parents=True, exist_ok=True)
                    (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
            read = {split: kind(root, train=split == TRAIN) for split in SPLITS}
    splits = {
        split: Split(*(torch.as_tensor(array).numpy() for array in (each.data, each.targets)))
        for split, each in read.items()
    }
    classes = tuple(map(str, range(10))) if kind is MNIST else read[TRAIN].classes
    yield data_set(classes, splits)


def _require_official(archives: Mapping[Path, str], url: str) -> None:
    missing = [archive for archive in archives if not archive.is_file()]
    if missing:
        raise DataError(
            f"{missing[0].parent}: {len(missing)} of {len(archives)} archives are missing; "
            f"download into this folder: {', '.join(url + archive.name for archive in missing)}"
        )
    for archive, expected in archives.items():
        try:
            with archive.open("rb") as file:
                actual = hashlib.file_digest(file, "md5").hexdigest()
        except DAMAGED as error:
            raise fault(archive, error, expected="archive") from error
        if actual != expected:
            raise DataError(
                f"{archive}: its MD5 is {actual}, the official archive's is {expected}; download "
                f"it again from {url}"
            )

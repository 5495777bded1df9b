"""Data sets published as arrays: CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST.

torchvision reads the archives, after their MD5 is checked: CIFAR's contain pickles, which can run
any program when they are loaded.
"""

import io
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from largebatch.data.datasets.packing import SPLITS, TRAIN, DataSet, Sample, in_parts
from largebatch.errors import DataError
from largebatch.optional import require_torchvision

ImagesAndLabels = tuple[npt.NDArray[np.uint8], npt.NDArray[np.integer]]
"""Images, N x H x W or N x H x W x 3, and their N labels."""


def data_set(classes: Sequence[str], splits: Mapping[str, ImagesAndLabels]) -> DataSet:
    """Return a data set of the images as PNGs."""

    def samples(split: str, rows: Sequence[int]) -> Iterator[Sample]:
        pixels, labels = splits[split]

        def encode(row: int) -> Sample:
            buffer = io.BytesIO()
            Image.fromarray(pixels[row]).save(buffer, format="png")
            return Sample(buffer.getvalue(), "png", int(labels[row]))

        return in_parts(encode, rows)

    return DataSet(classes, {split: len(labels) for split, (_, labels) in splits.items()}, samples)


@contextmanager
def open_official(source: Path, *, name: str) -> Iterator[DataSet]:
    """Read the official archives of `name` in the folder `source`.

    CIFAR's one archive may also be `source` itself.
    """
    require_torchvision()
    from torchvision.datasets import CIFAR10, CIFAR100, MNIST, FashionMNIST
    from torchvision.datasets.utils import check_integrity, extract_archive

    kind: Any = {
        "cifar10": CIFAR10,
        "cifar100": CIFAR100,
        "mnist": MNIST,
        "fashion-mnist": FashionMNIST,
    }[name]
    if issubclass(kind, CIFAR10):
        named = source.is_file() or source.name == kind.filename
        archive = source if named else source / kind.filename
        archives = {archive: kind.tgz_md5}
        url = kind.url.removesuffix(kind.filename)
    else:
        archives = {source / file: md5 for file, md5 in kind.resources}
        url = kind.mirrors[0]
    for archive, md5 in archives.items():
        if not check_integrity(archive, md5):
            raise DataError(
                f"{archive}: expected the official archive, with the MD5 {md5}, as of "
                f"{url}{archive.name}; its folder must hold {', '.join(p.name for p in archives)}"
            )
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about types in old pickles
        raw = Path(root) / kind.__name__ / "raw"
        raw.mkdir(parents=True)
        for archive in archives:
            extract_archive(archive, root if issubclass(kind, CIFAR10) else raw)
        read = {split: kind(root, train=split == TRAIN) for split in SPLITS}
    splits = {
        split: (torch.as_tensor(subset.data).numpy(), torch.as_tensor(subset.targets).numpy())
        for split, subset in read.items()
    }
    classes = tuple(map(str, range(10))) if kind is MNIST else read[TRAIN].classes
    yield data_set(classes, splits)

"""Small data sets in the form of their official archives.

torchvision, which reads them, knows the official ones by their MD5s; `write` replaces these.
"""

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from largebatch.optional import require_torchvision

require_torchvision()
from torchvision.datasets import (  # noqa: E402 -- once it can be imported
    CIFAR10,
    CIFAR100,
    MNIST,
    FashionMNIST,
)

Pixels = npt.NDArray[np.uint8]
Splits = dict[str, tuple[Pixels, Pixels]]
"""Pixels and labels of train and val; CIFAR's pixels are N x 3,072 with all red first."""

KINDS: dict[str, Any] = {
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "mnist": MNIST,
    "fashion-mnist": FashionMNIST,
}
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
RANDOM = np.random.default_rng(0)


def write(name: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> Splits:
    """Write 20 or 50 and 10 images of ten classes, and declare the archives official."""
    source.mkdir(parents=True, exist_ok=True)
    kind = KINDS[name]
    return (_cifar if issubclass(kind, CIFAR10) else _mnist)(kind, source, monkeypatch)


def _noise(number: int, *shape: int) -> tuple[Pixels, Pixels]:
    pixels = RANDOM.integers(0, 256, (number, *shape), dtype=np.uint8)
    return pixels, RANDOM.permutation(np.arange(number, dtype=np.uint8) % 10)


def _mnist(kind: Any, source: Path, monkeypatch: pytest.MonkeyPatch) -> Splits:  # noqa: ANN401 -- no types
    splits = {"train": _noise(20, 28, 28), "t10k": _noise(10, 28, 28)}
    resources = []
    for split, arrays in splits.items():
        for name, array in zip(("images-idx3", "labels-idx1"), arrays, strict=True):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            path = source / f"{split}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(header + array.tobytes()))
            resources.append((path.name, _md5(path.read_bytes())))
    monkeypatch.setattr(kind, "resources", resources)
    return {"train": splits["train"], "val": splits["t10k"]}


def _cifar(kind: Any, source: Path, monkeypatch: pytest.MonkeyPatch) -> Splits:  # noqa: ANN401 -- no types
    key = "labels" if kind is CIFAR10 else "fine_labels"
    batches = [name for name, _ in (*kind.train_list, *kind.test_list)]
    made = {name: _noise(10, 3072) for name in batches}
    files: dict[str, object] = {
        name: {"data": pixels, key: labels.tolist()} for name, (pixels, labels) in made.items()
    }
    files[kind.meta["filename"]] = {kind.meta["key"]: NAMES}
    packed = {name: pickle.dumps(content, protocol=2) for name, content in files.items()}
    with tarfile.open(source / kind.filename, "w:gz") as tar:
        for name, content in packed.items():
            info = tarfile.TarInfo(f"{kind.base_folder}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    monkeypatch.setattr(kind, "tgz_md5", _md5((source / kind.filename).read_bytes()))
    sums = {name: _md5(content) for name, content in packed.items()}
    monkeypatch.setattr(kind, "train_list", [[name, sums[name]] for name in batches[:-1]])
    monkeypatch.setattr(kind, "test_list", [[batches[-1], sums[batches[-1]]]])
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": sums[kind.meta["filename"]]})
    train = [
        np.concatenate(each) for each in zip(*map(made.__getitem__, batches[:-1]), strict=True)
    ]
    return {"train": (train[0], train[1]), "val": made[batches[-1]]}


def _md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()

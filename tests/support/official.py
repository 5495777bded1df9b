"""Small CIFAR-10 and Fashion-MNIST, in the form of their official archives.

torchvision, which reads them, knows the official ones by their MD5s; `declare` puts these in.
"""

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from largebatch.optional import require_torchvision

require_torchvision()
from torchvision.datasets import CIFAR10, FashionMNIST  # noqa: E402 -- once it can be imported

Pixels = npt.NDArray[np.uint8]
Splits = dict[str, tuple[Pixels, Pixels]]
"""Pixels and labels of train and val."""

ARCHIVE = "cifar-10-python.tar.gz"
BATCHES = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
RANDOM = np.random.default_rng(0)


def noise(*shape: int) -> Pixels:
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def labels(number: int) -> Pixels:
    return RANDOM.permutation(np.arange(number, dtype=np.uint8) % 10)


def write_fashion(source: Path) -> Splits:
    """Write 20 and 10 images."""
    source.mkdir(parents=True, exist_ok=True)
    splits = {"train": (noise(20, 28, 28), labels(20)), "t10k": (noise(10, 28, 28), labels(10))}
    for split, arrays in splits.items():
        for name, array in zip(("images-idx3", "labels-idx1"), arrays, strict=True):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            content = gzip.compress(header + array.tobytes())
            (source / f"{split}-{name}-ubyte.gz").write_bytes(content)
    return {"train": splits["train"], "val": splits["t10k"]}


def write_cifar(source: Path) -> Splits:
    """Write 50 and 10 images; the pixels returned are N x 3,072 with all red first."""
    made = {name: (noise(10, 3072), labels(10)) for name in BATCHES}
    files: dict[str, object] = {
        name: {"data": pixels, "labels": numbers.tolist()}
        for name, (pixels, numbers) in made.items()
    }
    source.mkdir(parents=True, exist_ok=True)
    with tarfile.open(source / ARCHIVE, "w:gz") as tar:
        for name, content in {**files, "batches.meta": {"label_names": NAMES}}.items():
            packed = pickle.dumps(content, protocol=2)
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(packed)
            tar.addfile(info, io.BytesIO(packed))
    train = [made[name] for name in BATCHES[:5]]
    pixels, numbers = (np.concatenate(each) for each in zip(*train, strict=True))
    return {"train": (pixels, numbers), "val": made["test_batch"]}


def declare(monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    """Make the archives in a folder pass as the official ones."""
    found = [(path.name, _md5(path.read_bytes())) for path in sorted(source.glob("*-ubyte.gz"))]
    monkeypatch.setattr(FashionMNIST, "resources", found)
    if (source / ARCHIVE).exists():
        monkeypatch.setattr(CIFAR10, "tgz_md5", _md5((source / ARCHIVE).read_bytes()))
        with tarfile.open(source / ARCHIVE) as tar:
            sums = {Path(m.name).name: _md5(tar.extractfile(m).read()) for m in tar}  # type: ignore[union-attr]
        monkeypatch.setattr(CIFAR10, "train_list", [[name, sums[name]] for name in BATCHES[:5]])
        monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
        monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})


def _md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()

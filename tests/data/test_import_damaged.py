"""Archives that are damaged in any way, of which only DataError may speak."""

import io
import pickle
import random
import resource
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from importing import png
from PIL import Image
from test_imports import labels, noise, python2_pickle, write_cifar, write_fashion, write_idx

from largebatch.data.datasets import import_data
from largebatch.errors import DataError

PICTURES = {
    f"{split}/{name}/{n}.png": png(n)
    for split in ("train", "val")
    for name in ("cat", "dog")
    for n in range(2)
}


def read(name: str, source: Path, out: Path) -> None:
    import_data(name, source, out, shard_bytes=10**6, progress=lambda _done, _total: None)


def write_mosaics(source: Path) -> None:
    source.mkdir()
    for split in ("train", "test"):
        picture = Image.new("RGB", (1600, 3200))
        picture.save(source / f"{split}-00.webp", lossless=True, quality=0, method=0)
        np.save(source / f"{split}_labels.npy", np.arange(5000) % 10)


def write_zip(path: Path, method: int) -> None:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in PICTURES.items():
            file.writestr(name, content)


def write_tar(path: Path, mode: str) -> None:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, content in PICTURES.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1.5  # which gives it an extended header
            tar.addfile(info, io.BytesIO(content))


WHOLE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "idx": ("fashion-mnist", write_fashion),
    "pickles": ("cifar10", lambda source: write_cifar(source, "python", packed=False)),
    "packed pickles": ("cifar10", lambda source: write_cifar(source, "python", packed=True)),
    "binary": ("cifar10", lambda source: write_cifar(source, "binary", packed=False)),
    "zip": ("imagefolder", lambda source: write_zip(source, zipfile.ZIP_DEFLATED)),
    "zip with LZMA": ("imagefolder", lambda source: write_zip(source, zipfile.ZIP_LZMA)),
    "tar": ("imagefolder", lambda source: write_tar(source, "w")),
    "tar.gz": ("imagefolder", lambda source: write_tar(source, "w:gz")),
    "tar.xz": ("imagefolder", lambda source: write_tar(source, "w:xz")),
}


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Cut a file off, or change some bytes, of the first ones more."""
    changed = bytearray(content)
    if chance.random() < 0.3:
        return content[: chance.randrange(len(content))]
    for _ in range(chance.choice([1, 2, 10])):
        end = chance.choice([len(content), min(len(content), 300)])
        changed[chance.randrange(end)] = chance.choice([0, 255, chance.randrange(256)])
    return bytes(changed)


@pytest.mark.parametrize("form", WHOLE)
def test_whatever_is_damaged_a_data_error_says_so_or_nothing_is_lost(
    tmp_path: Path, form: str
) -> None:
    name, write = WHOLE[form]
    source, chance, refused = tmp_path / "source", random.Random(0), 0
    write(source)
    files = [source] if source.is_file() else [p for p in source.rglob("*") if p.is_file()]
    for attempt in range(40):
        path = chance.choice(sorted(files))
        content = path.read_bytes()
        path.write_bytes(damaged(content, chance))
        try:
            read(name, source, tmp_path / f"out{attempt}")
        except DataError as error:
            assert len(str(error)) > 40  # noqa: PT017 -- either outcome is right
            refused += 1
        else:
            assert (tmp_path / f"out{attempt}/train/000000.tar").exists()
        path.write_bytes(content)
    assert refused > 5
    read(name, source, tmp_path / "out")


def test_damaged_labels_of_mosaics_are_refused(tmp_path: Path) -> None:
    write_mosaics(tmp_path / "source")
    path = tmp_path / "source/train_labels.npy"
    header = path.read_bytes()[:128]
    for place in range(8, 100, 9):
        path.write_bytes(header[:place] + b"\xff" + header[place + 1 :])
        with pytest.raises(DataError, match="train_labels.npy: not a whole file of labels"):
            read("cifar10", tmp_path / "source", tmp_path / "out")


LABELS = {
    "too few": np.zeros(4999, np.int64),
    "in a table": np.zeros((5000, 1), np.int64),
    "not numbers": np.full(5000, "cat"),
    "not whole": np.zeros(5000),
    "one": np.int64(3),
    "objects": np.full(5000, None),
}


@pytest.mark.parametrize("wrong", [pytest.param(each, id=name) for name, each in LABELS.items()])
def test_labels_that_do_not_fit_mosaics_are_refused(tmp_path: Path, wrong: np.generic) -> None:
    write_mosaics(tmp_path / "source")
    np.save(tmp_path / "source/test_labels.npy", wrong)
    with pytest.raises(DataError, match="test_labels.npy: not a whole file of labels"):
        read("cifar10", tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"text", png(0)])
def test_a_mosaic_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    write_mosaics(tmp_path / "source")
    (tmp_path / "source/test-00.webp").write_bytes(content)
    with pytest.raises(DataError, match="test-00.webp: not a whole mosaic"):
        read("cifar10", tmp_path / "source", tmp_path / "out")


def test_a_mosaic_of_another_size_is_refused(tmp_path: Path) -> None:
    write_mosaics(tmp_path / "source")
    Image.new("RGB", (1600, 1600)).save(tmp_path / "source/test-00.webp", lossless=True)
    with pytest.raises(DataError, match=r"\(1600, 1600\) pixels, expected \(1600, 3200\)"):
        read("cifar10", tmp_path / "source", tmp_path / "out")


BATCHES = {
    "labels of another length": ({b"data": noise(5, 3072), b"labels": [1] * 4}, "are (4,), exp"),
    "a table of labels": ({b"data": noise(2, 3072), b"labels": [[1], [2]]}, "are (2, 1), expected"),
    "ragged labels": ({b"data": noise(2, 3072), b"labels": [[1], [2, 3]]}, "inhomogeneous"),
    "labels in words": ({b"data": noise(2, 3072), b"labels": ["a", "b"]}, "not whole numbers"),
    "no labels": ({b"data": noise(2, 3072), b"labels": None}, "not whole numbers"),
    "one row": ({b"data": noise(3072), b"labels": [1]}, "its data is (3072,), expected rows of"),
    "narrow rows": ({b"data": noise(3, 1024), b"labels": [1]}, "is (3, 1024), expected rows of"),
    "three pictures as one": ({b"data": noise(1, 9216), b"labels": [1]}, "expected rows of 3072"),
    "words for pixels": ({b"data": b"abc", b"labels": [1]}, "not an array of bytes"),
    "large pixels": ({b"data": np.zeros((1, 3072)), b"labels": [1]}, "not an array of bytes"),
    "no dict": ([1, 2], "does not hold the data and the labels"),
    "a number": (7, "does not hold the data and the labels"),
    "no data": ({b"labels": [1]}, "does not hold the data and the labels"),
}


@pytest.mark.parametrize(
    ("batch", "message"), [pytest.param(*each, id=name) for name, each in BATCHES.items()]
)
def test_a_batch_that_does_not_fit_is_named(tmp_path: Path, batch: object, message: str) -> None:
    write_cifar(tmp_path, "python", packed=False)
    (tmp_path / "cifar-10-batches-py/data_batch_2").write_bytes(python2_pickle(batch))
    with pytest.raises(DataError) as caught:
        read("cifar10", tmp_path, tmp_path / "out")
    assert str(caught.value).startswith(f"{tmp_path}: data_batch_2 cannot be read: ")
    assert message in str(caught.value)


def test_a_pickle_that_asks_for_all_memory_is_refused(tmp_path: Path) -> None:
    class Huge:
        def __reduce__(self) -> tuple[Any, tuple[tuple[int, int]]]:
            return np.ndarray, ((2**31, 2**31),)

    write_cifar(tmp_path, "python", packed=False)
    content = pickle.dumps({b"data": Huge(), b"labels": [1]}, protocol=2)
    (tmp_path / "cifar-10-batches-py/data_batch_2").write_bytes(content)
    with pytest.raises(DataError, match="data_batch_2 cannot be read: "):
        read("cifar10", tmp_path, tmp_path / "out")


def test_a_pickle_that_numbers_an_object_high_takes_no_memory(tmp_path: Path) -> None:
    """C's unpickler allots and fills 16 bytes for every number below: here, 64 gigabytes."""
    write_cifar(tmp_path, "python", packed=False)
    path = tmp_path / "cifar-10-batches-py/data_batch_2"
    content = path.read_bytes()
    assert content[3:5] == b"q\x00"  # protocol 2, a dict, and its number in one byte
    path.write_bytes(content[:3] + b"r\xff\xff\xff\xff" + content[5:])
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, limit[1]))
    try:
        read("cifar10", tmp_path, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


@pytest.mark.parametrize("shape", [(20, 27, 28), (20, 0, 28), (20, 28, 29)])
def test_fashion_mnist_of_another_size_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    write_fashion(tmp_path / "source")
    write_idx(tmp_path / "source/train-images-idx3-ubyte.gz", noise(*shape))
    write_idx(tmp_path / "source/train-labels-idx1-ubyte.gz", labels(20))
    with pytest.raises(DataError, match="train-images-idx3-ubyte.gz: holds 20 x .* of 28 x 28"):
        read("fashion-mnist", tmp_path / "source", tmp_path / "out")

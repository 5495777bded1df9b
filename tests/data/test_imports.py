import gzip
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import official
import pytest
from mosaics import cut
from PIL import Image

from largebatch.cli.main import main
from largebatch.data.datasets import import_data
from largebatch.data.datasets.arrays import open_official
from largebatch.data.datasets.packing import Sample
from largebatch.data.index.index import Index, read_folder
from largebatch.errors import DataError

Pixels = npt.NDArray[np.uint8]

WRITE = {"cifar10": official.write_cifar, "fashion-mnist": official.write_fashion}


def imported(name: str, source: Path, out: Path) -> Path:
    import_data(name, source, out, shard_bytes=10**6, progress=lambda _done, _total: None)
    return out


def images(index: Index) -> list[Pixels]:
    """Decode every image by hand."""
    found = []
    for sample in range(len(index)):
        path, offset, num_bytes, *_ = index.locate(sample)
        content = path.read_bytes()[offset : offset + num_bytes]
        found.append(np.asarray(Image.open(io.BytesIO(content))))
    return found


def test_fashion_mnist_keeps_every_pixel_and_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = official.write_fashion(tmp_path / "archives")
    official.declare(monkeypatch, tmp_path / "archives")
    out = imported("fashion-mnist", tmp_path / "archives", tmp_path / "out")
    for split, (pixels, numbers) in expected.items():
        index = read_folder(out, split)
        np.testing.assert_array_equal(np.stack(images(index)), pixels)
        assert index.labels.tolist() == numbers.tolist()
        assert index.classes[0] == "T-shirt/top"
        assert len(index.classes) == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archives", "out"]


@pytest.mark.parametrize("named", ["", official.ARCHIVE], ids=["its folder", "the archive"])
def test_cifar10_keeps_every_pixel_and_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    expected = official.write_cifar(tmp_path / "archives")
    official.declare(monkeypatch, tmp_path / "archives")
    out = imported("cifar10", tmp_path / "archives" / named, tmp_path / "new/out")
    for split, (pixels, numbers) in expected.items():
        index = read_folder(out, split)
        planes = np.stack(images(index)).transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(planes.reshape(-1, 3072), pixels)
        assert index.labels.tolist() == numbers.tolist()
    assert list(index.classes) == official.NAMES
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def hit(path: Path) -> None:
    """Replace the archive with a pickle that runs a program when it is loaded."""

    class Attack:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {path.parent}/hit",)

    path.write_bytes(pickle.dumps(Attack()))


@pytest.mark.parametrize("spoil", [cut_off, change, hit])
@pytest.mark.parametrize("name", WRITE)
def test_an_unofficial_archive_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[[Path], None]
) -> None:
    source = tmp_path / "archives"
    WRITE[name](source)
    official.declare(monkeypatch, source)
    path = max(source.iterdir())
    spoil(path)
    with pytest.raises(
        DataError, match=rf"{path.name}: its MD5 is \w+, .* official archive.s .* download it again"
    ):
        imported(name, source, tmp_path / "out")
    assert not (source / "hit").exists()
    assert [each.name for each in tmp_path.iterdir()] == ["archives"]


@pytest.mark.parametrize("name", WRITE)
def test_a_full_disk_while_unpacking_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    WRITE[name](tmp_path / "archives")
    official.declare(monkeypatch, tmp_path / "archives")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be unpacked there .*; make room for both"):
        imported(name, tmp_path / "archives", tmp_path / "file/out")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fashion-mnist", "eu-central-1.amazonaws.com/t10k-labels-idx1-ubyte.gz"),
        ("cifar10", "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"),
        ("imagefolder", "expected train/<class>/*.jpg and val/<class>/*.jpg"),
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_missing_archives_are_named_with_their_url(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, expected: str, there: bool
) -> None:
    source = tmp_path / "archives"
    if there:
        source.mkdir()
    assert main(["data", "import", name, str(source), "--out", str(tmp_path / "out")]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_real_fashion_mnist_is_the_official_one(real_data: Path, tmp_path: Path) -> None:
    """The first test image and its label are those of the files, unpacked by hand."""
    source = real_data / "fashion_mnist"
    with open_official(source, name="fashion-mnist", scratch=tmp_path) as data_set:
        assert data_set.sizes == {"train": 60_000, "val": 10_000}
        first = next(iter(data_set.samples("val")))
    assert isinstance(first, Sample)
    pixels, labels = (
        gzip.decompress((source / f"t10k-{name}-ubyte.gz").read_bytes())
        for name in ("images-idx3", "labels-idx1")
    )
    assert np.asarray(Image.open(io.BytesIO(first.content))).tobytes() == pixels[16 : 16 + 28 * 28]
    assert first.label == labels[8]


def test_real_mosaics_are_cut_row_by_row(real_data: Path) -> None:
    path = real_data / "cifar10/train-03-of-10.webp"
    images, mosaic = cut(path), np.asarray(Image.open(path).convert("RGB"))
    assert images.shape == (5000, 32, 32, 3)
    np.testing.assert_array_equal(images[173], mosaic[96:128, 736:768])  # row 3, column 23
    np.testing.assert_array_equal(images[-1], mosaic[-32:, -32:])

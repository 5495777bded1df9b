"""Official archives of arrays: every pixel and label is kept, anything else is refused unread."""

import gzip
import io
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import official
import pytest
from class_folders import images_of, imported
from PIL import Image

from largebatch.data.datasets.arrays import open_official
from largebatch.data.datasets.packing import Sample
from largebatch.data.index.index import read_folder
from largebatch.errors import DataError


@pytest.mark.parametrize("name", official.KINDS)
def test_every_pixel_and_label_is_kept(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "archives"
    expected = official.write(name, source, monkeypatch)
    is_cifar = name.startswith("cifar")
    given = next(source.iterdir()) if name == "cifar10" else source
    out = imported(given, tmp_path / "new/out", name=name)
    for split, (pixels, labels) in expected.items():
        index = read_folder(out, split)
        found = np.stack([np.asarray(Image.open(io.BytesIO(one))) for one in images_of(index)])
        if is_cifar:
            found = found.transpose(0, 3, 1, 2).reshape(-1, 3072)
        np.testing.assert_array_equal(found, pixels)
        assert index.labels.tolist() == labels.tolist()
    names = {"fashion-mnist": "T-shirt/top", "mnist": "0"}
    assert index.classes[0] == names.get(name, official.NAMES[0])
    assert len(index.classes) == 10
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def hit(path: Path) -> None:
    """Replace the archive with a pickle that runs a program when it is loaded."""

    class Attack:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {path.parent}/hit",)

    path.write_bytes(pickle.dumps(Attack()))


@pytest.mark.parametrize("spoil", [cut_off, hit])
@pytest.mark.parametrize("name", ["cifar100", "mnist"])
def test_an_unofficial_archive_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[[Path], None]
) -> None:
    source = tmp_path / "archives"
    official.write(name, source, monkeypatch)
    path = max(source.iterdir())
    spoil(path)
    with pytest.raises(DataError, match=path.name):
        imported(source, tmp_path / "out", name=name)
    assert not (source / "hit").exists()
    assert [each.name for each in tmp_path.iterdir()] == ["archives"]


@pytest.mark.parametrize("named", ["", "cifar-10-python.tar.gz"])
def test_an_absent_archive_is_named_once(tmp_path: Path, named: str) -> None:
    archive = tmp_path / "cifar-10-python.tar.gz"
    with pytest.raises(DataError, match=f"^{re.escape(str(archive))}: "):
        imported(tmp_path / named, tmp_path / "out", name="cifar10")


def test_real_fashion_mnist_is_the_official_one(real_data: Path, tmp_path: Path) -> None:
    """The first test image and its label are those of the files, unpacked by hand."""
    source = real_data / "fashion_mnist"
    with open_official(source, name="fashion-mnist") as data_set:
        assert data_set.sizes == {"train": 60_000, "val": 10_000}
        first = next(iter(data_set.samples("val", range(1))))
    assert isinstance(first, Sample)
    pixels, labels = (
        gzip.decompress((source / f"t10k-{name}-ubyte.gz").read_bytes())
        for name in ("images-idx3", "labels-idx1")
    )
    assert np.asarray(Image.open(io.BytesIO(first.content))).tobytes() == pixels[16 : 16 + 28 * 28]
    assert first.label == labels[8]

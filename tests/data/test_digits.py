import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from largebatch.data.datasets.digits import write_digits
from largebatch.data.index.index import check_classes, read_folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


def test_the_digits_are_1437_and_360_images_of_ten_classes(cache: Path) -> None:
    root = write_digits()
    assert root == cache / "largebatch/digits"
    train, val = read_folder(root, "train"), read_folder(root, "val")
    check_classes(train.root, train.classes, val.classes)
    assert train.classes == tuple("0123456789")
    assert (len(train), len(val)) == (1437, 360)
    assert set(train.heights) | set(train.widths) | set(val.heights) | set(val.widths) == {8}
    assert np.bincount(val.labels).tolist() == [36, 36, 36, 36, 37, 36, 36, 36, 35, 36]


def test_the_images_are_scikit_learns_scaled_to_bytes(cache: Path) -> None:
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    root = write_digits()
    seen = set()
    for path in root.glob("*/*/*.png"):
        sample = int(path.stem)
        seen.add(sample)
        assert path.parent.name == str(digits.target[sample])
        with Image.open(path) as image:
            assert image.mode == "L"
            expected = np.rint(digits.images[sample] * 255 / 16).astype(np.uint8)
            assert np.array_equal(np.asarray(image), expected)
    assert seen == set(range(1797))


def test_the_split_never_changes(cache: Path) -> None:
    """A recipe's accuracy is comparable only on the same images."""
    paths = read_folder(write_digits(), "val").paths
    assert list(paths)[:3] == ["val/0/0000.png", "val/0/0048.png", "val/0/0079.png"]
    assert hashlib.sha256("\n".join(paths).encode()).hexdigest()[:16] == "bc00d83e8b343dfe"


def test_processes_that_start_together_write_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        roots = set(pool.map(lambda _: write_digits(), range(2)))
    assert roots == {tmp_path / "largebatch/digits"}
    assert [path.name for path in (tmp_path / "largebatch").iterdir()] == ["digits"]
    assert len(list(roots.pop().glob("*/*/*.png"))) == 1797

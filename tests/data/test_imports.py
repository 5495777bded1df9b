import gzip
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from largebatch.cli.main import main
from largebatch.data.datasets import import_data
from largebatch.data.index.index import Index, read_folder
from largebatch.errors import DataError

Pixels = npt.NDArray[np.uint8]

RANDOM = np.random.default_rng(0)

IDX = ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")


def imported(name: str, source: Path, out: Path) -> Path:
    import_data(name, source, out, shard_bytes=10**6, progress=lambda _done, _total: None)
    return out


def pictures(index: Index) -> list[Pixels]:
    """Decode every picture by hand."""
    found = []
    for sample in range(len(index)):
        path, offset, num_bytes, *_ = index.locate(sample)
        content = path.read_bytes()[offset : offset + num_bytes]
        found.append(np.asarray(Image.open(io.BytesIO(content))))
    return found


def noise(*shape: int) -> Pixels:
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def labels(number: int) -> Pixels:
    return RANDOM.permutation(np.arange(number, dtype=np.uint8) % 10)


def write_idx(path: Path, array: Pixels) -> None:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(header + array.tobytes()))


def write_fashion(source: Path) -> dict[str, tuple[Pixels, Pixels]]:
    splits = {"train": (noise(20, 28, 28), labels(20)), "t10k": (noise(10, 28, 28), labels(10))}
    for split, arrays in splits.items():
        for name, array in zip(IDX, arrays, strict=True):
            write_idx(source / f"{split}-{name}", array)
    return {"train": splits["train"], "val": splits["t10k"]}


PurePickler: Any = pickle._Pickler  # the one written in Python, which can be changed


class Python2Pickler(PurePickler):  # type: ignore[misc]
    """Writes bytes as Python 2 wrote strings, which is what CIFAR-10's pickles hold."""

    dispatch: ClassVar[dict[type, Any]] = dict(PurePickler.dispatch)

    def save_string(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    dispatch[bytes] = save_string


def python2_pickle(value: object) -> bytes:
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def batches() -> dict[str, tuple[Pixels, Pixels]]:
    """Pixels, N x 3,072 with all red first, and labels, of the six official files."""
    names = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
    return {name: (noise(10, 3072), labels(10)) for name in names}


def python_batch(pixels: Pixels, numbers: Pixels) -> bytes:
    names = [f"{n}.png".encode() for n in range(len(pixels))]
    batch = {b"data": pixels, b"labels": numbers.tolist(), b"filenames": names}
    return python2_pickle(batch | {b"batch_label": b"training batch"})


def write_cifar(source: Path, kind: str, *, packed: bool) -> dict[str, tuple[Pixels, Pixels]]:
    files = {}
    for name, (pixels, numbers) in (made := batches()).items():
        if kind == "python":
            files[name] = python_batch(pixels, numbers)
        else:
            files[f"{name}.bin"] = np.concatenate([numbers[:, None], pixels], axis=1).tobytes()
    files["batches.meta"] = python2_pickle({b"num_vis": 3072})
    write_files(source, kind, files, packed=packed)
    train = [made[f"data_batch_{n}"] for n in range(1, 6)]
    joined = tuple(np.concatenate(each) for each in zip(*train, strict=True))
    return {"train": (joined[0], joined[1]), "val": made["test_batch"]}


def write_files(source: Path, kind: str, files: dict[str, bytes], *, packed: bool) -> None:
    folder = f"cifar-10-batches-{'py' if kind == 'python' else 'bin'}"
    source.mkdir(parents=True, exist_ok=True)
    if not packed:
        (source / folder).mkdir()
        for name, content in files.items():
            (source / folder / name).write_bytes(content)
        return
    with tarfile.open(source / f"cifar-10-{kind}.tar.gz", "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def as_rows(picture: Pixels) -> list[int]:
    """Red, then green, then blue, row by row, as CIFAR-10 has it."""
    return [int(picture[y, x, c]) for c in range(3) for y in range(32) for x in range(32)]


def test_fashion_mnist_keeps_every_pixel_and_label(tmp_path: Path) -> None:
    expected = write_fashion(tmp_path / "archives")
    out = imported("fashion-mnist", tmp_path / "archives", tmp_path / "out")
    for split, (pixels, numbers) in expected.items():
        index = read_folder(out, split)
        np.testing.assert_array_equal(np.stack(pictures(index)), pixels)
        assert index.labels.tolist() == numbers.tolist()
        assert index.classes[0] == "T-shirt/top"
        assert len(index.classes) == 10


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["python", "binary"])
def test_cifar10_keeps_every_pixel_and_label(tmp_path: Path, kind: str, packed: bool) -> None:
    expected = write_cifar(tmp_path / "archives", kind, packed=packed)
    out = imported("cifar10", tmp_path / "archives", tmp_path / "out")
    for split, (pixels, numbers) in expected.items():
        index = read_folder(out, split)
        assert [as_rows(picture) for picture in pictures(index)] == pixels.tolist()
        assert index.labels.tolist() == numbers.tolist()
    assert index.classes[:2] == ("airplane", "automobile")


def test_the_archive_itself_or_its_folder_may_be_named(tmp_path: Path) -> None:
    write_cifar(tmp_path, "binary", packed=True)
    write_cifar(tmp_path, "python", packed=False)
    for number, name in enumerate(("cifar-10-binary.tar.gz", "cifar-10-batches-py")):
        out = imported("cifar10", tmp_path / name, tmp_path / f"out{number}")
        assert len(read_folder(out, "train")) == 50


@pytest.mark.parametrize("attack", [os.system, eval, np.load, np.frombuffer])
def test_a_pickle_that_asks_for_anything_else_is_refused(
    tmp_path: Path, attack: Callable[..., Any]
) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return attack, (f"touch {tmp_path}/hit",)

    write_cifar(tmp_path, "python", packed=False)
    bad = pickle.dumps({b"data": Attack(), b"labels": []}, protocol=2)
    (tmp_path / "cifar-10-batches-py/data_batch_3").write_bytes(bad)
    with pytest.raises(DataError, match="data_batch_3 cannot be read: it asks for .*; fetch it"):
        imported("cifar10", tmp_path, tmp_path / "out")
    assert not (tmp_path / "hit").exists()


def lose_a_batch(source: Path) -> None:
    (source / "cifar-10-batches-bin/data_batch_4.bin").unlink()


def cut_a_batch(source: Path) -> None:
    os.truncate(source / "cifar-10-batches-bin/test_batch.bin", 5000)


def spoil_a_label(source: Path) -> None:
    path = source / "cifar-10-batches-bin/data_batch_1.bin"
    path.write_bytes(b"\x0b" + path.read_bytes()[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_a_batch, "data_batch_4.bin not found; expected data_batch_1 to data_batch_5 and"),
        (cut_a_batch, "test_batch.bin cannot be read: cannot reshape array of size 5000"),
        (spoil_a_label, "the labels of train go from 0 to 11, expected 0 to 9"),
    ],
)
def test_an_incomplete_cifar10_is_refused(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    write_cifar(tmp_path / "archives", "binary", packed=False)
    change(tmp_path / "archives")
    with pytest.raises(DataError, match=message):
        imported("cifar10", tmp_path / "archives", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["archives"]


def cut_an_idx(source: Path) -> None:
    os.truncate(source / f"train-{IDX[0]}", 3000)


def lose_labels(source: Path) -> None:
    write_idx(source / f"t10k-{IDX[1]}", labels(7))


def swap(source: Path) -> None:
    (source / f"train-{IDX[1]}").replace(source / f"train-{IDX[0]}")
    write_idx(source / f"train-{IDX[1]}", labels(20))


def shorten(source: Path) -> None:
    path = source / f"train-{IDX[0]}"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut_an_idx, "images-idx3-ubyte.gz: not a whole gzip file"),
        (lose_labels, "val has 10 pictures and 7 labels"),
        (swap, "expected .* bytes in the idx format with 3 axes"),
        (shorten, "has 15679 numbers, expected 20 x 28 x 28"),
    ],
)
def test_a_broken_fashion_mnist_is_refused(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    write_fashion(tmp_path / "archives")
    change(tmp_path / "archives")
    with pytest.raises(DataError, match=message):
        imported("fashion-mnist", tmp_path / "archives", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "fashion-mnist",
            "eu-central-1.amazonaws.com/t10k-labels-idx1-ubyte.gz",
        ),
        ("cifar10", "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"),
        ("imagefolder", "expected train/<class>/*.jpg and val/<class>/*.jpg"),
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_what_is_missing_is_named_with_the_place_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, expected: str, there: bool
) -> None:
    source = tmp_path / "archives"
    if there:
        source.mkdir()
    assert main(["data", "import", name, str(source), "--out", str(tmp_path / "out")]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_real_fashion_mnist_is_imported_without_loss(real_data: Path, tmp_path: Path) -> None:
    """The 10,000 test pictures, as both splits."""
    source = real_data / "fashion_mnist"
    (tmp_path / "archives").mkdir()
    for split in ("train", "t10k"):
        for name in IDX:
            (tmp_path / f"archives/{split}-{name}").symlink_to(source / f"t10k-{name}")
    out = imported("fashion-mnist", tmp_path / "archives", tmp_path / "out")
    index = read_folder(out, "val")
    pixels, numbers = (gzip.decompress((source / f"t10k-{name}").read_bytes()) for name in IDX)
    assert b"".join(picture.tobytes() for picture in pictures(index)) == pixels[16:]
    assert index.labels.astype(np.uint8).tobytes() == numbers[8:]


@pytest.mark.long
def test_real_cifar10_is_imported_without_loss(real_data: Path, tmp_path: Path) -> None:
    """One mosaic of 5,000 pictures for either split."""
    source = real_data / "cifar10"
    (tmp_path / "mosaics").mkdir()
    for split, name in (("train", "train-03-of-10.webp"), ("test", "test-01-of-02.webp")):
        (tmp_path / "mosaics" / name).symlink_to(source / name)
        start = {"train": 15_000, "test": 5000}[split]
        numbers = np.load(source / f"{split}_labels.npy")[start : start + 5000]
        np.save(tmp_path / f"mosaics/{split}_labels.npy", numbers)
    out = imported("cifar10", tmp_path / "mosaics", tmp_path / "out")
    index = read_folder(out, "train")
    mosaic = np.asarray(Image.open(source / "train-03-of-10.webp").convert("RGB"))
    for number, picture in enumerate(pictures(index)):
        row, column = divmod(number, 50)
        place = mosaic[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
        np.testing.assert_array_equal(picture, place)
    assert index.labels.tolist() == [number % 10 for number in range(5000)]

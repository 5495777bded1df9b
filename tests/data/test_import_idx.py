"""Files in the layout of MNIST, under names that the command gives."""

import gzip
import struct
from pathlib import Path

import numpy as np
import official
import pytest
from importing import contents

from largebatch.cli.main import DONE, USER, main
from largebatch.data.datasets.arrays import png
from largebatch.data.index.index import read_folder

NAMES = "zero,one,two,three,four,five,six,seven,eight,nine"


def command(source: Path, out: Path, *, classes: str | None = NAMES, name: str = "idx") -> int:
    own = ["--classes", classes] if classes and name == "idx" else []
    return main(["data", "import", name, str(source), *own, "--out", str(out)])


def unpack(source: Path) -> None:
    for path in source.glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()


@pytest.mark.parametrize("form", ["gz", "plain", "dots"])
def test_every_pixel_and_label_is_kept_under_the_given_names(tmp_path: Path, form: str) -> None:
    splits = official.write_fashion(tmp_path / "in")
    if form != "gz":
        unpack(tmp_path / "in")
    if form == "dots":  # as archives of MNIST on Kaggle have them
        for path in list((tmp_path / "in").iterdir()):
            path.rename(path.with_name(path.name.replace("-idx", ".idx")))
    assert command(tmp_path / "in", tmp_path / "out") == DONE
    for split, (pixels, labels) in splits.items():
        index = read_folder(tmp_path / "out", split)
        assert index.classes == tuple(NAMES.split(","))
        assert index.labels.tolist() == labels.tolist()
        expected = {
            name: [png(pixels[n]) for n in np.flatnonzero(labels == label)]
            for label, name in enumerate(index.classes)
        }
        assert contents(tmp_path / "out", split) == expected


@pytest.mark.parametrize("name", ["idx", "mnist"])
def test_digits_need_no_names(tmp_path: Path, name: str) -> None:
    splits = official.write_fashion(tmp_path / "in")
    assert command(tmp_path / "in", tmp_path / "out", classes=None, name=name) == DONE
    for split, (_, labels) in splits.items():
        index = read_folder(tmp_path / "out", split)
        assert index.classes == tuple("0123456789")
        assert index.labels.tolist() == labels.tolist()


def test_classes_without_names_are_the_labels_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    official.write_fashion(tmp_path / "in")
    unpack(tmp_path / "in")
    train, val = (tmp_path / f"in/{name}-labels-idx1-ubyte" for name in ("train", "t10k"))
    train.write_bytes(idx(20, content=bytes(range(12)) + bytes(8)))
    val.write_bytes(idx(10, content=bytes(range(10))))
    assert command(tmp_path / "in", tmp_path / "out", classes=None) == USER
    shown = capsys.readouterr().err
    assert "t10k-labels-idx1-ubyte: holds the labels 0, 1, 2, 3, 4, 5, 6, 7, 8, 9; exp" in shown
    assert "expected 0 to 11, one for each class (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...)" in shown
    val.write_bytes(train.read_bytes()[:8].replace(b"\x14", b"\x0c") + bytes(range(12)))
    (tmp_path / "in/t10k-images-idx3-ubyte").write_bytes(idx(12, 28, 28))
    assert command(tmp_path / "in", tmp_path / "out", classes=None) == DONE
    assert read_folder(tmp_path / "out", "val").classes == tuple(map(str, range(12)))
    assert command(tmp_path / "in", tmp_path / "digits", name="mnist") == USER
    assert "expected 0 to 9, one for each class" in capsys.readouterr().err


def test_another_data_set_of_this_layout_is_not_fashion_mnist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    official.write_fashion(tmp_path / "in")
    assert command(tmp_path / "in", tmp_path / "out", name="fashion-mnist") == USER
    shown = capsys.readouterr().err
    assert "the official archive's is" in shown
    assert "for MNIST: largebatch data import mnist; for others of this layout: largebatch" in shown
    unpack(tmp_path / "in")
    assert command(tmp_path / "in", tmp_path / "out", name="fashion-mnist") == USER
    assert "largebatch data import idx" in capsys.readouterr().err


def idx(*lengths: int, content: bytes | None = None, start: bytes = b"\0\0\x08") -> bytes:
    head = start + bytes([len(lengths)]) + struct.pack(f">{len(lengths)}I", *lengths)
    return head + (bytes(int(np.prod(lengths))) if content is None else content)


DAMAGED = {
    "another number of labels": (
        "train-labels-idx1-ubyte",
        idx(19),
        "20 images, train-labels-idx1",
    ),
    "images for labels": ("train-labels-idx1-ubyte", idx(20, 1, 1), "it begins with 00 00 08 03"),
    "floats": ("train-images-idx3-ubyte", idx(20, 28, 28, start=b"\0\0\x0d"), "00 00 0d 03, exp"),
    "cut off": ("train-images-idx3-ubyte", idx(20, 28, 28, content=b"x"), "and 1 follow"),
    "cut in the header": ("train-images-idx3-ubyte", b"\0\0\x08\x03\0", "not a whole idx file"),
    "too long": ("train-images-idx3-ubyte", idx(20, 28, 28) + b"x", "and more follow"),
    "empty": ("train-images-idx3-ubyte", idx(0, 28, 28), "0 x 28 x 28 bytes, and 0 follow"),
    "a bomb": ("train-images-idx3-ubyte", idx(2**31, 2**10, 2**10, content=b"x"), "attack"),
    "a label of no class": ("t10k-labels-idx1-ubyte", idx(10, content=b"\x0b" * 10), "labels 11"),
}


@pytest.mark.parametrize(
    ("name", "content", "message"), [pytest.param(*each, id=key) for key, each in DAMAGED.items()]
)
def test_a_file_of_another_format_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    official.write_fashion(tmp_path / "in")
    unpack(tmp_path / "in")
    (tmp_path / "in" / name).write_bytes(content)
    assert command(tmp_path / "in", tmp_path / "out") == USER
    shown = capsys.readouterr().err
    assert message in shown
    assert f"{tmp_path}/in/{name[:5]}" in shown
    assert not (tmp_path / "out").exists()


def test_labels_and_names_must_match_in_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    official.write_fashion(tmp_path / "in")
    for classes in ("a,b,c", f"{NAMES},ten"):
        assert command(tmp_path / "in", tmp_path / "out", classes=classes) == USER
        shown = capsys.readouterr().err
        assert f"expected 0 to {len(classes.split(',')) - 1}, one for each class (" in shown
    for classes in ("a,a", "a,,b"):
        assert command(tmp_path / "in", tmp_path / "out", classes=classes) == USER
        assert "--classes" in capsys.readouterr().err


def test_missing_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    official.write_fashion(tmp_path / "in")
    (tmp_path / "in/t10k-labels-idx1-ubyte.gz").unlink()
    for source, name in (("in", "t10k-labels-idx1-ubyte"), ("nowhere", "train-images-idx3-ubyte")):
        assert command(tmp_path / source, tmp_path / "out") == USER
        assert f"{source}: expected {name} or {name}.gz; found " in capsys.readouterr().err

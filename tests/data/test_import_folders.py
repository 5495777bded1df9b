import lzma
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from class_folders import fields, write_folder, write_image
from importing import imported

from largebatch.cli.main import DONE, USER, main
from largebatch.data.index.index import read_folder
from largebatch.errors import DataError
from largebatch.optional import require_torchvision

require_torchvision()
from torchvision.datasets import ImageFolder  # noqa: E402 -- once it can be imported


def zip_of(folder: Path, archive: Path) -> None:
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.rglob("*"), reverse=True):
            file.write(path, path.relative_to(folder.parent))
        file.writestr("__MACOSX/train/dog/._a.JPEG", b"left behind")
        file.writestr(f"{folder.name}/readme.txt", b"no image")


def tar_of(folder: Path, archive: Path, mode: str) -> None:
    with tarfile.open(archive, mode) as tar:  # type: ignore[call-overload]
        tar.add(folder, arcname=f"./{folder.name}")


def as_folder(root: Path, source: Path) -> Path:
    return root


def as_zips(root: Path, source: Path) -> Path:
    for split in ("train", "val"):
        zip_of(root / split, source / f"{split}.zip")
    return source


def as_one_zip(root: Path, source: Path) -> Path:
    zip_of(root, source / "all.zip")
    return source / "all.zip"


def as_bare_tars(root: Path, source: Path) -> Path:
    """Without the split in the paths; one of them compressed."""
    for split, mode in (("train", "w"), ("val", "w:gz")):
        with tarfile.open(
            source / f"{split}.{mode.replace('w', 'tar').replace(':', '.')}", mode
        ) as t:  # type: ignore[call-overload]
            for path in (root / split).iterdir():
                t.add(path, arcname=path.name)
    return source


def as_one_tar(root: Path, source: Path) -> Path:
    tar_of(root, source / "all.tgz", "w:gz")
    return source / "all.tgz"


def as_xz(root: Path, source: Path) -> Path:
    tar_of(root, source / "all.tar", "w")
    (source / "all.tar.xz").write_bytes(lzma.compress((source / "all.tar").read_bytes()))
    return source / "all.tar.xz"


@pytest.mark.parametrize("form", [as_folder, as_zips, as_one_zip, as_bare_tars, as_one_tar, as_xz])
def test_class_folders_keep_bytes_and_order_in_every_form(
    tmp_path: Path, form: Callable[[Path, Path], Path]
) -> None:
    root, source = tmp_path / "root", tmp_path / "source"
    source.mkdir()
    for split in ("train", "val"):
        write_folder(root, split)
    out = imported(form(root, source), tmp_path / "out")
    for split in ("train", "val"):
        before, after = read_folder(root, split), read_folder(out, split)
        for sample in range(len(before)):
            path, offset, num_bytes, *_ = after.locate(sample)
            content = path.read_bytes()[offset : offset + num_bytes]
            assert content == before.locate(sample).path.read_bytes()
        assert fields(after)["labels"] == fields(before)["labels"]
        assert after.classes == before.classes


def test_broken_images_can_be_left_out_as_the_message_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val"):
        write_folder(tmp_path / "root", split)
    (tmp_path / "root/train/dog/b.png").write_bytes(b"")
    (tmp_path / "root/val/cat/c.jpg").write_text("no image")
    words = ["data", "import", "imagefolder", f"{tmp_path}/root", "--out", f"{tmp_path}/out"]
    assert main(words) == USER
    assert "--drop-bad" in capsys.readouterr().err
    assert main([*words, "--drop-bad"]) == DONE
    shown = capsys.readouterr().out
    assert "2 of 9 images left out:" in shown
    assert "root: train/dog/b.png: the file is empty" in shown
    assert "root: val/cat/c.jpg: not a readable image" in shown
    assert "3 training and 4 validation images" in shown


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        ("val/*", "3 of 3 classes have no image in val that can be used: Zebra, cat, dog"),
        ("train/dog", "1 of 3 classes have no image in train that can be used: dog"),
    ],
    ids=["of a split", "of a class"],
)
def test_an_import_that_leaves_out_all_images_of_a_class_is_refused_and_leaves_nothing(
    broken: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val"):
        write_folder(tmp_path / "root", split)
    for path in (tmp_path / "root").glob(f"{broken}/*.*"):
        path.write_bytes(b"")
    words = ["data", "import", "imagefolder", f"{tmp_path}/root", "--out", f"{tmp_path}/out"]
    assert main([*words, "--drop-bad"]) == USER
    assert f"out: not written: {found}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"text", "not a whole zip or tar"), (b"\x1f\x8b\x08", "not a whole zip or tar")],
)
def test_a_file_that_is_not_an_archive_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "all.zip").write_bytes(content)
    with pytest.raises(DataError, match=message):
        imported(tmp_path / "all.zip", tmp_path / "out")


TINY = (
    "train/n01/images/n01_0.png",
    "train/n01/images/n01_1.png",
    "train/n01/z.png",
    "train/n01/images/more/n01_0.png",
    "train/n02/images/n02_0.png",
    "train/train/0.png",
    "val/n01/0.png",
    "val/n02/0.png",
    "val/n02/train/a/0.png",
    "val/train/train/0.png",
)
"""Paths like Tiny-ImageNet's, and some deeper; one class has the name of a split."""


def write_tiny(root: Path) -> None:
    for number, path in enumerate(TINY, start=1):
        write_image(root / path, width=number)
    (root / "train/n01/boxes.txt").write_text("0 0 1 1")
    write_image(root / "train/n01/.thumbnails/0.png")


def as_archive_around(root: Path, source: Path) -> Path:
    """In two more folders, like Kaggle's ImageNet."""
    (source / "ILSVRC/Data").mkdir(parents=True)
    shutil.copytree(root, source / "ILSVRC/Data/CLS-LOC")
    with zipfile.ZipFile(source / "all.zip", "w") as file:
        for path in (source / "ILSVRC").rglob("*"):
            file.write(path, path.relative_to(source))
    return source / "all.zip"


def as_bare_tiny(root: Path, source: Path) -> Path:
    """Without folders named like a split, for which this form is refused."""
    for path in ("train/train", "val/train", "val/n02/train"):
        shutil.rmtree(root / path)
    return as_bare_tars(root, source)


@pytest.mark.parametrize("form", [as_folder, as_zips, as_one_tar, as_bare_tiny, as_archive_around])
def test_images_in_subfolders_of_a_class_belong_to_it(
    tmp_path: Path, form: Callable[[Path, Path], Path]
) -> None:
    """In the layout of torchvision's ImageFolder."""
    root, source = tmp_path / "root", tmp_path / "source"
    source.mkdir()
    write_tiny(root)
    out = imported(form(root, source), tmp_path / "out")
    shutil.rmtree(root / "train/n01/.thumbnails")
    for split in ("train", "val"):
        expected = ImageFolder(str(root / split))
        index = read_folder(out, split)
        found = {
            (TINY[width - 1], label)
            for width, label in zip(index.widths.tolist(), index.labels.tolist(), strict=True)
        }
        assert found == {
            (Path(path).relative_to(root).as_posix(), label) for path, label in expected.samples
        }
        assert len(index) == len(expected)
        assert list(index.classes) == expected.classes


UNCLEAR = {
    "no class": (["train/0.png"], "train/0.png is not in a class folder of a split"),
    "no split": (["test/cat/0.png"], "test/cat/0.png is not in a class folder of a split"),
    "two folders of splits": (
        ["old/train/cat/0.png", "train/cat/1.png"],
        "old/train/cat/0.png and train/cat/1.png are not in the same folder of splits",
    ),
}


@pytest.mark.parametrize(
    ("paths", "message"), [pytest.param(*each, id=name) for name, each in UNCLEAR.items()]
)
def test_an_image_whose_class_is_unclear_is_refused(
    tmp_path: Path, paths: list[str], message: str
) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as file:
        for path in paths:
            file.writestr(path, "")
    with pytest.raises(DataError) as caught:
        imported(tmp_path / "all.zip", tmp_path / "out")
    assert f"all.zip: {message}; expected train/<class>/*.jpg" in str(caught.value)


def test_an_image_beside_class_folders_is_refused(tmp_path: Path) -> None:
    """In a folder and in an archive of one split."""
    root, source = tmp_path / "root", tmp_path / "source"
    source.mkdir()
    for split in ("train", "val"):
        write_folder(root, split)
    write_image(root / "val/x.png")
    for form in (as_folder, as_bare_tars):
        with pytest.raises(DataError, match=r"x.png is not in a class folder.*; move it into one"):
            imported(form(root, source), tmp_path / "out")


def test_two_images_of_the_same_name_are_refused(tmp_path: Path) -> None:
    """Two archives, both of which hold the split."""
    for split in ("train", "val"):
        write_folder(tmp_path / "root", split)
        tar_of(tmp_path / "root", tmp_path / f"{split}.tar", "w")
    with pytest.raises(DataError) as caught:
        imported(tmp_path, tmp_path / "out")
    assert str(caught.value) == (
        f"{tmp_path}/train.tar: root/train/Zebra/z.webp and {tmp_path}/val.tar: "
        "root/train/Zebra/z.webp are both train/Zebra/z.webp; remove one of them"
    )


def test_real_imagenette_is_imported_with_its_bytes(real_data: Path, tmp_path: Path) -> None:
    source = real_data / "imagenette224"
    out = imported(source, tmp_path / "out")
    train, val = (read_folder(out, split) for split in ("train", "val"))
    assert (len(train), len(val)) == (2500, 1000)
    with (source / "classes.tsv").open() as file:
        assert list(train.classes) == sorted(line.split()[1] for line in file)
    with zipfile.ZipFile(source / "val.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".JPEG"))
        for sample, name in enumerate(names):
            path, offset, num_bytes, *_ = val.locate(sample)
            with path.open("rb") as file:
                file.seek(offset)
                assert file.read(num_bytes) == archive.read(name)
            assert name.split("/")[1] == val.classes[val.labels[sample]]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_a_special_file_in_a_folder_is_refused_by_name(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    for split in ("train", "val"):
        write_image(tmp_path / f"in/{split}/cat/a.png")
    make(tmp_path / "in/train/cat/b.png")
    with pytest.raises(DataError, match="in/train/cat/b.png: is a pipe"):
        imported(tmp_path / "in", tmp_path / "out")

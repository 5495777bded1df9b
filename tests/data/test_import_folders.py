"""Class folders in every form, ImageNet's archives, and a part of every class for validation."""

import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from class_folders import contents, imported, png, write_classes, write_folder, write_image

from largebatch.cli.main import DONE, USER, main
from largebatch.data.index.folder import MISPLACED
from largebatch.data.index.index import read_folder
from largebatch.errors import DataError
from largebatch.optional import require_torchvision

require_torchvision()
from torchvision.datasets import ImageFolder  # noqa: E402 -- once it can be imported


def command(source: Path, out: Path, *options: str) -> int:
    return main(["data", "import", "imagefolder", str(source), "--out", str(out), *options])


def as_folder(root: Path, source: Path) -> Path:
    return root


def as_zips(root: Path, source: Path) -> Path:
    for split in ("train", "val"):
        with zipfile.ZipFile(source / f"{split}.zip", "w") as file:
            for path in sorted((root / split).rglob("*"), reverse=True):
                file.write(path, path.relative_to(root))
            file.writestr("__MACOSX/train/dog/._a.JPEG", b"left behind")
            file.writestr(f"{split}/readme.txt", b"not an image")
    return source


def as_bare_tars(root: Path, source: Path) -> Path:
    """Without the split in the paths."""
    for split in ("train", "val"):
        with tarfile.open(source / f"{split}.tar", "w") as tar:
            for path in (root / split).iterdir():
                tar.add(path, arcname=path.name)
    return source


def as_archive_around(root: Path, source: Path) -> Path:
    """In two more folders."""
    with zipfile.ZipFile(source / "all.zip", "w") as file:
        for path in root.rglob("*"):
            file.write(path, f"some/where/{path.relative_to(root)}")
    return source / "all.zip"


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


@pytest.mark.parametrize("form", [as_folder, as_zips, as_bare_tars, as_archive_around])
def test_images_keep_their_bytes_and_have_the_classes_of_torchvision(
    tmp_path: Path, form: Callable[[Path, Path], Path]
) -> None:
    root, source = tmp_path / "root", tmp_path / "source"
    source.mkdir()
    paths = [path for path in TINY if form != as_bare_tars or "train" not in path.split("/")[1:]]
    for number, path in enumerate(paths, start=1):
        write_image(root / path, width=number)
    (root / "train/n01/boxes.txt").write_text("0 0 1 1")
    write_image(root / "train/n01/.thumbnails/0.png")
    out = imported(form(root, source), tmp_path / "out")
    shutil.rmtree(root / "train/n01/.thumbnails")
    for split in ("train", "val"):
        expected, index = ImageFolder(str(root / split)), read_folder(out, split)
        found = {
            (paths[width - 1], label)
            for width, label in zip(index.widths.tolist(), index.labels.tolist(), strict=True)
        }
        assert found == {
            (Path(path).relative_to(root).as_posix(), label) for path, label in expected.samples
        }
        assert list(index.classes) == expected.classes
        images = [content for name in index.classes for content in contents(out, split)[name]]
        assert sorted(images) == sorted(Path(path).read_bytes() for path, _ in expected.samples)


def test_broken_images_are_named_and_can_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val"):
        write_folder(tmp_path / "root", split)
    (tmp_path / "root/train/dog/b.png").write_bytes(b"")
    (tmp_path / "root/val/cat/c.jpg").write_text("not an image")
    assert command(tmp_path / "root", tmp_path / "out") == USER
    assert "--drop-bad" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert command(tmp_path / "root", tmp_path / "out", "--drop-bad") == DONE
    shown = capsys.readouterr().out
    assert "root: train/dog/b.png: " in shown
    assert "root: val/cat/c.jpg: " in shown
    assert "3 training and 4 validation images" in shown
    (tmp_path / "root/train/dog/a.JPEG").write_bytes(b"")  # the only other dog
    assert command(tmp_path / "root", tmp_path / "none", "--drop-bad") == USER
    assert "train that can be used: dog" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "root"]


@pytest.mark.parametrize(
    ("paths", "part"),
    [
        pytest.param(["train/0.png"], "train/0.png", id="no class"),
        pytest.param(["test/cat/0.png"], "images of train", id="no split"),
        pytest.param(
            ["old/train/cat/0.png", "train/cat/1.png"],
            "old/train/cat/0.png.* train/cat/1.png",
            id="two folders of splits",
        ),
        pytest.param(["train/cat/0.png"], "images of val", id="one split"),
        pytest.param(["train/cat/0.png", "val/cat/0.png"], "one class", id="one class"),
        pytest.param(["train/cat/0.png", "val/dog/0.png"], "dog", id="other classes"),
        pytest.param(["train/n01.txt"], "no images", id="no images"),
        pytest.param(
            [f"{split}/{name}/0.png" for split in ("train", "val") for name in ("c\nt", "dog")],
            r"'c\\nt'",
            id="a name of two lines",
        ),
    ],
)
def test_images_whose_classes_are_unclear_are_refused(
    tmp_path: Path, paths: list[str], part: str
) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as file:
        for path in paths:
            file.writestr(path, png(1))
    with pytest.raises(DataError, match=part):
        imported(tmp_path / "all.zip", tmp_path / "out")


@pytest.mark.parametrize("form", ["classes", "train", "zip"])
def test_a_fraction_of_every_class_validates_whatever_the_form(tmp_path: Path, form: str) -> None:
    """The choice follows the names and the seed: it is the same in every form of one data set."""
    reference = write_classes(tmp_path / "reference", cat=10, dog=4, yak=2)
    expected = imported(reference, tmp_path / "expected", val_fraction=0.2)
    assert [len(each) for each in contents(expected, "val").values()] == [2, 1, 1]
    source = write_classes(
        tmp_path / ("in/train" if form == "train" else "in"), cat=10, dog=4, yak=2
    )
    if form == "zip":
        with zipfile.ZipFile(tmp_path / "in.zip", "w") as file:
            for path in source.rglob("*"):
                file.write(path, path.relative_to(tmp_path))
    chosen = tmp_path / ("in.zip" if form == "zip" else "in")
    out = imported(chosen, tmp_path / "out", val_fraction=0.2)
    for split in ("train", "val"):
        assert contents(out, split) == contents(expected, split)
    other = imported(chosen, tmp_path / "other", val_fraction=0.2, seed=1)
    assert contents(other, "val") != contents(out, "val")
    both = [contents(out, split)["cat"] for split in ("train", "val")]
    assert sorted(both[0] + both[1]) == sorted(png(number) for number in range(10))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--val-fraction=0.5"], "class yak has 1 image"),
        (["--val-name=train"], "--val-name train"),
        (["--label=x"], "label"),
        (["--keep-order", "--seed=1"], "--seed"),
        (["--val-fraction=1.5"], "val-fraction"),
    ],
)
def test_options_that_contradict_or_would_give_no_split_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], part: str
) -> None:
    source = write_classes(tmp_path / "in", cat=4, yak=1)
    assert command(source, tmp_path / "out", *options) == USER
    assert part in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_name_of_validation_is_taken_and_other_folders_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "test", "extra"):
        write_classes(tmp_path / "in" / split, cat=2, dog=1)
    assert command(tmp_path / "in", tmp_path / "out", "--val-name", "test") == DONE
    assert f"ignored files: 3 {MISPLACED}" in capsys.readouterr().out
    assert [len(each) for each in contents(tmp_path / "out", "val").values()] == [2, 1]


END = bytes(1024)
"""Two blocks of zeros end a tar."""


def member(name: str, content: bytes = b"", *, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return a header of a tar and the content, padded."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, "a.png", len(content)
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def test_imagenets_archives_are_imported_unchanged(tmp_path: Path) -> None:
    """Train is a tar with a tar per class; val has no folders, and its classes are in a list."""
    inner = {
        name: b"".join(member(f"{name}_{n}.JPEG", png(n + 10 * place)) for n in range(3 - place))
        for place, name in enumerate(("n01440764", "n01443537"))
    }
    tars = [member(f"{name}.tar", content + END) for name, content in inner.items()]
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(b"".join(tars) + END)
    val = [member(f"ILSVRC2012_val_{n:08d}.JPEG", png(100 + n)) for n in (3, 1, 2)]
    (tmp_path / "ILSVRC2012_img_val.tar").write_bytes(b"".join(val) + END)
    for text in (None, "n01443537\nn01440764\n", "n01443537\n\nn01440764\n"):
        if text is not None:
            (tmp_path / "val_labels.txt").write_text(text)
        with pytest.raises(DataError, match=r"val_labels\.txt.*3 images"):
            imported(tmp_path, tmp_path / "out")
    (tmp_path / "val_labels.txt").write_text("n01443537\nn01440764\nn01440764\n")
    train = {"n01440764": [png(0), png(1), png(2)], "n01443537": [png(10), png(11)]}
    validation = {"n01440764": [png(102), png(103)], "n01443537": [png(101)]}
    out = imported(tmp_path, tmp_path / "out")
    assert (contents(out), contents(out, "val")) == (train, validation)
    unpacked = tmp_path / "Kaggle's form"
    for name, images in train.items():
        for number, content in enumerate(images):
            (unpacked / "train" / name).mkdir(parents=True, exist_ok=True)
            (unpacked / f"train/{name}/{name}_{number}.JPEG").write_bytes(content)
    (unpacked / "val").mkdir()
    for number in (1, 2, 3):
        (unpacked / f"val/ILSVRC2012_val_{number:08d}.JPEG").write_bytes(png(100 + number))
    shutil.copy(tmp_path / "val_labels.txt", unpacked)
    out = imported(unpacked, tmp_path / "again")
    assert (contents(out), contents(out, "val")) == (train, validation)


VAL = member("val/cat/a.png", png(0)) + member("val/dog/a.png", png(1))
TRAIN = member("train/cat/a.png", png(2)) + member("train/dog/a.png", png(3))


def test_a_link_in_a_tar_is_refused_by_name(tmp_path: Path) -> None:
    link = member("train/cat/x.png", kind=tarfile.SYMTYPE)
    (tmp_path / "all.tar").write_bytes(TRAIN + link + VAL + END)
    with pytest.raises(DataError, match=r"train/cat/x\.png"):
        imported(tmp_path / "all.tar", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_images_of_one_path_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as file:
        for name in ("train/cat/a.png", "val/cat/a.png", "train/cat/a.png"):
            file.writestr(name, png(5))
    with pytest.raises(DataError, match=r"train/cat/a\.png"):
        imported(tmp_path / "all.zip", tmp_path / "out")


def test_folders_that_are_there_twice_by_links_are_refused(tmp_path: Path) -> None:
    for place in ("train/cat", "val/cat"):
        (tmp_path / "in" / place).mkdir(parents=True)
        (tmp_path / "in" / place / "a.png").write_bytes(png(5))
    (tmp_path / "in/train/dog").symlink_to(tmp_path / "in/train/cat")
    with pytest.raises(DataError, match="imported twice"):
        imported(tmp_path / "in", tmp_path / "out")


def test_a_zip_that_unpacks_to_far_more_than_images_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from largebatch.data.datasets import image_folder

    monkeypatch.setattr(image_folder, "_ALWAYS", 10**6)
    with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("train/cat/a.png", "val/cat/a.png"):
            file.writestr(name, png(5))
        file.writestr("train/cat/b.png", bytes(10**7))
    with pytest.raises(DataError, match="10,000,"):
        imported(tmp_path / "all.zip", tmp_path / "out")


def spoil_a_header(content: bytearray) -> None:
    """Python's tarfile takes it for the end."""
    content[content.index(b"train/dog/a.png") + 1] ^= 1


def lose_the_end(content: bytearray) -> None:
    del content[-len(END) :]


def cut_an_image(content: bytearray) -> None:
    del content[-len(END) - 300 :]


@pytest.mark.parametrize("spoil", [spoil_a_header, lose_the_end, cut_an_image])
def test_a_tar_that_is_not_whole_is_refused(
    tmp_path: Path, spoil: Callable[[bytearray], None]
) -> None:
    content = bytearray(TRAIN + VAL + END)
    spoil(content)
    (tmp_path / "all.tar").write_bytes(content)
    with pytest.raises(DataError, match="all.tar"):
        imported(tmp_path / "all.tar", tmp_path / "out")

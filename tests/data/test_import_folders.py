"""Class folders in every form, ImageNet's archives, and a part of every class for validation."""

import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import tars
from class_folders import write_folder, write_image
from importing import contents, imported, png

from largebatch.cli.main import DONE, USER, main
from largebatch.data.datasets import import_data
from largebatch.data.index.index import read_folder
from largebatch.errors import DataError
from largebatch.optional import require_torchvision

require_torchvision()
from torchvision.datasets import ImageFolder  # noqa: E402 -- once it can be imported


def with_options(source: Path, out: Path, **options: object) -> Path:
    silent = lambda _done, _total: None  # noqa: E731 -- short
    import_data("imagefolder", source, out, shard_bytes=10**6, progress=silent, options=options)
    return out


def command(source: Path, out: Path, *options: str) -> int:
    return main(["data", "import", "imagefolder", str(source), "--out", str(out), *options])


def zip_of(folder: Path, archive: Path) -> None:
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.rglob("*"), reverse=True):
            file.write(path, path.relative_to(folder.parent))
        file.writestr("__MACOSX/train/dog/._a.JPEG", b"left behind")
        file.writestr(f"{folder.name}/readme.txt", b"not an image")


def as_folder(root: Path, source: Path) -> Path:
    return root


def as_zips(root: Path, source: Path) -> Path:
    for split in ("train", "val"):
        zip_of(root / split, source / f"{split}.zip")
    return source


def as_bare_tars(root: Path, source: Path) -> Path:
    """Without the split in the paths; one of them compressed."""
    for split, mode in (("train", "w"), ("val", "w:gz")):
        name = f"{split}.{mode.replace('w', 'tar').replace(':', '.')}"
        with tarfile.open(source / name, mode) as tar:  # type: ignore[call-overload]
            for path in (root / split).iterdir():
                tar.add(path, arcname=path.name)
    return source


def as_archive_around(root: Path, source: Path) -> Path:
    """In two more folders, like Kaggle's ImageNet."""
    (source / "ILSVRC/Data").mkdir(parents=True)
    shutil.copytree(root, source / "ILSVRC/Data/CLS-LOC")
    with zipfile.ZipFile(source / "all.zip", "w") as file:
        for path in (source / "ILSVRC").rglob("*"):
            file.write(path, path.relative_to(source))
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
    assert "2 of 9 images left out:" in shown
    assert "root: train/dog/b.png: the file is empty" in shown
    assert "root: val/cat/c.jpg: not a readable image" in shown
    assert "3 training and 4 validation images" in shown
    (tmp_path / "root/train/dog/a.JPEG").write_bytes(b"")  # the only other dog
    assert command(tmp_path / "root", tmp_path / "none", "--drop-bad") == USER
    assert "1 of 3 classes have no image in train" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "root"]


@pytest.mark.parametrize(
    ("paths", "part"),
    [
        pytest.param(["train/0.png"], "train/0.png is not in a class folder", id="no class"),
        pytest.param(["test/cat/0.png"], "test/cat/0.png is not in a class folder", id="no split"),
        pytest.param(
            ["old/train/cat/0.png", "train/cat/1.png"],
            "old/train/cat/0.png and train/cat/1.png",
            id="two folders of splits",
        ),
        pytest.param(["train/cat/0.png"], "no images of val", id="one split"),
        pytest.param(["train/n01.txt"], "no images", id="no images"),
    ],
)
def test_an_image_whose_class_is_unclear_is_refused(
    tmp_path: Path, paths: list[str], part: str
) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as file:
        for path in paths:
            file.writestr(path, png(1))
    with pytest.raises(DataError, match=part):
        imported(tmp_path / "all.zip", tmp_path / "out")


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


def write_classes(root: Path, **numbers: int) -> Path:
    """Write this number of images into each class folder, one of them in a subfolder."""
    for place, (name, number) in enumerate(numbers.items()):
        for image in range(number):
            path = root / name / ("more/" if image == 1 else "") / f"{image:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(1000 * place + image))
    return root


@pytest.mark.parametrize("form", ["zip with a folder", "train.tar"])
def test_class_folders_are_divided_equally_in_every_form(tmp_path: Path, form: str) -> None:
    plain = write_classes(tmp_path / "plain", cat=20, dog=7, yak=2)
    expected = with_options(plain, tmp_path / "expected", val_fraction=0.1)
    source = tmp_path / "in"
    if form == "train.tar":
        shutil.make_archive(str(source / "train"), "tar", plain)
    else:
        source = tmp_path / "all.zip"
        with zipfile.ZipFile(source, "w") as archive:
            for path in plain.rglob("*.png"):
                archive.write(path, f"plain/{path.relative_to(plain)}")
    out = with_options(source, tmp_path / "out", val_fraction=0.1)
    for split in ("train", "val"):
        assert contents(out, split) == contents(expected, split)


def test_the_division_depends_only_on_names_and_seed_and_never_changes(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "in", cat=12)
    first = contents(with_options(source, tmp_path / "a", val_fraction=0.25), "val")
    chosen = [next(n for n in range(12) if png(n) == image) for image in first["cat"]]
    assert chosen == [2, 8, 10]
    assert first != contents(with_options(source, tmp_path / "b", val_fraction=0.25, seed=1), "val")
    write_classes(source, dog=9, elk=3)  # other classes change no choice
    again = contents(with_options(source, tmp_path / "c", val_fraction=0.25), "val")
    assert again["cat"] == first["cat"]
    assert {name: len(images) for name, images in again.items()} == {"cat": 3, "dog": 2, "elk": 1}


@pytest.mark.parametrize("divided", [False, True])
def test_images_that_are_equal_in_both_splits_are_counted_and_named(
    tmp_path: Path, divided: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies under other names: validation would measure what was learnt by heart."""
    source = tmp_path / "in"
    for split, start in (("", 0),) if divided else (("train", 0), ("val", 100)):
        write_classes(source / split, cat=4, dog=4)
        for path in (source / split).rglob("*.png"):
            path.write_bytes(png(start + int(path.stem) + 10 * (path.parts[-2] == "dog")))
    if divided:
        for number in range(3):  # every one of the four cats is the same
            shutil.copy(source / "cat/003.png", source / f"cat/{number:03d}.png")
        named = r"cat/00\d.png = .*cat/00\d.png"
    else:
        shutil.copy(source / "train/dog/002.png", source / "val/cat/000.png")
        named = r"val/cat/000.png = .*train/dog/002.png"
    assert command(source, tmp_path / "out", *(["--val-fraction=0.25"] if divided else [])) == DONE
    lines = capsys.readouterr().out.splitlines()
    (place,) = (n for n, line in enumerate(lines) if " equal to one of train" in line)
    assert lines[place].startswith(f"1 of {2 if divided else 8} images of val ")
    assert re.search(named, lines[place + 1])
    assert "= " not in lines[place + 2]


def test_imagenets_archives_are_imported_unchanged(tmp_path: Path) -> None:
    """Train is a tar with a tar per class; val has no folders, and its classes are in a list."""
    inner = {
        name: b"".join(
            tars.member(f"{name}_{n}.JPEG", png(n + 10 * place)) for n in range(3 - place)
        )
        for place, name in enumerate(("n01440764", "n01443537"))
    }
    tars.write(
        tmp_path / "ILSVRC2012_img_train.tar",
        *(tars.member(f"{name}.tar", content + tars.END) for name, content in inner.items()),
    )
    val = [tars.member(f"ILSVRC2012_val_{n:08d}.JPEG", png(100 + n)) for n in (3, 1, 2)]
    tars.write(tmp_path / "ILSVRC2012_img_val.tar", *val)
    for text in (None, "n01443537\nn01440764\n", "n01443537\n\nn01440764\n"):
        if text is not None:
            (tmp_path / "val_labels.txt").write_text(text)
        with pytest.raises(DataError, match=r"val_labels\.txt.*of the 3 images"):
            imported(tmp_path, tmp_path / "out")
    (tmp_path / "val_labels.txt").write_text("n01443537\nn01440764\nn01440764\n")
    out = imported(tmp_path, tmp_path / "out")
    assert contents(out) == {
        "n01440764": [png(0), png(1), png(2)],
        "n01443537": [png(10), png(11)],
    }
    assert contents(out, "val") == {"n01440764": [png(102), png(103)], "n01443537": [png(101)]}


def write_kaggle(root: Path) -> Path:
    """Write ImageNet as Kaggle packs it; return the folder of its splits."""
    folder = root / "ILSVRC/Data/CLS-LOC"
    for place, name in enumerate(("n01440764", "n01443537")):
        for number in range(2):
            path = folder / f"train/{name}/{name}_{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(10 * place + number))
    rows = ["ImageId,PredictionString"]
    for number in (2, 3, 1):  # not in the order of the names
        for split in ("val", "test"):
            path = folder / f"{split}/ILSVRC2012_{split}_{number:08d}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(100 + number))
        wnid = "n01443537" if number == 1 else "n01440764"
        rows.append(f"ILSVRC2012_val_{number:08d},{wnid} 1 2 3 4 {wnid} 5 6 7 8")
    (root / "LOC_val_solution.csv").write_text("\n".join(rows) + "\n")
    (root / "ILSVRC/Annotations").mkdir()
    return folder


@pytest.mark.parametrize("given", ["root", "list"])
def test_imagenet_as_kaggle_packs_it_is_imported(given: str, tmp_path: Path) -> None:
    root = tmp_path / "in"
    folder = write_kaggle(root)
    if given == "list":
        (root / "LOC_val_solution.csv").unlink()
        (folder / "val_labels.txt").write_text("n01443537\nn01440764\nn01440764\n")
    out = imported(root if given == "root" else folder, tmp_path / "out")
    assert contents(out) == {"n01440764": [png(0), png(1)], "n01443537": [png(10), png(11)]}
    assert contents(out, "val") == {"n01440764": [png(102), png(103)], "n01443537": [png(101)]}

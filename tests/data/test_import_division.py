"""Class folders with another name of validation, or without validation."""

import re
import shutil
import zipfile
from pathlib import Path

import pytest
from class_folders import write_folder
from importing import contents, png

from largebatch.cli.main import DONE, USER, main
from largebatch.data.datasets import import_data
from largebatch.errors import DataError


def imported(source: Path, out: Path, **options: object) -> Path:
    silent = lambda _done, _total: None  # noqa: E731 -- short
    import_data("imagefolder", source, out, shard_bytes=10**6, progress=silent, options=options)
    return out


def write_classes(root: Path, **numbers: int) -> Path:
    """Write this number of images into each class folder, one of them in a subfolder."""
    for place, (name, number) in enumerate(numbers.items()):
        for image in range(number):
            path = root / name / ("more/" if image == 1 else "") / f"{image:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(1000 * place + image))
    return root


def test_a_split_of_another_name_is_used_for_validation(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_folder(tmp_path / "in", split)
    expected = contents(imported(tmp_path / "in", tmp_path / "expected"), "val")
    (tmp_path / "in/val").rename(tmp_path / "in/test")
    with pytest.raises(DataError, match="no images to import; .* --val-name test"):
        imported(tmp_path / "in", tmp_path / "out")
    assert contents(imported(tmp_path / "in", tmp_path / "a", val_name="test"), "val") == expected
    shutil.make_archive(str(tmp_path / "all"), "zip", tmp_path / "in")
    out = imported(tmp_path / "all.zip", tmp_path / "b", val_name="test")
    assert contents(out, "val") == expected
    for split in ("train", "test"):
        shutil.make_archive(str(tmp_path / "apart" / split), "tar", tmp_path / "in" / split)
    assert (
        contents(imported(tmp_path / "apart", tmp_path / "c", val_name="test"), "val") == expected
    )


def test_training_images_are_not_used_for_validation(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", "train")
    with pytest.raises(DataError, match="--val-name train: that is the training split"):
        imported(tmp_path / "in", tmp_path / "out", val_name="train")


@pytest.mark.parametrize("form", ["train", "zip", "zip with a folder", "train.tar"])
def test_class_folders_are_divided_equally_in_every_form(tmp_path: Path, form: str) -> None:
    plain = write_classes(tmp_path / "plain", cat=20, dog=7, yak=2)
    expected = imported(plain, tmp_path / "expected", val_fraction=0.1)
    source = tmp_path / "in"
    if form == "train":
        shutil.copytree(plain, source / "train")
    elif form == "train.tar":
        shutil.make_archive(str(source / "train"), "tar", plain)
    else:
        around = "" if form == "zip" else "plain/"
        source = tmp_path / "all.zip"
        with zipfile.ZipFile(source, "w") as archive:
            for path in plain.rglob("*.png"):
                archive.write(path, f"{around}{path.relative_to(plain)}")
    out = imported(source, tmp_path / "out", val_fraction=0.1)
    for split in ("train", "val"):
        assert contents(out, split) == contents(expected, split)


def test_every_class_is_divided_and_nothing_is_lost(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "in", cat=20, dog=8, yak=2)
    out = imported(source, tmp_path / "out", val_fraction=0.25)
    train, val = contents(out, "train"), contents(out, "val")
    assert {name: len(found) for name, found in val.items()} == {"cat": 5, "dog": 2, "yak": 1}
    for place, name in enumerate(("cat", "dog", "yak")):
        number = len(list(source.glob(f"{name}/**/*.png")))
        expected = {png(1000 * place + image) for image in range(number)}
        assert {*train[name], *val[name]} == expected
        assert len(train[name]) + len(val[name]) == number


def test_the_division_depends_only_on_names_and_seed(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "in", cat=40)
    first = contents(imported(source, tmp_path / "a", val_fraction=0.25), "val")
    other = contents(imported(source, tmp_path / "b", val_fraction=0.25, seed=1), "val")
    assert first != other
    # More images of another class, and other contents, change no choice.
    write_classes(source, dog=9, elk=3)
    again = contents(imported(source, tmp_path / "c", val_fraction=0.25), "val")["cat"]
    assert again == first["cat"]
    # Of more images in the class, those chosen before that are still among the part stay.
    (source / "cat/040.png").write_bytes(png(77))
    more = contents(imported(source, tmp_path / "d", val_fraction=0.25), "val")["cat"]
    assert len({*more} - {*first["cat"]}) <= 1


def test_the_division_never_changes(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "in", cat=12)
    chosen = contents(imported(source, tmp_path / "out", val_fraction=0.25), "val")["cat"]
    assert [next(n for n in range(12) if png(n) == image) for image in chosen] == [2, 8, 10]


def test_a_class_without_an_image_to_train_on_is_refused(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "in", cat=20, dog=1)
    with pytest.raises(DataError, match="class dog has 1 images, of which 1 would be used"):
        imported(source, tmp_path / "out", val_fraction=0.1)


def test_existing_splits_are_not_divided_again(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_folder(tmp_path / "in", split)
    with pytest.raises(DataError, match="train and val already exist; remove --val-fraction"):
        imported(tmp_path / "in", tmp_path / "out", val_fraction=0.1)


def test_the_command_describes_the_division(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_classes(tmp_path / "in", cat=20, dog=8)
    (source / "cat/a.gif").touch()
    (source / "loose.txt").touch()
    words = ["data", "import", "imagefolder", str(source)]
    assert main([*words, "--out", str(tmp_path / "a")]) == USER
    assert "only <class>/*.jpg: --val-fraction 0.1" in capsys.readouterr().err
    options = ["--val-fraction", "0.1", "--seed", "3", "--out", str(tmp_path / "b")]
    assert main([*words, *options]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{source}: 2 files ignored (read are ")
    assert lines[1:3] == ["  1 .gif: cat/a.gif", "  1 .txt: loose.txt"]
    assert lines[3] == (
        "val: 0.1 of every class, at least one image: the names with the smallest hashes "
        "with seed 3; the same names give the same division"
    )
    assert "2 classes, 25 training and 3 validation images" in lines[-1]


@pytest.mark.parametrize("text", ["0", "1", "-0.1", "ten", "nan"])
def test_an_invalid_fraction_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["imagefolder", str(tmp_path), "--out", "x", f"--val-fraction={text}"]
    assert main(["data", "import", *words]) == USER
    assert "--val-fraction" in capsys.readouterr().err


def test_an_import_of_one_class_names_the_likely_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_classes(tmp_path / "in/images", cat=4, dog=4)
    words = ["--out", str(tmp_path / "out"), "--val-fraction", "0.25"]
    assert main(["data", "import", "imagefolder", str(tmp_path / "in"), *words]) == DONE
    printed = capsys.readouterr().out
    assert "all images are of one class, images; if the class folders are below it" in printed


@pytest.mark.parametrize("words", [["--val-fraction", "0.25"], ["--val-name", "test"]])
def test_folders_beside_the_splits_are_named(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "test", "extra"):
        write_classes(tmp_path / "in" / split, cat=4, dog=4)
    source, out = str(tmp_path / "in"), str(tmp_path / "out")
    assert main(["data", "import", "imagefolder", source, "--out", out, *words]) == DONE
    others = "extra" if "--val-name" in words else "extra, test"
    assert f"{source}: not imported: {others}\n" in capsys.readouterr().out


@pytest.mark.parametrize("divided", [True, False])
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
    words = ["data", "import", "imagefolder", str(source), "--out", str(tmp_path / "out")]
    assert main([*words, *(["--val-fraction", "0.25"] if divided else [])]) == DONE
    lines = capsys.readouterr().out.splitlines()
    (place,) = (n for n, line in enumerate(lines) if " equal to one of train" in line)
    assert lines[place].startswith(f"1 of {2 if divided else 8} images of val ")
    assert re.search(named, lines[place + 1])
    assert "= " not in lines[place + 2]

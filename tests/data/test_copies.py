"""Copies of images are named by every import, and are on one side of a division."""

import io
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from class_folders import contents, imported, png, write_classes
from PIL import Image

from largebatch.cli.main import DONE, USER, main
from largebatch.data.datasets import import_data
from largebatch.data.datasets.copies import copies_in_folder
from largebatch.data.index.index import read_folder
from largebatch.storage import silent


def remarks(source: Path, out: Path, *, name: str = "imagefolder", **options: object) -> list[str]:
    """Import, and return the lines about copies."""
    lines = import_data(
        name, source, out, shard_bytes=10**6, progress=silent, options=options or None
    )
    return [line for line in lines if line.startswith("copies")]


def as_folder(root: Path) -> Path:
    return root


def as_zip(root: Path) -> Path:
    with zipfile.ZipFile(root.with_suffix(".zip"), "w") as file:
        for path in sorted(root.rglob("*.png")):
            file.write(path, path.relative_to(root))
    return root.with_suffix(".zip")


def as_tar(root: Path) -> Path:
    with tarfile.open(root.with_suffix(".tar"), "w") as tar:
        tar.add(root, arcname=".")
    return root.with_suffix(".tar")


@pytest.mark.parametrize("form", [as_folder, as_zip, as_tar])
def test_copies_are_named_by_their_kind(tmp_path: Path, form: Callable[[Path], Path]) -> None:
    root = tmp_path / "in"
    for number, path in enumerate(
        f"{split}/{name}/{image}.png"
        for split in ("train", "val")
        for name in ("cat", "dog")
        for image in range(5)
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(png(number))
    assert remarks(form(root), tmp_path / "none") == []
    shutil.copy(root / "train/cat/0.png", root / "val/cat/both.png")
    shutil.copy(root / "train/cat/1.png", root / "train/cat/same.png")
    shutil.copy(root / "val/dog/2.png", root / "val/cat/other.png")
    across, classes, within = remarks(form(root), tmp_path / "out")
    indexes = (read_folder(root, split) for split in ("train", "val"))
    assert copies_in_folder(*indexes) == [across, classes, within]
    assert "val/cat/both.png = train/cat/0.png" in across
    assert "val/dog/2.png = val/cat/other.png" in classes
    assert "train/cat/same.png = train/cat/1.png" in within
    assert all("1 image " in line for line in (across, classes, within))


@pytest.mark.parametrize("form", [as_folder, as_zip, as_tar])
def test_a_division_keeps_copies_on_one_side(tmp_path: Path, form: Callable[[Path], Path]) -> None:
    """Every image is there two or three times."""
    root = write_classes(tmp_path / "in", cat=9, dog=7)
    for number, path in enumerate(sorted(root.rglob("*.png"))):
        for copy in range(1 + number % 2):
            shutil.copy(path, path.with_stem(f"{path.stem}-{copy}"))
    lines = remarks(form(root), tmp_path / "out", val_fraction=0.25)
    assert len(lines) == 1  # no image on both sides or in two classes
    train, val = contents(tmp_path / "out"), contents(tmp_path / "out", "val")
    for name in ("cat", "dog"):
        number = len(list((root / name).iterdir()))
        assert set(train[name]).isdisjoint(val[name])
        assert len(train[name]) + len(val[name]) == number
        assert 0.25 * number - 3 <= len(val[name]) <= round(0.25 * number)


def test_a_class_of_copies_of_one_image_is_not_divided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_classes(tmp_path / "in", cat=4, dog=4)
    for path in (root / "dog").iterdir():
        path.write_bytes(png(0, side=9))
    words = ["data", "import", "imagefolder", str(root), "--out", str(tmp_path / "out")]
    assert main([*words, "--val-fraction", "0.5"]) == USER
    assert "class dog" in capsys.readouterr().err
    (root / "dog/000.png").write_bytes(png(77))  # three copies and one other image
    assert main([*words, "--val-fraction", "0.5"]) == DONE
    sides = contents(tmp_path / "out")["dog"], contents(tmp_path / "out", "val")["dog"]
    assert sides == ([png(0, side=9)] * 3, [png(77)])


def test_shards_name_copies_too(tmp_path: Path) -> None:
    source = write_classes(
        tmp_path / "classes", **{"train/a": 2, "train/b": 2, "val/a": 2, "val/b": 2}
    )
    (source / "val/a/000.png").write_bytes((source / "train/a/001.png").read_bytes())
    first = imported(source, tmp_path / "shards")
    (line,) = remarks(first, tmp_path / "again", name="webdataset")
    assert "val image 0 = train image 1" in line


def photograph(number: int) -> Image.Image:
    """Coarse colours with finer ones over them, 160 x 120."""
    random = np.random.default_rng(number)
    coarse, fine = (
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).resize((160, 120))
        for size in ((3, 4), (15, 20))
    )
    return Image.blend(coarse, fine, 0.4)


def test_photographs_that_were_saved_again_or_resized_are_noted(tmp_path: Path) -> None:
    for number in range(24):
        path = tmp_path / f"in/{('train', 'val')[number % 2]}/{'ab'[number % 3 > 1]}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(number).save(path, quality=95)
    assert remarks(tmp_path / "in", tmp_path / "none") == []
    photograph(0).save(tmp_path / "in/val/a/saved.jpg", quality=40)
    photograph(6).resize((80, 60)).save(tmp_path / "in/val/a/small.png")
    photograph(2).save(tmp_path / "in/train/a/other.webp", quality=80)
    turned, exif = photograph(4).transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "in/train/a/turned.jpg", exif=exif)
    palette = photograph(99).convert("P")
    palette.save(tmp_path / "in/val/b/palette.png", transparency=bytes(8))  # Pillow warns
    across, classes, within = remarks(tmp_path / "in", tmp_path / "out")
    assert "val/a/saved.jpg = train/a/0.jpg" in across
    assert "val/a/small.png = train/a/6.jpg" in across
    assert "2 images" in across
    assert "train/b/2.jpg = train/a/other.webp" in classes
    assert "train/a/turned.jpg = train/a/4.jpg" in within


def test_real_photographs_are_not_taken_for_copies(real_data: Path, tmp_path: Path) -> None:
    """1,000 of ten classes; the copy is saved at half of its size."""
    root = tmp_path / "in"
    with zipfile.ZipFile(real_data / "imagenette224/val.zip") as file:
        names = [name for name in file.namelist() if name.lower().endswith((".jpeg", ".jpg"))]
        for number, name in enumerate(names):
            path = root / ("train", "val")[number % 2] / Path(name).parent.name / Path(name).name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.read(name))
        image = Image.open(io.BytesIO(file.read(names[0])))
    image.resize((image.width // 2, image.height // 2)).save(
        root / "val" / Path(names[0]).parent.name / "half.jpg", quality=80
    )
    (line,) = remarks(root, tmp_path / "out")
    assert "1 image " in line
    assert "half.jpg" in line

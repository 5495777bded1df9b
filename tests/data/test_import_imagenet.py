import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tars
from importing import contents, imported, png

from largebatch.errors import DataError


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
    with pytest.raises(DataError) as caught:
        imported(tmp_path, tmp_path / "out")
    message = str(caught.value)
    assert f"expected {tmp_path}/val_labels.txt with the classes of the 3 images of" in message
    assert "imagenet_2012_validation_synset_labels.txt" in message
    (tmp_path / "val_labels.txt").write_text("n01443537\nn01440764\nn01440764\n")
    out = imported(tmp_path, tmp_path / "out")
    assert contents(out) == {
        "n01440764": [png(0), png(1), png(2)],
        "n01443537": [png(10), png(11)],
    }
    assert contents(out, "val") == {"n01440764": [png(102), png(103)], "n01443537": [png(101)]}


@pytest.mark.parametrize("text", ["cat\ndog\n", "cat\n\ndog\n", "cat\ndog\ncat\ndog\n"])
def test_a_list_of_classes_that_does_not_fit_is_refused(tmp_path: Path, text: str) -> None:
    tars.write(
        tmp_path / "train.tar", tars.member("cat/a.png", png(0)), tars.member("dog/a.png", png(1))
    )
    tars.write(tmp_path / "val.tar", *(tars.member(f"{n}.png", png(n)) for n in range(3)))
    (tmp_path / "val_labels.txt").write_text(text)
    with pytest.raises(DataError, match=r"val_labels.txt: has \d classes; expected .* 3 images"):
        imported(tmp_path, tmp_path / "out")


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


@pytest.mark.parametrize("given", ["root", "folder", "csv beside val", "list"])
def test_imagenet_as_kaggle_packs_it_is_imported(given: str, tmp_path: Path) -> None:
    root = tmp_path / "in"
    folder = write_kaggle(root)
    if given == "csv beside val":
        path = (root / "LOC_val_solution.csv").rename(folder / "LOC_val_solution.csv")
        path.write_text(path.read_text(), encoding="utf-8-sig", newline="\r\n")  # of a spreadsheet
    if given == "list":
        (root / "LOC_val_solution.csv").unlink()
        (folder / "val_labels.txt").write_text("n01443537\nn01440764\nn01440764\n")
    out = imported(root if given == "root" else folder, tmp_path / "out")
    assert contents(out) == {"n01440764": [png(0), png(1)], "n01443537": [png(10), png(11)]}
    assert contents(out, "val") == {"n01440764": [png(102), png(103)], "n01443537": [png(101)]}


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(lambda text: None, "LOC_val_solution.csv", id="no file"),
        pytest.param(lambda text: text[text.index("\n") + 1 :], "PredictionString", id="no header"),
        pytest.param(lambda text: text[: text.index("\n", 60)], "val_00000003", id="rows missing"),
        pytest.param(lambda text: text.replace(",n", ","), "n01440764", id="other names"),
    ],
)
def test_kaggles_imagenet_without_its_solution_names_the_file(
    spoil: Callable[[str], str | None], named: str, tmp_path: Path
) -> None:
    folder = write_kaggle(tmp_path / "in")
    path = tmp_path / "in/LOC_val_solution.csv"
    text = spoil(path.read_text())
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=named):
        imported(folder, tmp_path / "out")


def test_kaggles_zip_says_to_unpack_it(tmp_path: Path) -> None:
    write_kaggle(tmp_path / "in")
    archive = shutil.make_archive(str(tmp_path / "all"), "zip", tmp_path / "in")
    with pytest.raises(DataError, match=r"unpack the archive .*LOC_val_solution.csv"):
        imported(Path(archive), tmp_path / "out")

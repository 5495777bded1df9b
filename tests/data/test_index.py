import errno
import os
from pathlib import Path

import numpy as np
import pytest
from class_folders import fields, write_folder, write_image

from largebatch import storage
from largebatch.cli.main import main
from largebatch.data.index.index import (
    BadImagesError,
    check_same_classes,
    find_stored,
    index_of,
    load_or_read,
    make,
    read_folder,
)
from largebatch.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folder(tmp_path)


def test_classes_and_images_are_in_bytewise_order(root: Path) -> None:
    index = read_folder(root, "train")
    assert index.root == root
    assert index.classes == ("Zebra", "cat", "dog")
    names = ["train/Zebra/z.webp", "train/cat/x.jpg", "train/dog/a.JPEG", "train/dog/b.png"]
    assert list(index.paths) == names
    assert index.labels.tolist() == [0, 1, 2, 2]
    assert index.heights.tolist() == [4, 4, 9, 5]
    assert index.widths.tolist() == [6, 6, 3, 7]
    assert {a.dtype for a in (index.labels, index.heights, index.widths)} == {np.dtype(np.int64)}
    assert len(index) == 4
    for sample, name in enumerate(names):
        location = index.locate(sample)
        stat = (root / name).stat()
        assert location == (root / name, 0, stat.st_size, stat.st_mtime_ns)


def spoil(root: Path) -> dict[str, str]:
    """Add bad images; return the expected reasons."""
    write_image(root / "train/dog/cut.jpg", height=200, width=200)
    os.truncate(root / "train/dog/cut.jpg", (root / "train/dog/cut.jpg").stat().st_size - 200)
    (root / "train/cat/text.jpg").write_text("<html>not found</html>")
    (root / "train/cat/empty.png").touch()
    (root / "train/cat/gone.jpg").symlink_to("nowhere.jpg")
    write_image(root / "train/cat/deep.png", mode="I;16")
    os.mkfifo(root / "train/cat/pipe.png")
    return {
        "train/cat/deep.png": "it has 16 bits a channel",
        "train/cat/empty.png": "the file is empty",
        "train/cat/gone.jpg": "No such file or directory",
        "train/cat/pipe.png": "it is not a file but a folder, a pipe or a device",
        "train/cat/text.jpg": "not a readable image",
        "train/dog/cut.jpg": "it is truncated",
    }


def test_every_broken_image_is_reported_at_once(root: Path) -> None:
    reasons = spoil(root)
    with pytest.raises(BadImagesError) as caught:
        read_folder(root, "train")
    message = str(caught.value)
    assert message.startswith(f"{root}: 6 of 10 images in train cannot be used; replace or remove")
    assert f"largebatch data index {root} --drop-bad" in message
    for path, reason in reasons.items():
        assert f"{path}: {reason}" in message
    assert "a.JPEG" not in message
    assert "..." not in message


@pytest.mark.parametrize("times", [3, 4])
def test_reads_of_a_failing_disk_are_retried_and_its_images_are_not_bad(
    root: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    expected = fields(read_folder(root, "train"))
    path, real, failures = root / "train/dog/b.png", os.pread, iter(range(times))
    identity = path.stat().st_ino

    def failing(file: int, length: int, offset: int) -> bytes:
        if os.fstat(file).st_ino == identity and next(failures, None) is not None:
            raise OSError(errno.EIO, "Input/output error")
        return real(file, length, offset)

    monkeypatch.setattr(os, "pread", failing)
    monkeypatch.setattr(storage, "PAUSES", (0.01, 0.02, 0.03))
    if times == 3:
        assert fields(index_of(make(root, "train", drop_bad=True), root)) == expected
        return
    with pytest.raises(DataError, match=rf"{path}: cannot be read \(Input/output error\), tried 4"):
        make(root, "train", drop_bad=True)
    assert not list(find_stored(root, "train"))


def test_bad_images_are_left_out_only_on_request_and_are_recorded(root: Path) -> None:
    good = fields(read_folder(root, "train"))
    reasons = spoil(root)
    with pytest.raises(BadImagesError):
        make(root, "train")
    assert not list(find_stored(root, "train"))
    make(root, "train", drop_bad=True)
    index = load_or_read(root, "train")
    assert fields(index) == {**good, "bad": index.bad, "digest": index.digest}
    assert index.digest != good["digest"]
    for bad, (path, reason) in zip(index.bad, reasons.items(), strict=True):
        assert bad.path == path
        assert bad.reason.startswith(reason)


def test_a_class_whose_images_are_all_bad_cannot_be_left_out(root: Path) -> None:
    (root / "train/cat/x.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="1 of 3 classes have no image that can be used: cat"):
        make(root, "train", drop_bad=True)


@pytest.mark.parametrize(
    ("folders", "split", "message"),
    [
        pytest.param(None, "train", "{root}: there is no such folder", id="no folder"),
        pytest.param([], "val", "{root}/val: there is no such folder", id="nothing in it"),
        pytest.param(
            ["images", "labels"],
            "val",
            "expected {root}/val/<class>/*.jpg or {root}/val/*.tar; found images, labels",
            id="another layout",
        ),
        pytest.param(
            ["cat", "dog"],
            "train",
            "found cat, dog. To divide class folders, or for splits of other names: largebatch "
            "data import imagefolder (--val-fraction, --val-name)",
            id="class folders alone",
        ),
        pytest.param(["val"], "val", "there are no class folders and no shards", id="no classes"),
        pytest.param(
            ["val/cat", "val/dog"],
            "val",
            "2 of 2 class folders hold no images",
            id="empty classes",
        ),
    ],
)
def test_a_folder_of_another_shape_is_refused(
    tmp_path: Path, folders: list[str] | None, split: str, message: str
) -> None:
    root = tmp_path / "data"
    for folder in folders or []:
        (root / folder).mkdir(parents=True)
    if folders is not None:
        root.mkdir(exist_ok=True)
    with pytest.raises(DataError) as caught:
        read_folder(root, split)
    assert message.format(root=root) in str(caught.value)


def test_the_splits_must_have_the_same_classes(root: Path) -> None:
    for name in ("cat", "Zebra", "yak"):
        write_image(root / f"val/{name}/x.png")
    train, val = read_folder(root, "train"), read_folder(root, "val")
    check_same_classes(root, train.classes, train.classes)
    with pytest.raises(DataError, match="only in train: dog; only in val: yak"):
        check_same_classes(root, train.classes, val.classes)


@pytest.mark.parametrize("command", ["index", "import"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_classes_that_differ_in_unicode_normalisation_alone_are_told_apart(
    command: str, split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the screen both are the same word; some systems store one form, some the other."""
    whole, parts = "caf\u00e9", "cafe\u0301"
    for place in (f"train/{whole}", f"val/{whole if split == 'train' else parts}", "val/a"):
        write_image(tmp_path / f"in/{place}/x.png")
    write_image(tmp_path / "in/train/a/x.png")
    if split == "train":  # in one split: a class in two halves
        write_image(tmp_path / f"in/train/{parts}/x.png")
        write_image(tmp_path / f"in/val/{parts}/x.png")
    words = {"index": [], "import": ["imagefolder", "--out", str(tmp_path / "out")]}[command]
    assert main(["data", command, *words, str(tmp_path / "in")]) == 2
    assert r"'cafe\u0301', 'caf\xe9'" in capsys.readouterr().err


def test_the_command_builds_describes_and_refuses_an_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val"):
        write_folder(tmp_path, split)
    (tmp_path / "val/cat/text.jpg").write_text("no image")
    words = ["data", "index", str(tmp_path)]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert "train: 4 images" in out
    assert "val/cat/text.jpg: not a readable image" in out
    assert (
        "1 image, listed above, cannot be used; replace or remove it, or leave it out with:" in err
    )
    for again in ([*words, "--drop-bad"], words):
        assert main(again) == 0
        out, _ = capsys.readouterr()
        assert "val: 1 left out:\n  val/cat/text.jpg: not a readable image" in out
        assert "4 training and 4 validation images, 1 bad ones left out" in out
    write_image(tmp_path / "train/cat/y.jpg")
    assert main(words) == 0
    assert "3 classes, 5 training" in capsys.readouterr().out

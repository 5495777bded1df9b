import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from largebatch.data import index as module
from largebatch.data.index import (
    Index,
    check_same_classes,
    from_bytes,
    load_or_read,
    read_folder,
    to_bytes,
)
from largebatch.errors import DataError


def write_picture(path: Path, *, height: int = 4, width: int = 6, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (width, height)).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_picture(tmp_path / "train/dog/b.png", height=5, width=7)
    write_picture(tmp_path / "train/dog/a.JPEG", height=9, width=3)
    write_picture(tmp_path / "train/cat/x.jpg")
    write_picture(tmp_path / "train/Zebra/z.webp")
    return tmp_path


def fields(index: Index) -> dict[str, object]:
    """Plain values, which compare with ==."""
    names = ("root", "classes", "paths", "labels", "heights", "widths", "signature")
    values = {name: getattr(index, name) for name in names}
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}


def test_classes_and_pictures_are_in_bytewise_order(root: Path) -> None:
    index = read_folder(root, "train")
    assert index.root == root
    assert index.classes == ("Zebra", "cat", "dog")
    assert index.paths == (
        "train/Zebra/z.webp",
        "train/cat/x.jpg",
        "train/dog/a.JPEG",
        "train/dog/b.png",
    )
    assert index.labels.tolist() == [0, 1, 2, 2]
    assert index.heights.tolist() == [4, 4, 9, 5]
    assert index.widths.tolist() == [6, 6, 3, 7]
    assert {a.dtype for a in (index.labels, index.heights, index.widths)} == {np.dtype(np.int64)}
    assert len(index) == 4


def test_other_files_and_hidden_names_are_ignored(root: Path) -> None:
    before = fields(read_folder(root, "train")) | {"signature": None}
    (root / "train/cat/notes.txt").write_text("no picture")
    (root / "train/cat/._x.jpg").write_bytes(b"left behind by a file manager")
    (root / "train/readme.jpg").write_bytes(b"not in a class folder")
    (root / "train/.ipynb_checkpoints").mkdir()
    (root / "train/cat/folder.jpg").mkdir()
    write_picture(root / "train/cat/inner/deep.png")
    assert fields(read_folder(root, "train")) | {"signature": None} == before


def test_exif_orientation_does_not_turn_the_sizes(tmp_path: Path) -> None:
    (tmp_path / "train/a").mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter
    Image.new("RGB", (30, 20)).save(tmp_path / "train/a/a.jpg", exif=exif)
    index = read_folder(tmp_path, "train")
    assert (index.heights.tolist(), index.widths.tolist()) == ([20], [30])


def test_every_broken_picture_is_reported_at_once(root: Path) -> None:
    write_picture(root / "train/dog/cut.jpg", height=200, width=200)
    os.truncate(root / "train/dog/cut.jpg", (root / "train/dog/cut.jpg").stat().st_size - 200)
    png = bytearray((root / "train/dog/b.png").read_bytes())
    png[-20] ^= 0xFF
    (root / "train/dog/garbled.png").write_bytes(png)
    (root / "train/cat/text.jpg").write_text("<html>not found</html>")
    (root / "train/cat/empty.png").touch()
    (root / "train/cat/gone.jpg").symlink_to("nowhere.jpg")
    write_picture(root / "train/cat/deep.png", mode="I;16")
    with pytest.raises(DataError) as caught:
        read_folder(root, "train")
    message = str(caught.value)
    assert message.startswith(
        f"{root}: 6 of 10 pictures in train cannot be used; replace or remove"
    )
    assert "train/dog/cut.jpg: image file is truncated" in message
    assert "train/dog/garbled.png: " in message
    assert "train/cat/text.jpg: no readable picture" in message
    assert "train/cat/empty.png: no readable picture" in message
    assert "train/cat/gone.jpg: [Errno 2] No such file" in message
    assert "train/cat/deep.png: its pixels are I;16, expected 8 bits per channel" in message
    assert "a.JPEG" not in message
    assert "..." not in message


def test_a_message_lists_no_more_than_ten_pictures(tmp_path: Path) -> None:
    (tmp_path / "train/a").mkdir(parents=True)
    for number in range(25):
        (tmp_path / f"train/a/{number:02d}.jpg").touch()
    with pytest.raises(DataError, match="25 of 25 pictures") as caught:
        read_folder(tmp_path, "train")
    lines = str(caught.value).splitlines()
    assert len(lines) == 12
    assert "09.jpg" in lines[10]
    assert lines[11] == "  ..."


@pytest.mark.parametrize(
    ("folders", "split", "message"),
    [
        pytest.param(None, "train", "{root}: there is no such folder", id="no folder"),
        pytest.param([], "val", "{root}/val: there is no such folder", id="nothing in it"),
        pytest.param(
            ["images", "labels"],
            "val",
            "expected the layout {root}/val/<class>/*.jpg; found images, labels",
            id="another layout",
        ),
        pytest.param(["val"], "val", "there are no class folders", id="no classes"),
        pytest.param(
            ["val/cat", "val/dog"],
            "val",
            "2 of 2 class folders hold no pictures",
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


def test_an_empty_class_folder_is_named(root: Path) -> None:
    (root / "train/yak").mkdir()
    with pytest.raises(DataError, match=r"1 of 4 class folders hold no pictures .*: yak; add"):
        read_folder(root, "train")


def test_the_splits_must_have_the_same_classes(root: Path) -> None:
    for name in ("cat", "Zebra", "yak"):
        write_picture(root / f"val/{name}/x.png")
    train, val = read_folder(root, "train"), read_folder(root, "val")
    check_same_classes(train, train)
    with pytest.raises(DataError, match="only in train: dog; only in val: yak"):
        check_same_classes(train, val)


def test_an_index_survives_being_sent(root: Path) -> None:
    (root / "train/cat/x.jpg").rename(
        os.fsdecode(os.fsencode(root) + b"/train/cat/\xff \xc3\xa9.jpg")
    )
    index = read_folder(root, "train")
    assert fields(from_bytes(to_bytes(index))) == fields(index)


def test_an_unchanged_folder_is_not_decoded_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_or_read(root, "train")
    assert fields(first) == fields(read_folder(root, "train"))
    monkeypatch.setattr(module, "_measure", None)
    assert fields(load_or_read(root, "train")) == fields(first)


def add(root: Path) -> None:
    write_picture(root / "train/dog/c.png")


def remove(root: Path) -> None:
    (root / "train/dog/b.png").unlink()


def overwrite(root: Path) -> None:
    """Put a picture of other sizes into the same file, as long as before."""
    path = root / "train/dog/b.png"
    length = path.stat().st_size
    write_picture(path, height=8, width=2)
    with path.open("ab") as file:
        file.write(b"\0" * (length - path.stat().st_size))
    assert path.stat().st_size == length


def rename_class(root: Path) -> None:
    (root / "train/dog").rename(root / "train/wolf")


@pytest.mark.parametrize("change", [add, remove, overwrite, rename_class])
def test_a_changed_folder_is_read_again(root: Path, change: object) -> None:
    before = load_or_read(root, "train")
    change(root)  # type: ignore[operator]
    after = load_or_read(root, "train")
    assert fields(after) == fields(read_folder(root, "train"))
    assert fields(after) != fields(before)


def test_a_moved_folder_keeps_its_index(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_or_read(root, "train")
    moved = tmp_path_factory.mktemp("elsewhere") / "data"
    shutil.move(root, moved)
    monkeypatch.setattr(module, "_measure", None)
    assert load_or_read(moved, "train").root == moved


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"PK\x03\x04 and then nothing", id="cut off"),
        pytest.param(b"something else", id="something else"),
    ],
)
def test_an_unreadable_kept_index_is_replaced(root: Path, content: bytes) -> None:
    cache = root / ".largebatch-train.npz"
    cache.write_bytes(content)
    expected = fields(read_folder(root, "train"))
    assert fields(load_or_read(root, "train")) == expected
    assert fields(from_bytes(cache.read_bytes())) == expected


def test_a_kept_index_of_another_format_is_replaced(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = root / ".largebatch-train.npz"
    for number in (module.FORMAT + 1, module.FORMAT):
        monkeypatch.setattr(module, "FORMAT", number)
        load_or_read(root, "train")
        with np.load(cache) as arrays:
            assert arrays["format"] == number


def test_a_folder_that_cannot_be_written_to_is_read_all_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert len(load_or_read(root, "train")) == 4
    assert sorted(path.name for path in root.iterdir()) == ["train"]


def test_writing_leaves_nothing_but_the_index(root: Path) -> None:
    load_or_read(root, "train")
    assert sorted(path.name for path in root.iterdir()) == [".largebatch-train.npz", "train"]

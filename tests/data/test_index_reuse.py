import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from class_folders import fields, write_folder, write_image

from largebatch.data.index import index as module
from largebatch.data.index.index import (
    find_stored,
    index_of,
    load_file,
    load_or_read,
    make,
    open_mapped,
    read_folder,
)
from largebatch.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folder(tmp_path)


def test_an_index_round_trips_through_its_file(root: Path) -> None:
    (root / "train/cat/x.jpg").rename(
        os.fsdecode(os.fsencode(root) + b"/train/cat/\xff \xc3\xa9.jpg")
    )
    expected = fields(read_folder(root, "train"))
    make(root, "train")
    (content,) = find_stored(root, "train")
    assert content.file == root / ".largebatch-train.index"
    assert fields(index_of(content, root)) == expected
    assert sorted(path.name for path in root.iterdir()) == [".largebatch-train.index", "train"]


def test_an_unchanged_folder_is_not_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fields(load_or_read(root, "train"))
    monkeypatch.setattr(module, "measure_part", None)
    assert fields(load_or_read(root, "train")) == first


def later(path: Path) -> None:
    """Change a file's modification time, for any resolution of the file system."""
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


def add(root: Path) -> None:
    write_image(root / "train/dog/c.png")


def remove(root: Path) -> None:
    (root / "train/dog/b.png").unlink()


def rename(root: Path) -> None:
    (root / "train/dog/b.png").rename(root / "train/dog/c.png")


def lengthen(root: Path) -> None:
    with (root / "train/dog/b.png").open("ab") as file:
        file.write(b"\0")


def overwrite(root: Path) -> None:
    """Overwrite a file with an image of another size and the same length."""
    path = root / "train/dog/b.png"
    length = path.stat().st_size
    write_image(path, height=8, width=2)
    with path.open("ab") as file:
        file.write(b"\0" * (length - path.stat().st_size))
    assert path.stat().st_size == length
    later(path)


def rename_class(root: Path) -> None:
    (root / "train/dog").rename(root / "train/wolf")


def become_shards(root: Path) -> None:
    shutil.rmtree(root / "train")
    (root / "train").mkdir()
    (root / "train/0.tar").touch()


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (add, "train/dog holds 3 images, it held 2 (new: c.png; gone: nothing)"),
    (remove, "train/dog holds 1 images, it held 2 (new: nothing; gone: b.png)"),
    (rename, "train/dog holds 2 images, it held 2 (new: c.png; gone: b.png)"),
    (lengthen, "train/dog/b.png has 77 bytes, it had 76"),
    (overwrite, "train/dog/b.png was changed 20"),
    (rename_class, "train holds 3 class folders, it held 3 (new: wolf; gone: dog)"),
    (become_shards, "train holds shards, it held class folders"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_an_outdated_index_is_refused_until_it_is_rebuilt(
    root: Path, change: Callable[[Path], None], reason: str
) -> None:
    load_or_read(root, "train")
    length = (root / "train/dog/b.png").stat().st_size
    change(root)
    with pytest.raises(DataError) as caught:
        load_or_read(root, "train")
    assert reason.replace("77", str(length + 1)).replace("76", str(length)) in str(caught.value)
    assert f"largebatch data index {root}" in str(caught.value)
    if change is not become_shards:
        make(root, "train")
        assert fields(load_or_read(root, "train")) == fields(read_folder(root, "train"))


def test_other_files_may_be_added_and_removed(root: Path) -> None:
    first = fields(load_or_read(root, "train"))
    (root / "train/dog/notes.txt").touch()
    later(root / "train/dog")
    assert fields(load_or_read(root, "train")) == first


def test_a_repaired_image_is_detected(root: Path) -> None:
    (root / "train/dog/c.png").touch()
    make(root, "train", drop_bad=True)
    load_or_read(root, "train")
    write_image(root / "train/dog/c.png")
    with pytest.raises(DataError, match=r"train/dog/c.png has \d+ bytes, it had 0"):
        load_or_read(root, "train")


def test_a_run_compares_some_of_many_files_and_the_command_all(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    make(root, "train")
    later(root / "train/dog/b.png")  # in place: its folder does not show it
    (content,) = find_stored(root, "train")
    assert module.difference(content, root, every_file=False) is None
    assert "b.png" in (module.difference(content, root, every_file=True) or "")
    row = list(index_of(content, root).paths).index("train/dog/b.png")
    then = index_of(content, root).locate(row)
    now = then.path.stat()
    assert (then.num_bytes, then.mtime) == (now.st_size, now.st_mtime_ns - 10**9)  # when it is read
    later(root / "train/dog")
    assert "b.png" in (module.difference(content, root, every_file=False) or "")
    later(root / "train/dog/a.JPEG")
    assert "a.JPEG" in (module.difference(content, root, every_file=False) or "")


def test_a_moved_folder_keeps_its_index_and_its_digest(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = load_or_read(root, "train").digest
    moved = tmp_path_factory.mktemp("elsewhere") / "data"
    shutil.move(root, moved)
    monkeypatch.setattr(module, "measure_part", None)
    index = load_or_read(moved, "train")
    assert index.root == moved
    assert index.digest == digest


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"lbarray1", id="cut off"),
        pytest.param(b"something else" * 100, id="something else"),
        pytest.param(None, id="its end is missing"),
    ],
)
def test_an_unreadable_stored_index_is_replaced(root: Path, content: bytes | None) -> None:
    place = root / ".largebatch-train.index"
    make(root, "train")
    place.write_bytes(place.read_bytes()[:-64] if content is None else content)
    assert not list(find_stored(root, "train"))
    expected = fields(read_folder(root, "train"))
    assert fields(load_or_read(root, "train")) == expected
    assert fields(index_of(load_file(place), root)) == expected


def test_a_stored_index_of_another_format_is_replaced(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = root / ".largebatch-train.index"
    for number in (module.FORMAT + 1, module.FORMAT):
        monkeypatch.setattr(module, "FORMAT", number)
        load_or_read(root, "train")
        assert open_mapped(place)[0]["format"] == number


def test_one_wrong_bit_in_a_stored_index_is_detected_and_repaired(root: Path) -> None:
    place = root / ".largebatch-train.index"
    expected = fields(load_or_read(root, "train"))
    whole = place.read_bytes()
    for position in range(len(whole)):
        spoilt = bytearray(whole)
        spoilt[position] ^= 1 << position % 8
        place.write_bytes(spoilt)
        assert not list(find_stored(root, "train")), f"byte {position}"
    assert fields(load_or_read(root, "train")) == expected
    assert place.read_bytes() == whole

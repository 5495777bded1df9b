import os
from pathlib import Path

import pytest
from class_folders import fields, write_folder, write_image

from largebatch.data.index import index as module
from largebatch.data.index.index import find_stored, load_or_read, make, read_folder, refresh
from largebatch.errors import DataError
from largebatch.storage import write_whole


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folder(tmp_path)


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def read_only(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make writes into `root` fail, also for a user with all permissions."""

    def refuse(path: Path, content: bytes) -> None:
        if path.parent == root:
            raise OSError(30, "Read-only file system", str(path))
        write_whole(path, content)

    monkeypatch.setattr(module, "write_whole", refuse)


@pytest.mark.usefixtures("read_only")
def test_the_index_of_a_read_only_folder_is_stored_in_the_cache(root: Path, cache: Path) -> None:
    content = make(root, "train")
    assert content.file is not None
    assert content.file.is_relative_to(cache)
    (found,) = find_stored(root, "train")
    assert found.file == content.file
    assert [path.name for path in root.iterdir()] == ["train"]


def test_an_old_index_that_cannot_be_replaced_does_not_hide_the_new_one(
    root: Path, cache: Path, request: pytest.FixtureRequest
) -> None:
    old = make(root, "train").file
    request.getfixturevalue("read_only")
    write_image(root / "train/dog/c.png")
    with pytest.raises(DataError, match=f"c.png; gone: nothing.*the index is {old}"):
        load_or_read(root, "train")
    new = make(root, "train")
    assert [content.file for content in find_stored(root, "train")] == [old, new.file]
    assert fields(load_or_read(root, "train")) == fields(read_folder(root, "train"))
    assert refresh(root, "train", drop_bad=False, progress=unwanted).file == new.file
    (root / "train/dog/c.png").unlink()
    with (root / "train/dog/b.png").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(DataError, match=rf"b.png has .*the index is {old}"):  # of the best place
        load_or_read(root, "train")


def unwanted(done: int, total: int) -> None:
    raise AssertionError(f"{done} of {total} images were read again")


def test_an_index_that_cannot_be_stored_is_still_used(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    content = make(root, "train")
    assert content.file is None
    assert len(content.arrays["labels"]) == 4
    assert [path.name for path in root.iterdir()] == ["train"]

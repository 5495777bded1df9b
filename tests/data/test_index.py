"""The index: built once, whole or absent, compared with its folder, shared by all workers."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from class_folders import fields, write_folder, write_image
from on_forked_workers import on_forked_workers

from largebatch import storage
from largebatch.cli.main import DONE, USER, main
from largebatch.data.index import index as module
from largebatch.data.index.folder import MISPLACED
from largebatch.data.index.index import (
    BadImagesError,
    check_classes,
    find_stored,
    index_of,
    load_or_read,
    make,
    read_folder,
    share_index,
    unpack,
)
from largebatch.distributed.serial import Serial
from largebatch.errors import DataError

PLACE = ".largebatch-train.index"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data")


def test_classes_and_images_are_in_bytewise_order(root: Path) -> None:
    index = read_folder(root, "train")
    assert index.root == root
    assert index.classes == ("Zebra", "cat", "dog")
    names = ["train/Zebra/z.jpg", "train/cat/x.jpg", "train/dog/a.JPEG", "train/dog/b.png"]
    assert list(index.paths) == names
    assert index.labels.tolist() == [0, 1, 2, 2]
    assert index.heights.tolist() == [4, 4, 9, 5]
    assert index.widths.tolist() == [6, 6, 3, 7]
    assert {a.dtype for a in (index.labels, index.heights, index.widths)} == {np.dtype(np.int64)}
    for sample, name in enumerate(names):
        stat = (root / name).stat()
        assert index.locate(sample) == (str(root / name), 0, stat.st_size, stat.st_mtime_ns)


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
        "train/cat/pipe.png": "the file is empty",
        "train/cat/text.jpg": "not a JPEG",
        "train/dog/cut.jpg": "it is truncated",
    }


def test_bad_images_are_all_named_and_left_out_only_on_request(root: Path) -> None:
    good = fields(read_folder(root, "train"))
    reasons = spoil(root)
    with pytest.raises(BadImagesError, match="6 of 10") as caught:
        make(root, "train")
    assert all(f"{path}: {reason}" in str(caught.value) for path, reason in reasons.items())
    assert not list(find_stored(root, "train"))
    make(root, "train", drop_bad=True)
    index = load_or_read(root, "train")
    assert fields(index) == {**good, "bad": index.bad, "digest": index.digest}
    assert index.digest != good["digest"]
    assert [bad.name for bad in index.bad] == list(reasons)


def test_an_image_that_a_failing_disk_does_not_read_is_not_bad(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = root / "train/dog/b.png", os.pread
    identity = path.stat().st_ino

    def failing(file: int, length: int, offset: int) -> bytes:
        if os.fstat(file).st_ino == identity:
            raise OSError(errno.EIO, "Input/output error")
        return real(file, length, offset)

    monkeypatch.setattr(os, "pread", failing)
    monkeypatch.setattr(storage, "PAUSES", (0.01, 0.02, 0.03))
    with pytest.raises(DataError, match=str(path)):
        make(root, "train", drop_bad=True)
    assert not list(find_stored(root, "train"))


@pytest.mark.parametrize(
    ("folders", "part"),
    [
        pytest.param([], "no such folder", id="nothing in it"),
        pytest.param(["cat", "dog"], "--val-fraction", id="class folders alone"),
        pytest.param(["val"], "<class>", id="no classes"),
        pytest.param(["val/cat", "val/dog"], "2 of 2", id="empty classes"),
    ],
)
def test_a_folder_of_another_shape_is_refused(
    tmp_path: Path, folders: list[str], part: str
) -> None:
    for folder in folders:
        (tmp_path / "data" / folder).mkdir(parents=True)
    with pytest.raises(DataError, match=part):
        read_folder(tmp_path / "data", "val")


def test_every_class_needs_an_image_and_both_splits_the_same_classes(root: Path) -> None:
    for name in ("cat", "Zebra", "yak"):
        write_image(root / f"val/{name}/x.png")
    train, val = read_folder(root, "train"), read_folder(root, "val")
    check_classes(root, train.classes, train.classes)
    with pytest.raises(DataError, match="dog.*yak"):
        check_classes(root, train.classes, val.classes)
    (root / "train/cat/x.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="1 of 3.*cat"):
        make(root, "train", drop_bad=True)


def test_ignored_files_are_counted_and_those_of_the_system_are_skipped(root: Path) -> None:
    before = fields(index_of(make(root, "train"), root))
    for number in range(4):
        (root / f"train/cat/{number}.gif").touch()
    (root / "train/dog/scan.BMP").touch()
    (root / "train/dog/README").touch()
    write_image(root / "train/loose.png")
    write_image(root / "train/dog/more/deep/x.png")
    for name in ("@eaDir", ".Trash-1000"):  # thumbnails and deleted files
        for place in (name, f"{name}/cat", f"cat/{name}", f"dog/more/{name}/deep"):
            write_image(root / f"train/{place}/copy.jpg")
    content = make(root, "train")
    assert fields(index_of(content, root))["paths"] == before["paths"]
    kinds = {".gif": 4, MISPLACED: 2, ".bmp": 1, "without a suffix": 1}
    assert content.header["ignored"] == kinds


def test_an_index_of_files_that_were_ignored_and_are_read_now_is_not_used(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As WebP by an earlier version, and HEIC before pillow-heif was installed."""
    write_image(root / "train/cat/new.webp")
    with monkeypatch.context() as earlier:
        earlier.setattr("largebatch.data.index.folder.EXTENSIONS", (".jpeg", ".jpg", ".png"))
        make(root, "train")
    with pytest.raises(DataError, match=r"\.webp"):
        load_or_read(root, "train")
    make(root, "train")
    assert "train/cat/new.webp" in list(load_or_read(root, "train").paths)


def test_the_command_builds_describes_and_refuses_an_index(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(root, "val")
    (root / "val/cat/text.jpg").write_text("not an image")
    words = ["data", "index", str(root)]
    assert main(words) == USER
    assert "val/cat/text.jpg" in capsys.readouterr().out
    assert main([*words, "--drop-bad"]) == DONE
    out = capsys.readouterr().out
    assert "val/cat/text.jpg" in out
    assert "4 training and 4 validation images, 1 bad" in out
    (root / "val/cat/text.jpg").unlink()
    write_image(root / "train/cat/y.jpg")
    (root / "train/cat/z.bmp").touch()
    assert main(words) == DONE
    out = capsys.readouterr().out
    assert "3 classes, 5 training" in out
    assert "train: ignored files: 1 .bmp" in out
    assert f"find {root}/train -iname '*.bmp' -exec convert {{}} {{}}.jpg" in out


def test_an_unchanged_folder_is_read_once_also_under_another_path(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "train/cat/x.jpg").rename(
        os.fsdecode(os.fsencode(root) + b"/train/cat/\xff \xc3\xa9.jpg")
    )
    expected = fields(read_folder(root, "train"))
    content = make(root, "train")
    assert content.file == root / PLACE
    monkeypatch.setattr(module, "measure", None)
    assert fields(load_or_read(root, "train")) == expected
    (root / "train/dog/notes.txt").touch()  # other files may be added
    later(root / "train/dog")
    moved = tmp_path / "moved"
    shutil.move(root, moved)
    assert fields(load_or_read(moved, "train")) == {**expected, "root": moved}


def later(path: Path) -> None:
    """Change a file's modification time, for any resolution of the file system."""
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


def add(root: Path) -> None:
    write_image(root / "train/dog/c.png")


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
    later(path)


def rename_class(root: Path) -> None:
    (root / "train/dog").rename(root / "train/wolf")


def become_shards(root: Path) -> None:
    shutil.rmtree(root / "train")
    (root / "train").mkdir()
    (root / "train/0.tar").touch()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (add, "train/dog/c.png is new"),
        (rename, "train/dog/b.png is missing"),
        (lengthen, "train/dog/b.png was changed"),
        (overwrite, "train/dog/b.png was changed"),
        (rename_class, "train/dog is missing"),
        (become_shards, "train/0.tar is new"),
    ],
)
def test_an_outdated_index_is_refused_until_it_is_rebuilt(
    root: Path, change: Callable[[Path], None], reason: str
) -> None:
    load_or_read(root, "train")
    change(root)
    with pytest.raises(DataError, match=reason):
        load_or_read(root, "train")
    if change is not become_shards:
        make(root, "train")
        assert fields(load_or_read(root, "train")) == fields(read_folder(root, "train"))


def test_one_wrong_bit_or_a_lost_end_is_detected_and_the_index_is_replaced(root: Path) -> None:
    make(root, "train")
    whole = (root / PLACE).read_bytes()
    for position in range(0, len(whole), 17):
        spoilt = bytearray(whole)
        spoilt[position] ^= 1 << position % 8
        for content in (bytes(spoilt), whole[:position]):
            with pytest.raises(ValueError, match="not an index"):
                unpack(content)
    (root / PLACE).write_bytes(whole[:-64])
    assert not list(find_stored(root, "train"))
    assert fields(load_or_read(root, "train")) == fields(read_folder(root, "train"))
    assert (root / PLACE).read_bytes() == whole


def _share_in_a_process(root: Path) -> None:
    from largebatch.distributed.torch_distributed import TorchDistributed

    backend = TorchDistributed()
    content = make(root, "train") if backend.rank == 0 else None
    index = share_index(root if backend.rank == 0 else None, content, backend)
    backend.close()
    assert fields(index) == fields(read_folder(root, "train"))


def test_two_processes_share_an_index_over_gloo(root: Path, own_cache: None) -> None:
    on_forked_workers(_share_in_a_process, root, workers=2)


def test_a_copy_of_the_folder_with_other_times_is_read_by_its_lengths(root: Path) -> None:
    content = make(root, "train")
    shared = share_index(root, content, Serial(torch.device("cpu")))
    assert fields(shared) == fields(load_or_read(root, "train"))
    assert shared.mtimes is not None
    for path in root.glob("train/*/*"):
        later(path)
    assert share_index(root, content, Serial(torch.device("cpu"))).mtimes is None

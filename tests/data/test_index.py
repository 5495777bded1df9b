"""The index: built once, whole or absent, compared with its folder, shared by all workers."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from class_folders import fields, write_folder, write_image
from on_forked_workers import on_forked_workers
from torch import Tensor

from largebatch import storage
from largebatch.cli.main import DONE, USER, main
from largebatch.data.index import index as module
from largebatch.data.index.index import (
    BadImagesError,
    Content,
    Index,
    check_same_classes,
    find_stored,
    index_of,
    load_file,
    load_or_read,
    make,
    open_mapped,
    read_folder,
    share_index,
)
from largebatch.distributed.serial import Serial
from largebatch.errors import DataError
from largebatch.storage import write_whole

PLACE = ".largebatch-train.index"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_classes_and_images_are_in_bytewise_order(root: Path) -> None:
    index = read_folder(root, "train")
    assert index.root == root
    assert index.classes == ("Zebra", "cat", "dog")
    names = ["train/Zebra/z.webp", "train/cat/x.jpg", "train/dog/a.JPEG", "train/dog/b.png"]
    assert list(index.paths) == names
    assert index.paths[-1] == names[-1]
    assert index.labels.tolist() == [0, 1, 2, 2]
    assert index.heights.tolist() == [4, 4, 9, 5]
    assert index.widths.tolist() == [6, 6, 3, 7]
    assert {a.dtype for a in (index.labels, index.heights, index.widths)} == {np.dtype(np.int64)}
    for sample, name in enumerate(names):
        stat = (root / name).stat()
        assert index.locate(sample) == (root / name, 0, stat.st_size, stat.st_mtime_ns)


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
        "train/cat/pipe.png": "it is not a file",
        "train/cat/text.jpg": "not a readable image",
        "train/dog/cut.jpg": "it is truncated",
    }


def test_bad_images_are_all_named_and_left_out_only_on_request(root: Path) -> None:
    good = fields(read_folder(root, "train"))
    reasons = spoil(root)
    with pytest.raises(BadImagesError, match="6 of 10 images") as caught:
        make(root, "train")
    assert all(f"{path}: {reason}" in str(caught.value) for path, reason in reasons.items())
    assert not list(find_stored(root, "train"))
    make(root, "train", drop_bad=True)
    index = load_or_read(root, "train")
    assert fields(index) == {**good, "bad": index.bad, "digest": index.digest}
    assert index.digest != good["digest"]
    assert [bad.path for bad in index.bad] == list(reasons)


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
    with pytest.raises(DataError, match=rf"{path}: cannot be read"):
        make(root, "train", drop_bad=True)
    assert not list(find_stored(root, "train"))


@pytest.mark.parametrize(
    ("folders", "split", "part"),
    [
        pytest.param(None, "train", "there is no such folder", id="no folder"),
        pytest.param([], "val", "/val: there is no such folder", id="nothing in it"),
        pytest.param(["cat", "dog"], "train", "--val-fraction", id="class folders alone"),
        pytest.param(["val"], "val", "no class folders and no shards", id="no classes"),
        pytest.param(["val/cat", "val/dog"], "val", "2 of 2 class folders", id="empty classes"),
    ],
)
def test_a_folder_of_another_shape_is_refused(
    tmp_path: Path, folders: list[str] | None, split: str, part: str
) -> None:
    for folder in folders or []:
        (tmp_path / "data" / folder).mkdir(parents=True)
    if folders == []:
        (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match=part):
        read_folder(tmp_path / "data", split)


def test_every_class_needs_an_image_and_both_splits_the_same_classes(root: Path) -> None:
    for name in ("cat", "Zebra", "yak"):
        write_image(root / f"val/{name}/x.png")
    train, val = read_folder(root, "train"), read_folder(root, "val")
    check_same_classes(root, train.classes, train.classes)
    with pytest.raises(DataError, match="only in train: dog; only in val: yak"):
        check_same_classes(root, train.classes, val.classes)
    (root / "train/cat/x.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="1 of 3 classes .*: cat"):
        make(root, "train", drop_bad=True)


def test_the_command_builds_describes_and_refuses_an_index(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(root, "val")
    (root / "val/cat/text.jpg").write_text("not an image")
    words = ["data", "index", str(root)]
    assert main(words) == USER
    assert "val/cat/text.jpg" in capsys.readouterr().out
    for again in ([*words, "--drop-bad"], words):
        assert main(again) == DONE
        out = capsys.readouterr().out
        assert "val/cat/text.jpg" in out
        assert "4 training and 4 validation images, 1 bad" in out
    write_image(root / "train/cat/y.jpg")
    assert main(words) == DONE
    assert "3 classes, 5 training" in capsys.readouterr().out


def test_an_unchanged_folder_is_read_once_also_under_another_path(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "train/cat/x.jpg").rename(
        os.fsdecode(os.fsencode(root) + b"/train/cat/\xff \xc3\xa9.jpg")
    )
    expected = fields(read_folder(root, "train"))
    content = make(root, "train")
    assert content.file == root / PLACE
    monkeypatch.setattr(module, "measure_part", None)
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
        (add, r"train/dog holds 3 images, it held 2 \(new: c.png; gone: nothing\)"),
        (rename, r"train/dog holds 2 images, it held 2 \(new: c.png; gone: b.png\)"),
        (lengthen, r"train/dog/b.png has \d+ bytes"),
        (overwrite, r"train/dog/b.png was changed 20"),
        (rename_class, r"train holds 3 class folders, it held 3 \(new: wolf; gone: dog\)"),
        (become_shards, "train holds shards"),
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


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"something else" * 100, id="something else"),
        pytest.param(None, id="its end is missing"),
    ],
)
def test_an_unreadable_stored_index_is_replaced(root: Path, content: bytes | None) -> None:
    make(root, "train")
    (root / PLACE).write_bytes((root / PLACE).read_bytes()[:-64] if content is None else content)
    assert not list(find_stored(root, "train"))
    expected = fields(read_folder(root, "train"))
    assert fields(load_or_read(root, "train")) == expected
    assert fields(index_of(load_file(root / PLACE), root)) == expected


def test_one_wrong_bit_or_a_lost_end_is_detected(root: Path) -> None:
    make(root, "train")
    whole = (root / PLACE).read_bytes()
    for position in range(0, len(whole), 17):
        spoilt = bytearray(whole)
        spoilt[position] ^= 1 << position % 8
        for content in (spoilt, whole[:position]):
            (root / PLACE).write_bytes(content)
            with pytest.raises(ValueError, match="not an index"):
                open_mapped(root / PLACE)
    assert len(load_or_read(root, "train")) == 4
    assert (root / PLACE).read_bytes() == whole


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


class Together:
    """Workers that are threads of one process; equal `local_ranks` are on different machines."""

    def __init__(self, local_ranks: list[int]) -> None:
        self.local_ranks = local_ranks
        self.meet = threading.Barrier(len(local_ranks), timeout=600)
        self.sent: list[Tensor] = [torch.zeros(0)] * len(local_ranks)


class Worker(Serial):
    """The operations of a backend that sharing needs."""

    def __init__(self, group: Together, rank: int) -> None:
        super().__init__(torch.device("cpu"))
        self.group = group
        self.rank = rank
        self.local_rank = group.local_ranks[rank]

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self._exchange(tensor)[0])

    def all_reduce(self, tensor: Tensor) -> Any:  # noqa: ANN401 -- Serial's is private
        tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))
        return Serial.all_reduce(self, tensor)

    def barrier(self) -> None:
        self.group.meet.wait()

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self.group.sent[self.rank] = tensor.clone()
        self.group.meet.wait()
        sent = list(self.group.sent)
        self.group.meet.wait()
        return sent


def share(root: Path, content: Content, local_ranks: list[int]) -> list[Index]:
    group = Together(local_ranks)

    def call(rank: int) -> Index:
        first = rank == 0
        return share_index(root if first else None, content if first else None, Worker(group, rank))

    with ThreadPoolExecutor(len(local_ranks)) as pool:
        return list(pool.map(call, range(len(local_ranks))))


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


def test_a_worker_that_finds_the_file_maps_it(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = make(root, "train")
    monkeypatch.setattr(module, "pack", None)  # nothing is sent
    indexes = share(root, content, [0, 1, 0])
    assert [fields(index) for index in indexes] == [fields(load_or_read(root, "train"))] * 3
    assert all(index.mtimes is not None for index in indexes)
    assert mapped_files().count(PLACE) >= 3
    assert not cache.exists()


def test_a_machine_without_the_file_gets_the_bytes_once(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers 1 and 2 share a machine without worker 0's file."""
    content, written = make(root, "train"), []

    def count(path: Path, packed: bytes) -> None:
        written.append(path)
        write_whole(path, packed)

    monkeypatch.setattr(module, "write_whole", count)
    indexes = share(root, content._replace(file=root / "elsewhere"), [0, 0, 1])
    assert [fields(index) for index in indexes] == [fields(load_or_read(root, "train"))] * 3
    (place,) = (cache / "largebatch/index").iterdir()
    assert written == [place] * 2  # by worker 0, whose machine has others in general, and by 1
    assert mapped_files().count(str(place)) >= 2
    assert [index.mtimes is None for index in indexes] == [False, True, True]


def _share_in_a_process(root: Path) -> None:
    from largebatch.distributed.torch_distributed import TorchDistributed

    backend = TorchDistributed()
    content = make(root, "train")._replace(file=None) if backend.rank == 0 else None
    index = share_index(root if backend.rank == 0 else None, content, backend)
    backend.close()
    assert fields(index) == fields(read_folder(root, "train"))


@pytest.mark.long
def test_two_processes_share_an_index_over_gloo(root: Path, cache: Path) -> None:
    on_forked_workers(_share_in_a_process, root, workers=2)

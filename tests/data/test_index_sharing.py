import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from class_folders import fields, write_folder
from on_forked_workers import on_forked_workers
from torch import Tensor

from largebatch.data.index import index as module
from largebatch.data.index.index import Content, Index, load_or_read, make, read_folder, share_index
from largebatch.distributed.serial import Serial
from largebatch.storage import write_whole


class Together:
    """Workers that are threads of one process; `local_ranks` says which share a machine."""

    def __init__(self, local_ranks: list[int]) -> None:
        self.local_ranks = local_ranks
        self.meet = threading.Barrier(len(local_ranks), timeout=600)
        self.sent: list[Tensor] = [torch.zeros(0)] * len(local_ranks)

    def run(self, call: Callable[[Any], Index]) -> list[Index]:
        number = len(self.local_ranks)
        with ThreadPoolExecutor(number) as pool:
            return list(pool.map(call, [Worker(self, rank) for rank in range(number)]))


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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def share(root: Path, content: Content, local_ranks: list[int]) -> list[Index]:
    def call(worker: Worker) -> Index:
        if worker.rank == 0:
            return share_index(root, content, worker)
        return share_index(None, None, worker)

    return Together(local_ranks).run(call)


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
    assert mapped_files().count(".largebatch-train.index") >= 3
    assert not cache.exists()


def test_files_of_a_copy_of_the_folder_may_have_other_times(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 finds a different file than worker 0, with the same content."""
    number = iter(range(9))
    monkeypatch.setattr(module, "_identity", lambda _: [next(number), 0])
    indexes = share(root, make(root, "train"), [0, 0])
    assert [index.mtimes is None for index in indexes] == [False, True]


def test_a_machine_without_the_file_gets_the_bytes_once(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers 1 and 2 share a machine without worker 0's file."""
    content = make(root, "train")
    written = []

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


def test_a_worker_that_finds_a_damaged_file_gets_the_bytes(root: Path, cache: Path) -> None:
    content = make(root, "train")
    assert content.file is not None
    damaged = bytearray(content.file.read_bytes())
    damaged[-8] ^= 1
    write_whole(content.file, bytes(damaged))  # worker 0 has the whole one mapped
    indexes = share(root, content, [0, 1])
    assert fields(indexes[1]) == fields(read_folder(root, "train"))


def test_without_a_writable_place_the_bytes_are_used(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    content = make(root, "train")._replace(file=None)
    indexes = share(root, content, [0, 0, 1])
    assert [fields(index) for index in indexes] == [fields(load_or_read(root, "train"))] * 3


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

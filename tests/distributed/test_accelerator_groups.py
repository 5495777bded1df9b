"""What NCCL asks of the groups, on one whose collectives complete late and on workers of a host."""

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from unittest import mock

import accelerator
import late_group
import pytest
import torch
import torch.distributed as dist
from late_group import BEGUN, LateGroup
from on_forked_workers import on_forked_workers
from one_of_many import CountingStore, Waits
from short_runs import CLEAN, STATISTICS, a_recipe
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch's stubs

from largebatch import run
from largebatch.distributed import torch_distributed
from largebatch.distributed.backend import pick_device
from largebatch.distributed.torch_distributed import TorchDistributed, require_one_type
from largebatch.errors import BackendError, MismatchError
from largebatch.lab.protocols.exchange import open_links

splits_groups = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14),
    reason="torch 2.14 splits no group of a device that is registered in Python",
)


def on_late_workers(work: Callable[[TorchDistributed], object], *, workers: int) -> object:
    """Run work on workers with simulated accelerators whose collectives complete late."""
    return on_forked_workers(connected, work, workers=workers)


def connected(work: Callable[[TorchDistributed], object]) -> object:
    device = accelerator.simulate()
    accelerator.MODULE.uuid = os.environ["RANK"]
    late_group.register()
    with mock.patch.object(torch_distributed, "pick_device", return_value=device):
        backend = TorchDistributed(timeout=30)
    try:
        return work(backend)
    finally:
        backend.close()


def world() -> LateGroup:
    assert isinstance(dist.group.WORLD, LateGroup)
    return dist.group.WORLD


def meet(backend: TorchDistributed) -> dict[str, object]:
    """Return True if the late worker 1 had arrived when the others continued."""
    store = _own_store()
    found: dict[str, object] = {"library": dist.get_backend(), "bound": str(world().connected)}
    for name in ("sum", "barrier"):
        if backend.rank == 1:
            if name == "sum":
                store.wait(["sum gone on"], timedelta(seconds=30))
            store.set(f"{name} came", "")
        if name == "sum":
            backend.all_reduce(torch.zeros(1, device=backend.device)).wait()
        else:
            backend.barrier()
        found[name] = store.check([f"{name} came"])
        if backend.rank == 0:
            store.set(f"{name} gone on", "")
    return found


def _own_store() -> PrefixStore:
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore("test", TCPStore(*address, is_master=False))


def test_a_barrier_holds_the_host_and_a_sum_does_not() -> None:
    assert on_late_workers(meet, workers=2) == {
        "library": "late",
        "bound": "sim:0",
        "sum": False,
        "barrier": True,
    }


def gather(backend: TorchDistributed) -> list[object]:
    tensors = [
        torch.full((), float(backend.rank)),
        torch.arange(6).reshape(2, 3).t() + 10 * backend.rank,
        torch.tensor([backend.rank == 1]),
    ]
    BEGUN.clear()
    found: list[object] = [backend.all_gather(each.to(backend.device)).tolist() for each in tensors]
    return [*found, *BEGUN]


def test_tensors_are_gathered_into_one() -> None:
    assert on_late_workers(gather, workers=2) == [
        [0.0, 1.0],
        [[[0, 3], [1, 4], [2, 5]], [[10, 13], [11, 14], [12, 15]]],
        [[False], [True]],
        *(("world", "all_gather", (2, numbers)) for numbers in (1, 6, 1)),
    ]


def divide(backend: TorchDistributed) -> list[object]:
    """Sum in parts and all over, with links beside them, which no split of the world may be for."""
    new_group, split_group = mock.Mock(wraps=dist.new_group), mock.Mock(wraps=dist.split_group)
    with mock.patch.multiple(dist, new_group=new_group, split_group=split_group):
        part = backend.split([[0, 2], [1, 3]])
        made = [split_group.call_count, new_group.call_count]
        links = open_links(backend, [(0, 1), (2, 3)])
    peer = backend.rank ^ 1
    (link,) = links.values()
    received = torch.zeros(1)
    if backend.rank < peer:
        link.send(torch.tensor([float(backend.rank)], device=backend.device))
    else:
        link.receive(received)
        assert received.item() == peer
    one = torch.tensor([float(backend.rank)], device=backend.device)
    part.all_reduce(one).wait()
    assert world().bound_device_id == backend.device
    return [*made, part.rank, part.world_size, backend.all_gather(one).flatten().tolist()]


@splits_groups
def test_groups_are_split_from_the_default_group_and_links_are_not() -> None:
    assert on_late_workers(divide, workers=4) == [1, 0, 0, 2, [2.0, 4.0, 2.0, 4.0]]


def whole_run(backend: TorchDistributed) -> list[object]:
    """Train, evaluate, compare and polish, with BatchNorm spans over two workers each."""
    changes = (
        "batch={global_batch: 96, bn_span: 48}",
        "duration={steps: 3}",
        "schedule.warmup=null",
    )
    recipe = a_recipe(CLEAN, STATISTICS, changes=(*changes, "execution.compare_every=2"))
    BEGUN.clear()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("largebatch.runs.build.connect", return_value=backend),
    ):
        run(recipe, out=Path(folder) / "run")
    kinds = Counter(name for name, *_ in BEGUN)
    store = _own_store()
    store.set(f"order {backend.rank}", repr(BEGUN))
    orders = {store.get(f"order {rank}") for rank in range(4)}
    store.set(f"compared {backend.rank}", "")
    store.wait([f"compared {rank}" for rank in range(4)])
    return [len(orders), kinds["world"] > 10, kinds["part"] > 10]


@splits_groups
def test_all_workers_start_operations_in_the_same_order() -> None:
    """Two NCCL communicators used in different orders deadlock."""
    assert on_late_workers(whole_run, workers=4) == [1, True, True]


def see(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate `num` GPUs."""
    monkeypatch.setattr("largebatch.accelerator.count", lambda: num)
    monkeypatch.setattr("largebatch.accelerator.choose", lambda n: torch.device("cuda", n))


@pytest.mark.parametrize(
    ("num", "local_rank", "expected"), [(1, 3, 0), (4, 3, 3), (8, 3, 3)], ids=str
)
def test_a_worker_uses_the_only_gpu_it_sees(
    num: int, local_rank: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(num, monkeypatch)
    assert pick_device(local_rank, 4, compared=True) == torch.device("cuda", expected)


@pytest.mark.parametrize(("num", "compared"), [(2, True), (1, False)])
def test_fewer_gpus_than_workers_are_refused(
    num: int, compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(num, monkeypatch)
    with pytest.raises(BackendError, match=f"^4 workers on a machine with {num} GPU; start as "):
        pick_device(1, 4, compared=compared)


@pytest.mark.parametrize("workers", [4, 2048])
def test_workers_that_share_a_gpu_are_refused_by_name_on_every_worker(workers: int) -> None:
    """A few requests each; NCCL would fail with "Duplicate GPU detected"."""
    store, most = CountingStore(informed=0), 0
    for rank in range(workers):
        before, unit = store.keys, str(rank - (rank == 2))
        last = rank == workers - 1
        with pytest.raises(MismatchError) if last else suppress(Waits):
            require_one_type(store, "cuda", rank=rank, world_size=workers, unit=unit)
        most = max(most, store.keys - before)
    assert (
        store.content["difference"]
        .decode()
        .startswith(
            "workers 1 and 2 share GPU 1; start as many workers as GPUs, or set CUDA_VISIBLE"
        )
    )
    assert most <= 10


def test_workers_with_separate_gpus_are_accepted() -> None:
    store = CountingStore()
    for rank in range(4):
        with suppress(Waits):
            require_one_type(store, "cuda", rank=rank, world_size=4, unit=str(rank))
    assert store.content["difference"] == b""

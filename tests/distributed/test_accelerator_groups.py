"""What NCCL asks of the groups, on one whose collectives complete late and on workers of a host."""

import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar
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

Result = TypeVar("Result")

splits_groups = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14),
    reason="torch 2.14 splits no group of a device that is registered in Python",
)


def on_late_workers(work: Callable[[TorchDistributed], Result], *, workers: int) -> Result:
    """Run work on workers with simulated accelerators whose collectives complete late."""
    result: Result = on_forked_workers(connected, work, workers=workers)
    return result


def connected(work: Callable[[TorchDistributed], Result]) -> Result:
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


def store_of_the_test() -> PrefixStore:
    """Connect to a store in which workers exchange what the test needs, beside the group's."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return PrefixStore("test", TCPStore(host, port, is_master=False))


def sum_while_the_other_is_late(backend: TorchDistributed) -> None:
    """Sum on worker 1 only after worker 0 has called the same sum and continued."""
    store = store_of_the_test()
    if backend.rank == 1:
        store.wait(["worker 0 continued"], timedelta(seconds=30))
    backend.all_reduce(torch.zeros(1, device=backend.device)).wait()
    store.set(f"worker {backend.rank} continued", "")


def test_a_sum_does_not_hold_the_host() -> None:
    """It raises an error on worker 1 if worker 0 waits for it."""
    on_late_workers(sum_while_the_other_is_late, workers=2)


def leave_a_barrier(backend: TorchDistributed) -> bool:
    """Return True if worker 1, which is late, had come before this worker left the barrier."""
    store = store_of_the_test()
    if backend.rank == 1:
        time.sleep(0.2)
        store.set("worker 1 came", "")
    backend.barrier()
    return store.check(["worker 1 came"])


def test_a_barrier_holds_the_host() -> None:
    assert on_late_workers(leave_a_barrier, workers=2)


def bound_device(backend: TorchDistributed) -> tuple[str, str, str]:
    """Return the library of the group of all, the device it is connected to, and the worker's."""
    return dist.get_backend(), str(world().connected), str(backend.device)


def test_the_group_of_a_device_is_connected_to_it_at_once() -> None:
    """Only then can NCCL split it."""
    library, connected_to, device = on_late_workers(bound_device, workers=2)
    assert library == late_group.BACKEND
    assert connected_to == device


def gather(backend: TorchDistributed) -> tuple[list[object], list[str]]:
    """Gather tensors of several forms; return the results, and the operations of the group."""
    number = torch.full((), float(backend.rank))
    transposed = torch.arange(6).reshape(2, 3).t() + 10 * backend.rank
    flag = torch.tensor([backend.rank == 1])
    BEGUN.clear()
    gathered: list[object] = [
        backend.all_gather(tensor.to(backend.device)).tolist()
        for tensor in (number, transposed, flag)
    ]
    return gathered, [operation for _, operation, _ in BEGUN]


def test_a_tensor_of_any_form_is_gathered_by_one_operation() -> None:
    gathered, operations = on_late_workers(gather, workers=2)
    assert gathered == [
        [0.0, 1.0],
        [[[0, 3], [1, 4], [2, 5]], [[10, 13], [11, 14], [12, 15]]],
        [[False], [True]],
    ]
    assert operations == ["all_gather"] * 3


def divide(backend: TorchDistributed) -> list[float]:
    """Sum over one of two parts of the workers; return the sums of all four."""
    with (
        mock.patch.object(dist, "split_group", wraps=dist.split_group) as split_group,
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group,
    ):
        part = backend.split([[0, 2], [1, 3]])
    assert split_group.called
    assert not new_group.called
    assert world().bound_device_id == backend.device
    assert [part.rank, part.world_size] == [backend.rank // 2, 2]
    own = torch.tensor([float(backend.rank)], device=backend.device)
    part.all_reduce(own).wait()
    sums: list[float] = backend.all_gather(own).flatten().tolist()
    return sums


@splits_groups
def test_parts_are_split_from_the_group_of_all() -> None:
    """A new group would open its connections to the other hosts again."""
    assert on_late_workers(divide, workers=4) == [0 + 2, 1 + 3, 0 + 2, 1 + 3]


def send_to_the_peer(backend: TorchDistributed) -> None:
    """Send the rank from the lower to the higher worker of a pair, over a link of both."""
    with mock.patch.object(dist, "split_group", side_effect=AssertionError("a link is no part")):
        links = open_links(backend, [(0, 1), (2, 3)])
    (link,) = links.values()
    peer = backend.rank ^ 1
    if backend.rank < peer:
        link.send(torch.tensor([float(backend.rank)], device=backend.device))
        return
    received = torch.zeros(1)
    link.receive(received)
    assert received.item() == peer


def test_a_link_is_a_group_of_its_own() -> None:
    """Splitting takes a call of all workers, and the others of a protocol are busy."""
    on_late_workers(send_to_the_peer, workers=4)


class Started(NamedTuple):
    """The collectives of a whole run."""

    orders: int
    """Different orders in which the workers started them."""

    by_group: Counter[str]
    """Number that worker 0 started, by group."""


def whole_run(backend: TorchDistributed) -> Started:
    """Train, evaluate, compare and polish, with BatchNorm spans over two workers each."""
    changes = (
        "batch={global_batch: 96, bn_span: 48}",
        "duration={steps: 3}",
        "schedule.warmup=null",
        "execution.compare_every=2",
    )
    BEGUN.clear()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("largebatch.runs.build.connect", return_value=backend),
    ):
        run(a_recipe(CLEAN, STATISTICS, changes=changes), out=Path(folder) / "run")
    store = store_of_the_test()
    store.set(f"order {backend.rank}", repr(BEGUN))
    orders = {store.get(f"order {rank}") for rank in range(backend.world_size)}
    # Worker 0 serves the store, so it leaves when the others have read.
    store.set(f"worker {backend.rank} has read", "")
    store.wait([f"worker {rank} has read" for rank in range(backend.world_size)])
    return Started(len(orders), Counter(group for group, *_ in BEGUN))


@splits_groups
def test_all_workers_start_operations_in_the_same_order() -> None:
    """Two NCCL communicators used in different orders deadlock."""
    started = on_late_workers(whole_run, workers=4)
    assert started.orders == 1
    assert started.by_group["world"] > 10
    assert started.by_group["part"] > 10


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
    with pytest.raises(BackendError, match=f"4 workers.* {num} GPU"):
        pick_device(1, 4, compared=compared)


def require_own_devices(units: Sequence[str]) -> tuple[CountingStore, int, Counter[type]]:
    """Compare the devices of workers that arrive one after another.

    Return their store, the most keys that one worker requested, and how often a worker raised which
    exception: Waits unless the last one has arrived.
    """
    store = CountingStore(informed=0)
    most = 0
    raised: Counter[type] = Counter()
    for rank, unit in enumerate(units):
        before = store.keys
        try:
            require_one_type(store, "cuda", rank=rank, world_size=len(units), unit=unit)
        except (Waits, MismatchError) as error:
            raised[type(error)] += 1
        most = max(most, store.keys - before)
    return store, most, raised


@pytest.mark.parametrize("workers", [4, 2048])
def test_workers_that_share_a_gpu_are_refused_by_name_on_every_worker(workers: int) -> None:
    """NCCL would fail with "Duplicate GPU detected"."""
    units = [str(rank) for rank in range(workers)]
    units[2] = units[1]
    store, most, raised = require_own_devices(units)
    assert raised == {Waits: workers - 1, MismatchError: 1}
    # Those that wait raise it too when they read this.
    assert re.match("workers 1 and 2 .*GPU 1", store.content["difference"].decode())
    assert most <= 10  # however many workers there are


def test_workers_with_separate_gpus_are_accepted() -> None:
    store, _, raised = require_own_devices(["0", "1", "2", "3"])
    assert raised == {Waits: 3}
    assert store.content["difference"] == b""

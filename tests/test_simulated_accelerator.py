"""What the simulated accelerator of the tests counts and refuses; what its process group does."""

import copy
import io
from collections.abc import Callable
from typing import Any

import accelerator
import late_group
import pytest
import torch
import torch.distributed as dist
from accelerator import COUNTS, SimTensor
from on_forked_workers import on_forked_workers
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

ASKED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0]),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "add": lambda x: x + 1,
    "view": lambda x: x.view(3, 1),
    "foreach": lambda x: torch._foreach_add([x, x, x], 1.0),
    "numbers": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "new numbers": lambda x: x.new_tensor([1.0, 2.0]),
    "pageable": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "pinned": lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True),
    "made pinned": lambda x: torch.tensor([1.0], pin_memory=True).to(x.device, non_blocking=True),
    "pageable number": lambda x: torch.tensor(1.0).to(x.device, non_blocking=True),
    "number as an argument": lambda x: x * torch.tensor(2.0) + 1.0,
    "zero": lambda x: torch.zeros((), device=x.device),
}
NOTHING = {"launches": 0, "syncs": 0, "transfers": 0, "pageable": 0}
EXPECTED = {
    "item": {"launches": 1, "syncs": 1},
    "bool": {"launches": 1, "syncs": 1},
    "tolist": {"syncs": 1, "transfers": 1},
    "cpu": {"syncs": 1, "transfers": 1},
    "nonzero": {"launches": 1, "syncs": 1},
    "mask": {"launches": 2, "syncs": 1},
    "add": {"launches": 1},
    "view": {},
    "foreach": {"launches": 1},
    "numbers": {"transfers": 1, "pageable": 1},
    "new numbers": {"transfers": 1, "pageable": 1},
    "pageable": {"transfers": 1, "pageable": 1},
    "pinned": {"transfers": 1},
    "made pinned": {"transfers": 1},
    "pageable number": {"transfers": 1, "pageable": 1},
    "number as an argument": {"launches": 2},
    "zero": {"launches": 1},
}


def counted() -> dict[str, dict[str, int]]:
    """Return what each of ASKED costs."""
    found = {}
    for name, ask in ASKED.items():
        tensor = torch.ones(3).to(accelerator.simulate())
        COUNTS.clear()
        ask(tensor)
        found[name] = {name: number for name, number in COUNTS.totals().items() if name in NOTHING}
    return found


def test_kernel_launches_syncs_and_copies_are_counted() -> None:
    found = on_forked_workers(counted, workers=1)
    assert found == {name: {**NOTHING, **counts} for name, counts in EXPECTED.items()}


def refused() -> list[str]:
    ours, theirs = torch.ones(3).to(accelerator.simulate()), torch.ones(3)
    messages = []
    for mix in (torch.add, lambda *pair: torch.cat(pair)):
        with pytest.raises(RuntimeError) as caught:
            mix(ours, theirs)
        messages.append(str(caught.value))
    assert (ours + torch.tensor(1.0)).tolist() == [2, 2, 2]  # a number of the host is taken
    return messages


def test_tensors_of_two_devices_are_refused() -> None:
    messages = on_forked_workers(refused, workers=1)
    assert messages == [f"{name}: tensors on sim and on the CPU" for name in ("add", "cat")]


def copied() -> None:
    layer = nn.Linear(2, 2).to(accelerator.simulate())
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    for twin in (copy.deepcopy(layer).state_dict(), torch.load(file, weights_only=False)):
        for name, tensor in layer.state_dict().items():
            assert isinstance(twin[name], SimTensor)
            assert twin[name].tolist() == tensor.tolist()
            twin[name].zero_()
            assert tensor.any()


def test_its_tensors_can_be_copied_and_saved() -> None:
    on_forked_workers(copied, workers=1)


def on_late_group(work: Callable[[torch.device], object]) -> object:
    device = accelerator.simulate()
    late_group.register()
    dist.init_process_group(late_group.BACKEND)
    try:
        return work(device)
    finally:
        dist.destroy_process_group()


def sum_of(device: torch.device) -> None:
    tensor = torch.tensor([1.0, 2.0]).to(device) * (dist.get_rank() + 1)
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(RuntimeError, match="mul_.*collective"):
        tensor *= 2
    work.wait()
    assert tensor.tolist() == [3, 6]
    parts = [torch.empty(2).to(device) for _ in range(2)]
    dist.all_gather(parts, tensor + dist.get_rank())
    assert [part.tolist() for part in parts] == [[3, 6], [4, 7]]
    dist.broadcast(tensor.add_(dist.get_rank()), src=1)
    assert tensor.tolist() == [4, 7]


def test_collectives_have_their_results_and_memory_in_use_is_not_touched() -> None:
    on_forked_workers(on_late_group, sum_of, workers=2)


def holding(device: torch.device) -> None:
    """Worker 1 joins when worker 0 has gone on, and says so before it comes to the barrier."""
    tensor, store = torch.ones(1).to(device), _get_default_store()
    if dist.get_rank():
        store.wait(["went on"])
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    if not dist.get_rank():
        assert not work.is_completed()
        store.set("went on", "")
    assert tensor.item() == 2
    assert work.is_completed()
    if dist.get_rank():
        store.set("joins", "")
    dist.barrier()
    assert store.check(["joins"])


def test_waiting_orders_the_device_and_a_barrier_holds_the_host() -> None:
    on_forked_workers(on_late_group, holding, workers=2)

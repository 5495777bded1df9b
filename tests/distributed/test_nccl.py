"""Tests that need NCCL: groups of GPUs, and the state after the loss of a worker.

`make bench-gpu` runs these before it measures anything.
"""

import pytest
import torch
import torch.distributed as dist
from on_workers import on_workers

from largebatch.distributed.connection import connect

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA GPU; make bench-gpu runs these on one"
)
needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA GPUs"
)


def meet() -> None:
    backend = connect("torch")
    assert dist.get_backend() == "nccl"
    assert dist.group.WORLD is not None
    assert dist.group.WORLD.bound_device_id == backend.device
    backend.barrier()
    own = torch.full((3,), float(backend.rank), device=backend.device)
    gathered = backend.all_gather(own)
    assert gathered.tolist() == [[float(rank)] * 3 for rank in range(backend.world_size)]
    part = backend.split([[rank] for rank in range(backend.world_size)])
    part.all_reduce(own).wait()
    backend.all_reduce(own).wait()
    assert own.tolist() == [sum(range(backend.world_size))] * 3
    backend.close()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=needs_two)])
def test_workers_meet_gather_and_are_divided(workers: int) -> None:
    on_workers(meet, workers=workers)

"""What the workers of test_groups.py do; each function runs in every worker alike.

As a program it does some on whatever it is started on:  python group_work.py 'FUNCTION ...'
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import connect
from largebatch.distributed.hierarchical import Hierarchical, in_two_levels
from largebatch.distributed.reducer import Reducer
from largebatch.errors import BackendError, PeerLostError

DIVISIONS = [
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    [[1, 3], [0, 2]],
    [[0], [1, 2, 3]],
    [[0], [1], [2], [3]],
    [[0, 1, 2, 3]],
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]


def rows(worker: int, *, number: int, dtype: torch.dtype) -> Tensor:
    """Return `number` rows that only this worker has, small whole numbers."""
    return (torch.arange(number * 3).reshape(number, 3) % 5 + worker).to(dtype)


def every_division(backend: Backend) -> None:
    """Four workers in parts: each collective against the sum of what the members hold."""
    for parts in DIVISIONS:
        group = backend.split(parts)
        members = next(part for part in parts if backend.rank in part)
        number = len(members)
        assert (group.rank, group.world_size) == (members.index(backend.rank), number)
        for dtype in DTYPES:
            held = [rows(worker, number=number, dtype=dtype) for worker in members]
            mine, total = held[group.rank].clone(), torch.stack(held).sum(0).to(dtype)
            assert torch.equal(group.all_gather(mine), torch.stack(held)), (parts, dtype)
            part = group.reduce_scatter(mine)
            assert part.dtype == dtype
            assert torch.equal(part, total[group.rank]), (parts, dtype, part)
            scalar = group.reduce_scatter(mine[:, 0])
            assert torch.equal(scalar, total[group.rank, 0]), (parts, dtype, scalar)
            strided = mine.t().contiguous().t()
            assert torch.equal(group.reduce_scatter(strided), total[group.rank])
            assert torch.equal(mine, held[group.rank])  # nothing of it was changed
            group.all_reduce(mine).wait()
            assert torch.equal(mine, total), (parts, dtype, mine)


def parts_while_all_are_busy(backend: Backend) -> None:
    """Sub-groups meet again and again while sums over everybody are under way."""
    group = backend.split([[0, 1], [2, 3]])
    partners = 2 * (backend.rank // 2) * 2 + 1  # the sum of the two ranks of this part
    for step in range(10):
        large = [torch.full((50_000,), float(backend.rank + step)) for _ in range(4)]
        works = []
        for tensor in large:
            works.append(backend.all_reduce(tensor))
            small = torch.full((7,), float(backend.rank))
            group.all_reduce(small).wait()
            assert small.eq(partners).all(), small
            assert group.all_gather(torch.tensor(backend.rank)).sum() == partners
        for work, tensor in zip(works, large, strict=True):
            work.wait()
            assert tensor.eq(6 + 4 * step).all(), tensor


def compressed(backend: Backend, dtype: torch.dtype) -> None:
    """40,000 on each of four workers: more than fp16 holds, in all but the fp32 result."""
    model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 10))
    norms = list(model[1].parameters())
    with Reducer(model.named_parameters(), backend, dtype=dtype, exact=norms) as reducer:
        for value in (40_000.0, 1 / 3):
            reducer.zero()
            reducer.arm()
            scale = value * (1 + backend.rank / 8)
            sum((weight * scale).sum() for weight in model.parameters()).backward()  # type: ignore[union-attr]
            reducer.wait()
            expected = value * (4 + 6 / 8)
            for weight in model.parameters():
                assert weight.grad is not None
                error = (weight.grad.double() / expected - 1).abs().max().item()
                exact = any(weight is norm for norm in norms)
                assert error <= (1e-6 if exact else 2 * torch.finfo(dtype).eps), (value, error)


def compressed_fp16(backend: Backend) -> None:
    """The type that both libraries have."""
    compressed(backend, torch.float16)


def compressed_bf16(backend: Backend) -> None:
    """The type that Horovod has not."""
    compressed(backend, torch.bfloat16)


def pretend_nodes(backend: Any, *, size: int) -> None:  # noqa: ANN401 -- its attributes are set
    """Let every `size` workers of this machine be a machine of their own."""
    backend.local_rank, backend.local_size = backend.rank % size, size


def two_levels(backend: Backend) -> None:
    """Two machines of two: the sums of random numbers, several at once, odd sizes."""
    pretend_nodes(backend, size=2)
    workers = in_two_levels(backend)
    assert isinstance(workers, Hierarchical)
    assert workers.world_size == 4
    torch.manual_seed(backend.rank)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.float16, 4e-3)):
        sums = [torch.rand(size, dtype=torch.float64).to(dtype) for size in (1, 2, 3, 10_001)]
        flat = [tensor.clone().double() for tensor in sums]
        works = [workers.all_reduce(tensor) for tensor in sums]
        for tensor in flat:
            backend.all_reduce(tensor).wait()
        for work, ours, expected in zip(works, sums, flat, strict=True):
            work.wait()
            torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=0)


def two_levels_under_backward(backend: Backend) -> None:
    """A model's gradients, in two levels, are those of the flat sum; several steps."""
    pretend_nodes(backend, size=2)
    workers = in_two_levels(backend)
    gradients = []
    for summing in (backend, workers):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(13, 13) for _ in range(8)]).double()
        with Reducer(model.named_parameters(), summing) as reducer:
            for step in range(3):
                reducer.zero()
                torch.manual_seed(10 * step + backend.rank)
                for micro in range(2):
                    if micro == 1:
                        reducer.arm()
                    model(torch.randn(5, 13, dtype=torch.float64)).square().sum().backward()
                reducer.wait()
                gradients += [w.grad.clone() for w in model.parameters() if w.grad is not None]
    assert len(gradients) == 2 * 3 * 16
    flat, ours = gradients[: 3 * 16], gradients[3 * 16 :]
    for expected, found in zip(flat, ours, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def one_level(backend: Backend) -> None:
    """One machine, or one worker on each: the backend does it itself."""
    for size in (1, 4):
        pretend_nodes(backend, size=size)
        assert in_two_levels(backend) is backend


def unequal_nodes(backend: Backend) -> None:
    """A machine of three and one of one are refused, and so is numbering across machines."""
    setting: Any = backend
    for places in ([(0, 3), (1, 3), (2, 3), (0, 1)], [(0, 2), (0, 2), (1, 2), (1, 2)]):
        setting.local_rank, setting.local_size = places[backend.rank]
        with pytest.raises(BackendError, match="reduction.hierarchical needs the same number"):
            in_two_levels(backend)


WORK = {
    function.__name__: function
    for function in (
        every_division,
        parts_while_all_are_busy,
        compressed_fp16,
        compressed_bf16,
        two_levels,
        two_levels_under_backward,
        one_level,
        unequal_nodes,
    )
}


def work(names: str) -> None:
    """Join the others, do some pieces of work, leave."""
    torch.set_num_threads(1)
    backend = connect("auto")
    for name in names.split():
        WORK[name](backend)
    backend.barrier()
    backend.close()


def lose_a_peer(told: Path) -> None:
    """On torch only: worker 1 leaves in the middle, and worker 0 writes what it is told."""
    torch.set_num_threads(1)
    backend = connect("auto")
    pretend_nodes(backend, size=2)
    workers = in_two_levels(backend)
    backend.barrier()
    if backend.rank == 1:
        os._exit(0)
    works = [workers.all_reduce(torch.ones(4)) for _ in range(2)]
    for work in works:
        try:
            work.wait()
        except PeerLostError as error:
            if backend.rank == 0:
                with told.open("a") as file:
                    file.write(f"{error}\n")


if __name__ == "__main__":
    work(sys.argv[1])

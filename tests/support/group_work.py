"""What the workers of test_groups.py do; each function runs in every worker alike.

As a program it does some on whatever it is started on:  python group_work.py 'FUNCTION ...'
"""

import sys

import torch
from torch import Tensor, nn

from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import connect
from largebatch.distributed.reducer import Reducer

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
            mine = held[group.rank].clone()
            total = torch.stack(held).sum(0).to(dtype)
            assert torch.equal(group.all_gather(mine), torch.stack(held)), (parts, dtype)
            assert torch.equal(mine, held[group.rank])  # nothing of it was changed
            group.all_reduce(mine).wait()
            assert torch.equal(mine, total), (parts, dtype, mine)


def parts_while_all_are_busy(backend: Backend) -> None:
    """Sub-groups meet again and again while sums over everybody are under way."""
    group = backend.split([[0, 1], [2, 3]])
    partners = 2 * (backend.rank // 2) * 2 + 1  # the sum of the two ranks of this part
    for step in range(4):
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


WORK = {
    function.__name__: function
    for function in (
        every_division,
        parts_while_all_are_busy,
        compressed_fp16,
        compressed_bf16,
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


if __name__ == "__main__":
    work(sys.argv[1])

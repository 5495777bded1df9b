"""Tests that need NCCL: groups of GPUs, and the state after the loss of a worker.

`make bench-gpu` runs these before it measures anything.
"""

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_workers import on_workers
from short_runs import NARROW, SMALL

from largebatch import load_recipe, run
from largebatch.distributed.connection import connect
from largebatch.training.checkpoint import load_checkpoint
from largebatch.training.step_log import StepLog

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA GPU; make bench-gpu runs these on one"
)
needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA GPUs"
)

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
LOST_AT = 3


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


def come_late() -> None:
    """Worker 1 reaches a barrier a second later, and the host of worker 0 blocks."""
    backend = connect("torch")
    backend.barrier()
    begun = time.monotonic()
    if backend.rank == 1:
        time.sleep(1)
    backend.barrier()
    assert time.monotonic() - begun > 0.9
    backend.close()


@needs_two
def test_a_barrier_holds_the_host() -> None:
    on_workers(come_late, workers=2)


def die(folder: Path) -> None:
    recipe = load_recipe(
        DIGITS,
        [
            *("duration={steps: 6}", "schedule.warmup={steps: 2}", "evaluation={}", "polish=null"),
            *(NARROW, *SMALL),
        ],
    )
    add = StepLog.add

    def then(log: StepLog, stage: Any, update: Any, *, seconds: float) -> None:  # noqa: ANN401 -- passed on
        add(log, stage, update, seconds=seconds)
        if update.step == LOST_AT and os.environ["RANK"] == "1":
            os._exit(9)

    with mock.patch.object(StepLog, "add", then):
        run(recipe, out=folder, report=False, timeout=20)


@needs_two
def test_the_state_is_saved_when_a_worker_dies(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="worker 1 exited without reporting: exit code 9"):
        on_workers(die, tmp_path / "run", workers=2)
    (found,) = (tmp_path / "run" / "checkpoints").iterdir()
    saved = load_checkpoint(found)
    assert saved.progress.step in {LOST_AT, LOST_AT + 1}
    assert all(tensor.isfinite().all() for tensor in saved.state["model"].values())

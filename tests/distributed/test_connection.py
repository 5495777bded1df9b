"""Workers connected by the program itself are used and left open."""

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from fake_horovod import FakeHorovod
from on_forked_workers import on_forked_workers
from short_runs import DIGITS, NARROW, SHALLOW, SMALL

from largebatch import load_recipe, run
from largebatch.distributed import connect
from largebatch.distributed.environment import own_rank, world_size
from largebatch.training.checkpoint import load_checkpoint

CHANGES = [*("duration={steps: 2}", "schedule.warmup=null", "polish=null"), *SMALL, NARROW, SHALLOW]


def run_in_a_group(folder: Path) -> list[object]:
    """Open a process group like a user's program, without a launcher's variables."""
    rank = int(os.environ.pop("RANK"))
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: list[object] = []
    for name in ("one", "two"):
        summary = run(load_recipe(DIGITS, CHANGES), out=folder / name)
        backend = connect("auto")
        found.append((summary.backend, summary.workers, own_rank(), world_size(), backend.name))
        backend.close()
    found.append(dist.is_initialized())
    dist.destroy_process_group()
    return found


def test_an_open_process_group_is_used_and_stays_open(tmp_path: Path) -> None:
    assert on_forked_workers(run_in_a_group, tmp_path, workers=2) == [
        ("torch", 2, 0, 2, "torch"),
        ("torch", 2, 0, 2, "torch"),
        True,
    ]
    one, two = (
        load_checkpoint(max((tmp_path / name / "checkpoints").iterdir())).state["model"]
        for name in ("one", "two")
    )
    assert all(tensor.equal(two[name]) for name, tensor in one.items())


def test_initialised_horovod_is_used_and_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    hvd = FakeHorovod()
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    hvd.init(process_sets="dynamic")
    backend = connect("auto")
    assert (backend.name, backend.rank, backend.world_size) == ("horovod", 1, 2)
    assert (own_rank(), world_size()) == (1, 2)
    backend.close()
    assert hvd.running

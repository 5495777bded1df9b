"""What variables of launchers and srun mean, and that connected workers are used and left open."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fake_horovod import FakeHorovod
from on_forked_workers import on_forked_workers
from short_runs import DIGITS, NARROW, SHALLOW, SMALL

from largebatch import load_recipe, run
from largebatch.cli.main import USER, main
from largebatch.distributed import connection
from largebatch.distributed.connection import connect, running_backend
from largebatch.distributed.environment import (
    join_slurm,
    launched,
    launched_size,
    own_rank,
    worker_rank,
    world_size,
)
from largebatch.errors import BackendError
from largebatch.training.checkpoint import load_checkpoint

PAIRS = [
    ("RANK", "WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
]


def found(monkeypatch: pytest.MonkeyPatch, **variables: str) -> tuple[int | None, int]:
    """Return rank and size of a process with these variables, and no others."""
    monkeypatch.setattr(os, "environ", variables)
    join_slurm()
    return worker_rank(), launched_size()


@pytest.mark.parametrize(("rank", "size"), PAIRS)
def test_one_process_is_one_process_whatever_started_it(
    rank: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(monkeypatch, **{rank: "0", size: "1"}) == (None, 1)
    assert connect("auto").name == "serial"
    assert found(monkeypatch, **{rank: "", size: ""}) == (None, 1)
    assert found(monkeypatch, **{rank: "1", size: "3"}) == (1, 3)
    if rank != "RANK":
        alone = {"RANK": "0", "WORLD_SIZE": "1", rank: "1", size: "3"}
        assert found(monkeypatch, **alone) == (1, 3)
    if rank not in {"RANK", "SLURM_PROCID"}:
        assert found(monkeypatch, RANK="0", **{rank: "1", size: "3"}) == (1, 3)


def test_tasks_of_srun_whose_image_sets_a_group_of_one_are_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    step = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert found(monkeypatch, **group, **step, SLURM_JOB_ID="", MASTER_ADDR="") == (1, 2)
    assert os.environ["LOCAL_RANK"] == "1"
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        pytest.param({"RANK": "a"}, "RANK=a", id="no number"),
        pytest.param({"RANK": "2", "WORLD_SIZE": "2"}, "WORLD_SIZE=2", id="rank beyond the size"),
        pytest.param({"PMI_RANK": "-1", "PMI_SIZE": "2"}, "PMI_RANK=-1", id="below 0"),
        pytest.param({"SLURM_PROCID": "1", "SLURM_NTASKS": "x"}, "SLURM_NTASKS=x", id="srun"),
    ],
)
def test_variables_that_cannot_be_are_named(
    variables: dict[str, str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(BackendError, match=named):
        found(monkeypatch, **variables)
    assert main(["recipes"]) == USER
    assert named in capsys.readouterr().err


def test_workers_that_no_library_connects_are_told_what_started_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connection, "leave_with", lambda _: None)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "4")
    assert main(["train", "digits_96", "--workers", "2"]) == USER
    assert "PMI_SIZE=4" in capsys.readouterr().err
    with pytest.raises(BackendError, match="PMI_SIZE=4"):
        running_backend(torch.device("cpu"))
    for horovod in (None, FakeHorovod()):  # not installed; connects 2
        monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
        with pytest.raises(BackendError, match="PMI_SIZE=4.*--mpi=none") as caught:
            connect("auto")
        assert "--backend" not in str(caught.value)


STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}


def test_a_task_of_srun_is_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, **STEP, SLURM_PROCID="1", SLURM_LOCALID="1") == (1, 2)
    given = os.environ
    assert (given["LOCAL_RANK"], given["LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("127.0.0.1", "19711")


def test_workers_on_several_nodes_meet_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found(
        monkeypatch,
        **STEP | {"SLURM_NTASKS": "9", "SLURM_NNODES": "3", "MASTER_PORT": "29500"},
        SLURM_PROCID="8",
        SLURM_LOCALID="0",
        SLURM_NODEID="2",
        SLURM_TASKS_PER_NODE="4(x2),1",
        SLURM_NODELIST="gpu[07-09]",
    )
    given = os.environ
    assert (given["RANK"], given["WORLD_SIZE"], given["LOCAL_WORLD_SIZE"]) == ("8", "9", "1")
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("gpu07", "29500")


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, id="batch script"),
        pytest.param(STEP | {"SLURM_STEP_ID": str(2**32 - 5), "SLURM_PROCID": "0"}, id="its step"),
        pytest.param(STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, id="shell"),
        pytest.param({"SLURM_NTASKS": "2"}, id="salloc"),
    ],
)
def test_a_slurm_batch_script_is_not_a_worker(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    found(monkeypatch, **variables)
    assert launched() is None


@pytest.mark.usefixtures("ends")
def test_tasks_of_srun_on_one_host_are_workers() -> None:
    assert on_forked_workers(be_task, str(os.getpid()), workers=2) == (0, 2)


def be_task(job: str) -> tuple[int, int]:
    rank = os.environ["RANK"]
    for name in [name for name in os.environ if re.match("RANK|WORLD|LOCAL_|MASTER|TORCHE", name)]:
        del os.environ[name]
    os.environ.update(STEP | {"SLURM_JOB_ID": job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
    backend = connect("auto")
    backend.barrier()
    backend.close()
    return backend.rank, backend.world_size


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

"""Processes started by srun are workers of one run; SLURM's scripts and shells are not."""

import os
import re

import pytest
from on_forked_workers import on_forked_workers

from largebatch.distributed.connection import connect
from largebatch.distributed.environment import join_slurm, launched, launched_size

STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}


def joined(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, str]:
    """Return the environment of a process that had these variables."""
    monkeypatch.setattr(os, "environ", variables)
    join_slurm()
    return variables


def test_a_task_of_srun_is_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    found = joined(monkeypatch, **STEP, SLURM_PROCID="1", SLURM_LOCALID="1")
    assert (found["RANK"], launched_size()) == ("1", 2)
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "19711")


def test_workers_on_several_nodes_meet_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = joined(
        monkeypatch,
        **STEP | {"SLURM_NTASKS": "9", "SLURM_NNODES": "3", "MASTER_PORT": "29500"},
        SLURM_PROCID="8",
        SLURM_LOCALID="0",
        SLURM_NODEID="2",
        SLURM_TASKS_PER_NODE="4(x2),1",
        SLURM_NODELIST="gpu[07-09]",
    )
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("8", "9", "1")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("gpu07", "29500")


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
    joined(monkeypatch, **variables)
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

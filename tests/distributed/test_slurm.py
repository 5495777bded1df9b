"""Processes started by srun are workers of one run; SLURM's scripts and shells are not."""

import os
import re
import socket
from typing import Any

import pytest
from listening import listeners
from on_forked_workers import on_forked_workers

from largebatch.distributed.connection import connect
from largebatch.distributed.environment import (
    join_slurm,
    launched_rank,
    launched_size,
)
from largebatch.distributed.torch_distributed import listen_on

STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}


def joined(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, str]:
    """Return the environment of a process that had these variables."""
    monkeypatch.setattr(os, "environ", variables)
    join_slurm()
    return variables


def test_a_task_of_srun_is_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    found = joined(monkeypatch, **STEP, SLURM_PROCID="1", SLURM_LOCALID="1")
    assert (launched_rank(), launched_size()) == (1, 2)
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
    assert launched_rank() is None


@pytest.mark.parametrize(
    ("address", "alone", "expected"),
    [
        pytest.param("127.0.0.1", True, "127.0.0.1", id="one host"),
        pytest.param("localhost", False, None, id="loopback for several hosts"),
        pytest.param("192.0.2.1", False, None, id="another machine's"),
        pytest.param("no.such.host.invalid", False, None, id="unknown"),
    ],
)
def test_the_store_listens_on_its_own_address_only(
    address: str, alone: bool, expected: str | None
) -> None:
    """On none of the last three: torch then serves on all interfaces, or fails."""
    listener = listen_on(address, 0, alone=alone)
    if listener is None:
        assert expected is None
    else:
        with listener:
            assert listener.getsockname()[0] == expected


@pytest.fixture
def own_address() -> str:
    """An address at which other machines can reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        try:
            unsent.connect(("198.51.100.1", 9))
        except OSError:
            pytest.skip("this machine has no network but the loopback interface")
        return str(unsent.getsockname()[0])


@pytest.mark.parametrize("names", [(), ("127.0.1.1", "192.0.2.99")])
def test_a_reachable_address_of_a_name_is_used(
    own_address: str,
    names: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Debian writes 127.0.1.1 into /etc/hosts for the host's own name."""
    resolve = socket.getaddrinfo

    def resolve_all(_: str, *args: Any, **kwargs: Any) -> list[Any]:  # noqa: ANN401 -- passed on
        return [one for each in (*names, own_address) for one in resolve(each, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_all)
    listener = listen_on("node1", 0, alone=False)
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] == own_address
    assert not caplog.messages


@pytest.mark.usefixtures("ends")
def test_tasks_of_srun_on_one_host_meet_on_the_loopback_interface(own_address: str) -> None:
    found = on_forked_workers(be_task, str(os.getpid()), own_address, workers=2)
    assert found == ["127.0.0.1"]


def be_task(job: str, address: str) -> list[str]:
    """Run as a task of srun whose script names its host by `address`.

    Return the addresses that listen on the store's port.
    """
    rank = os.environ["RANK"]
    for name in [name for name in os.environ if re.match("RANK|WORLD|LOCAL_|MASTER|TORCHE", name)]:
        del os.environ[name]
    os.environ.update(STEP | {"SLURM_JOB_ID": job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
    os.environ["MASTER_ADDR"] = address
    backend = connect("auto")
    assert (backend.rank, backend.world_size) == (int(rank), 2)
    port = int(os.environ["MASTER_PORT"])
    found = [address for address, number in listeners() if number == port]
    backend.barrier()
    backend.close()
    return found

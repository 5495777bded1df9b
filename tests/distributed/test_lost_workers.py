"""Silent, lost and slow workers: a timeout ends the others, and the network check counts them."""

import os
import signal
import time
from unittest import mock

import pytest
import torch
from on_forked_workers import on_forked_workers
from on_workers import on_workers

from largebatch.cli.main import USER, main
from largebatch.distributed.connection import connect
from largebatch.distributed.environment import STARTING
from largebatch.distributed.torch_distributed import TorchDistributed, TorchGroup
from largebatch.errors import PeerLostError, WorkerFailedError
from largebatch.lab.measure.calibrate import bandwidth, measure_network

TIMEOUT = 1.0

newer_torch = pytest.mark.skipif(
    torch.__version__.startswith("2.8."),
    reason="torch 2.8 keeps the timeout that Gloo starts with, and tells less of killed workers",
)


def wait_for_a_silent_worker(part: bool) -> float:
    """Return the seconds that a worker waits after the first update; it waits longer before."""
    backend = connect("torch", timeout=TIMEOUT, starting=True)
    group = backend.split([[0, 1]]) if part else backend
    late = STARTING / 2 * TIMEOUT
    if backend.rank == 1:
        time.sleep(late)
    group.all_reduce(torch.ones(3)).wait()
    backend.started()
    began = time.monotonic()
    if backend.rank == 1:
        time.sleep(late)
        return 0.0
    with pytest.raises(PeerLostError):
        group.all_reduce(torch.ones(3)).wait()
    return time.monotonic() - began


@newer_torch
@pytest.mark.parametrize("part", [False, True], ids=["all workers", "a part of them"])
def test_the_timeout_is_long_until_the_first_update_and_short_after(*, part: bool) -> None:
    waited = on_forked_workers(wait_for_a_silent_worker, part, workers=2)
    assert isinstance(waited, float)
    assert TIMEOUT / 2 < waited < STARTING / 2 * TIMEOUT


def lose_one() -> str:
    backend = connect("torch", timeout=60)
    backend.all_reduce(torch.ones(3)).wait()
    if backend.rank == 1:
        os._exit(0)
    with pytest.raises(PeerLostError) as caught:
        backend.all_reduce(torch.ones(3)).wait()
    return str(caught.value)


def test_a_worker_that_exited_is_noticed_immediately() -> None:
    assert str(on_forked_workers(lose_one, workers=2)).startswith("worker 0 lost contact")


def suspend_one(library: str) -> None:
    """Run two sums; in between, worker 1 is suspended while the others wait for it."""
    backend = connect("horovod" if library == "horovod" else "torch", timeout=3)
    backend.all_reduce(torch.ones(5)).wait()
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    backend.all_reduce(torch.ones(7)).wait()


@newer_torch
@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("library", ["torch", pytest.param("horovod", marks=pytest.mark.long)])
def test_the_launcher_names_the_worker_that_did_not_respond(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "horovod":
        pytest.importorskip("horovod.torch", reason="horovod is not installed")
    monkeypatch.setattr("largebatch.runs.launch.LEAVE_SECONDS", 1)
    with pytest.raises(WorkerFailedError, match="killed: worker 1"):
        on_workers(suspend_one, library, workers=3, horovod=library == "horovod")


SLOW_SECONDS = 0.05


def test_bandwidth_is_that_of_a_ring() -> None:
    """As nccl-tests define it: 2 (n - 1) / n times the bytes of the sum in its time."""
    assert bandwidth(2**20, workers=2, seconds=0.5) == 2**21
    assert bandwidth(1000, workers=4, seconds=1.0) == 1500


def measured() -> dict[int, float]:
    """Run one of three workers, of which worker 2 is late."""
    sum_up = TorchGroup.all_reduce

    def late(group: TorchGroup, tensor: object) -> object:
        time.sleep(SLOW_SECONDS if os.environ["RANK"] == "2" else 0)
        return sum_up(group, tensor)  # type: ignore[arg-type]

    with mock.patch.object(TorchGroup, "all_reduce", late):
        backend = TorchDistributed()
        found = measure_network(backend, sizes=(64, 4096))
        backend.close()
    return found


@pytest.mark.usefixtures("ends")
def test_the_slowest_worker_counts() -> None:
    found = on_forked_workers(measured, workers=3)
    assert found.keys() == {64, 4096}
    assert min(found.values()) >= SLOW_SECONDS


def test_a_single_worker_has_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--network"]) == USER
    assert capsys.readouterr().err.count("\n") == 1

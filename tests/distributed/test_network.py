"""The network check: the time of sums over all workers."""

import os
import time
from unittest import mock

import pytest
from on_forked_workers import on_forked_workers

from largebatch.cli.main import USER, main
from largebatch.distributed.network import bandwidth, measure_network
from largebatch.distributed.torch_distributed import TorchDistributed, TorchGroup

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

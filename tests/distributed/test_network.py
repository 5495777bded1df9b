"""The network check: the measured pairs, and the detection of slow hosts."""

import os
import time
from unittest import mock

import pytest
from on_forked_workers import on_forked_workers

from largebatch.cli.main import USER, main
from largebatch.distributed.network import (
    Network,
    Pair,
    bandwidth,
    measure_network,
    rounds,
)
from largebatch.distributed.torch_distributed import TorchDistributed, TorchGroup

SLOW_SECONDS = 0.05


@pytest.mark.parametrize("number", [0, 1, 2, 3, 8])
def test_every_host_is_measured_with_one_neighbour_at_a_time(number: int) -> None:
    hosts = [f"node{place}" for place in range(number)]
    found = rounds(hosts)
    for pairs in found:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))
    expected = {frozenset((hosts[place], hosts[place - 1])) for place in range(number)}
    expected = {pair for pair in expected if len(pair) == 2}
    everything = [frozenset(pair) for pairs in found for pair in pairs]
    assert len(everything) == len(set(everything))
    assert set(everything) == expected
    assert len(found) <= 3


def test_bandwidth_is_that_of_a_ring() -> None:
    """As nccl-tests define it: 2 (n - 1) / n times the bytes of the sum in its time."""
    assert bandwidth(2**20, workers=2, seconds=0.5) == 2**21
    assert bandwidth(1000, workers=4, seconds=1.0) == 1500


@pytest.mark.parametrize(
    ("bandwidths", "slow"),
    [
        pytest.param([10, 11, 12, 10], (), id="none"),
        pytest.param([10, 10, 2, 2, 10], ("d",), id="both pairs of d"),
        pytest.param([10, 2, 2], ("c",), id="two pairs of three"),
        pytest.param([10, 2, 10, 10, 10], (), id="a link between two that are fine"),
    ],
)
def test_a_host_is_slow_if_all_its_pairs_are(
    bandwidths: list[float], slow: tuple[str, ...]
) -> None:
    hosts = tuple("abcde"[: len(bandwidths)])
    pairs = zip(hosts, hosts[1:] + hosts[:1], bandwidths, strict=True)
    found = Network(hosts, {}, tuple(Pair((one, other), rate) for one, other, rate in pairs))
    assert found.slow_hosts == slow


def measured() -> Network:
    """Run one of four workers on three hosts; worker 2, alone on its host, is late."""
    rank = int(os.environ["RANK"])
    sum_up = TorchGroup.all_reduce

    def late(group: TorchGroup, tensor: object) -> object:
        time.sleep(SLOW_SECONDS if rank == 2 and group.world_size < 4 else 0)
        return sum_up(group, tensor)  # type: ignore[arg-type]

    with (
        mock.patch("socket.gethostname", return_value=f"node{max(0, rank - 1)}"),
        mock.patch.object(TorchGroup, "all_reduce", late),
    ):
        backend = TorchDistributed()
        found = measure_network(backend, sizes=(64, 4096))
        backend.close()
    return found


@pytest.mark.usefixtures("ends")
def test_workers_on_three_hosts_are_measured() -> None:
    found = on_forked_workers(measured, workers=4)
    assert found.hosts == ("node0", "node1", "node2")
    assert set(found.seconds) == {64, 4096}
    assert all(seconds > 0 for seconds in found.seconds.values())
    rates = {pair.hosts: pair.bandwidth for pair in found.pairs}
    assert list(rates) == [("node0", "node1"), ("node1", "node2"), ("node2", "node0")]
    assert rates["node0", "node1"] < bandwidth(4096, workers=3, seconds=SLOW_SECONDS)
    assert rates["node1", "node2"] < bandwidth(4096, workers=2, seconds=SLOW_SECONDS)


def test_a_single_worker_has_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--network"]) == USER
    assert capsys.readouterr().err.count("\n") == 1

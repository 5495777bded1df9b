"""The crown test: any division of a global batch gives the weights of plain PyTorch.

The reference is written by hand (plain.py), with nothing of ours in it. SGD stands beside LARS
because LARS divides by the gradient's norm and cannot see a wrong scale.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import cast

import crown
import pytest
import torch
from crown import GLOBAL_BATCH, NETS, OPTIMIZERS, SPAN, State
from plain import plain_pytorch
from threads import Thread, on_threads

from largebatch.distributed.backend import Backend
from largebatch.distributed.serial import Serial
from largebatch.runs.launch import start_workers

has_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None,
    reason="horovod is not installed; launch/install_horovod.sh builds it",
)
every_net = pytest.mark.parametrize("net", NETS)
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def assert_equal(ours: State, net: str, optimizer: str, *, chunk: int) -> None:
    expected = plain_pytorch(net, optimizer, chunk=chunk)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10, check_dtype=True)


@every_net
@every_optimizer
def test_four_micro_batches_on_one_worker_match_plain_pytorch(net: str, optimizer: str) -> None:
    ours = crown.solve(Serial(torch.device("cpu")), net, optimizer, accumulation=4)
    assert_equal(ours.state_dict(), net, optimizer, chunk=SPAN)


@every_optimizer
def test_one_whole_batch_on_one_worker_matches_plain_pytorch(optimizer: str) -> None:
    ours = crown.solve(Serial(torch.device("cpu")), "plain", optimizer, accumulation=1)
    assert_equal(ours.state_dict(), "plain", optimizer, chunk=GLOBAL_BATCH)


@every_optimizer
def test_ghost_groups_in_one_device_batch_match_plain_pytorch(optimizer: str) -> None:
    ours = crown.solve(Serial(torch.device("cpu")), "batchnorm", optimizer, accumulation=1)
    assert_equal(ours.state_dict(), "batchnorm", optimizer, chunk=SPAN)


@every_net
def test_two_workers_that_are_threads_match_plain_pytorch(
    net: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a second; the processes of the tests below take many to start."""
    nets = [crown.net(net) for _ in range(2)]  # drawn one after the other: threads share a seed

    def work(worker: Thread) -> State:
        model = crown.solve(cast("Backend", worker), net, "sgd", accumulation=2)
        return dict(model.state_dict())

    with monkeypatch.context() as patched:
        patched.setattr(crown, "net", lambda _: nets.pop())
        found = on_threads(work, workers=2)
    for ours in found:
        assert_equal(ours, net, "sgd", chunk=SPAN)


@pytest.fixture(scope="module", params=[2, 4])
def torch_results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, State]:
    path = tmp_path_factory.mktemp("crown") / "torch.pt"
    start_workers(crown.solve_all, "torch", path, workers=request.param)
    results: dict[str, State] = torch.load(path)
    return results


@pytest.fixture(scope="module", params=[2, 4])
def horovod_results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, State]:
    path = tmp_path_factory.mktemp("crown") / "horovod.pt"
    horovodrun = shutil.which("horovodrun", path=str(Path(sys.executable).parent))
    assert horovodrun is not None
    command = [horovodrun, "-np", str(request.param), "--gloo", sys.executable, crown.__file__]
    subprocess.run([*command, "horovod", str(path)], check=True, timeout=120)
    results: dict[str, State] = torch.load(path)
    return results


@every_net
@every_optimizer
def test_workers_and_micro_batches_match_plain_pytorch_on_torch(
    torch_results: dict[str, State], net: str, optimizer: str
) -> None:
    assert_equal(torch_results[f"{net} {optimizer}"], net, optimizer, chunk=SPAN)


@has_horovod
@every_net
@every_optimizer
def test_workers_and_micro_batches_match_plain_pytorch_on_horovod(
    horovod_results: dict[str, State], net: str, optimizer: str
) -> None:
    assert_equal(horovod_results[f"{net} {optimizer}"], net, optimizer, chunk=SPAN)

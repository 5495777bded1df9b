"""The crown test: any division of a global batch gives the weights of plain PyTorch.

The reference is written by hand here, from the formulas, with nothing of ours in it. SGD stands
beside LARS because LARS divides by the gradient's norm and cannot see a wrong scale.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import crown
import pytest
import torch
import torch.nn.functional as F
from crown import EPS, ETA, GLOBAL_BATCH, MOMENTUM, NETS, OPTIMIZERS, PEAK, SMOOTHING, SPAN, State
from torch import Tensor

from largebatch.backends.serial import Serial
from largebatch.workers import start_workers

has_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None,
    reason="horovod is not installed; launch/install_horovod.sh builds it",
)
every_net = pytest.mark.parametrize("net", NETS)
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def plain_pytorch(net: str, optimizer: str, *, chunk: int) -> State:
    """One process, the formulas of the papers, statistics over `chunk` samples."""
    model = crown.net(net)
    images, labels = crown.data()
    velocity = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    for step in range(crown.STEPS):
        model.zero_grad()
        before = {name: value.clone() for name, value in model.named_buffers()}
        after = []
        start = step * GLOBAL_BATCH
        for first in range(start, start + GLOBAL_BATCH, chunk):
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])
            part = slice(first, first + chunk)
            logits = model(images[part])
            loss = F.cross_entropy(logits, labels[part], label_smoothing=SMOOTHING, reduction="sum")
            (loss / GLOBAL_BATCH).backward()
            after.append({name: value.clone() for name, value in model.named_buffers()})
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(torch.stack([found[name] for found in after]).double().mean(0))
            for name, weight in model.named_parameters():
                assert weight.grad is not None
                move(optimizer, weight, weight.grad, velocity[name], lr=crown.rate(step))
    return model.state_dict()


def move(optimizer: str, w: Tensor, g: Tensor, v: Tensor, *, lr: float) -> None:
    """One update of one tensor; vectors are neither decayed nor adapted."""
    adapt = w.ndim > 1
    wd = crown.WEIGHT_DECAY if adapt else 0.0
    decay = wd * PEAK if optimizer == "fujitsu" else wd
    ratio = ETA * w.norm() / (g.norm() + decay * w.norm() + EPS) if adapt else 1.0
    if optimizer == "sgd":
        v.copy_(MOMENTUM * v + (g + wd * w))
        w -= lr * v
    elif optimizer == "reference":
        v.copy_(MOMENTUM * v + lr * ratio * (g + wd * w))
        w -= v
    elif optimizer == "scaled-momentum":
        v.copy_(MOMENTUM * v + ratio * (g + wd * w))
        w -= lr * v
    elif optimizer == "outside":
        v.copy_(MOMENTUM * v + (g + wd * w))
        w -= lr * ratio * v
    else:
        v.copy_(MOMENTUM * v + ratio * (lr / PEAK) * (PEAK * g + wd * PEAK * w))
        w -= v


def assert_equal(ours: State, net: str, optimizer: str, *, chunk: int) -> None:
    expected = plain_pytorch(net, optimizer, chunk=chunk)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10, check_dtype=True)


@every_net
@every_optimizer
def test_four_micro_batches_on_one_worker_match_plain_pytorch(net: str, optimizer: str) -> None:
    ours = crown.solve(Serial(torch.device("cpu")), net, optimizer, accumulation=4)
    assert_equal(ours, net, optimizer, chunk=SPAN)


@every_optimizer
def test_one_whole_batch_on_one_worker_matches_plain_pytorch(optimizer: str) -> None:
    ours = crown.solve(Serial(torch.device("cpu")), "plain", optimizer, accumulation=1)
    assert_equal(ours, "plain", optimizer, chunk=GLOBAL_BATCH)


@every_optimizer
def test_ghost_groups_in_one_device_batch_match_plain_pytorch(optimizer: str) -> None:
    ours = crown.solve(Serial(torch.device("cpu")), "batchnorm", optimizer, accumulation=1)
    assert_equal(ours, "batchnorm", optimizer, chunk=SPAN)


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

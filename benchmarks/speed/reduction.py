"""Compare the gradient reduction with its peers: two workers on one machine, in the same processes.

    python -m benchmarks.speed.reduction [--rounds 40] [--pixels 64] [--batch 8] [--steps 3]

1. ResNet-18 forward, backward, reduction and SGD. The rivals take turns in the same two processes,
   a few steps each, in a new random order every round: DistributedDataParallel (without its
   broadcast of BatchNorm's buffers, which no other rival does, and once more with its defaults),
   Horovod's DistributedOptimizer as its ImageNet example calls it (without that example's
   synchronous metric sums, which would count against it), and ours over both libraries. `alone` is
   the same step without communication; what a rival takes longer is its exposed communication.
   Horovod's thread wakes every millisecond, so torch's rivals meet once more in processes that
   never load it.
2. Zeroing, backward, reduction of made-up parameters: time against tensors, bytes, accumulation.

Times of one round are compared as pairs; the slower worker counts. Writes
benchmarks/results/reduction_<hardware>_<date>.json.
"""

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from benchmarks.speed.measuring import Step, on_two_workers, paired_ratio, spread, take_turns, write
from largebatch.distributed.backend import Backend
from largebatch.distributed.environment import own_rank
from largebatch.distributed.horovod import open_horovod
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.torch_distributed import TorchDistributed
from largebatch.models import build

RATE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=3, help="steps of a rival in a round")
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="images a worker")
    parser.add_argument("--worker", nargs=2, metavar=("TASK", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    worker = vars(args).pop("worker")
    if worker:
        be_worker(args, worker[0], Path(worker[1]))
        return
    result: dict[str, Any] = {"settings": vars(args)}
    result["two workers"] = compare(on_two_workers("meet"))
    if importlib.util.find_spec("horovod"):
        result["two workers, Horovod loaded"] = compare(on_two_workers("horovod", under_horovod))
    result["growth"] = on_two_workers("growth")
    path = write("reduction", result)
    print(json.dumps({key: result[key] for key in result if key != "settings"}, indent=1))
    print(path)


def be_worker(args: argparse.Namespace, task: str, file: Path) -> None:
    """Run one of two workers; worker 0 writes the results."""
    if task == "horovod":
        places_of_torch()
    found = growth(args.rounds) if task == "growth" else meet(args, with_horovod=task == "horovod")
    if own_rank() == 0:
        file.write_text(json.dumps(found))


def under_horovod(command: list[str]) -> None:
    launcher = Path(sysconfig.get_path("scripts"), "horovodrun")
    subprocess.run(
        [launcher, "-np", "2", "--gloo", sys.executable, *command],
        env=os.environ
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randint(20_000, 30_000))},
        check=True,
    )


def places_of_torch() -> None:
    """Set up torch.distributed from Horovod's ranks."""
    for name, theirs in {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK"}.items():
        os.environ[name] = os.environ[f"HOROVOD_{theirs}"]
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["HOROVOD_LOCAL_SIZE"]


def meet(args: argparse.Namespace, *, with_horovod: bool) -> dict[str, list[float]]:
    """Time all rivals in turns; return their seconds per step."""
    backend = TorchDistributed()
    torch.manual_seed(backend.rank)
    images = torch.randn(args.batch, 3, args.pixels, args.pixels)
    labels = torch.randint(1000, (args.batch,))
    rivals = {
        "alone": plain(images, labels),
        "ours, torch": ours(backend, images, labels),
        "DDP": ddp(images, labels),
        "DDP, views": ddp(images, labels, gradient_as_bucket_view=True),
        "DDP, defaults": ddp(images, labels, broadcast_buffers=True),
    }
    if with_horovod:
        rivals["ours, Horovod"] = ours(open_horovod(), images, labels)
        rivals["Horovod's optimizer"] = horovod_example(images, labels)
    times = take_turns(rivals, rounds=args.rounds, steps=args.steps, backend=backend)
    backend.barrier()
    backend.close()
    return times


def compare(times: dict[str, list[float]]) -> dict[str, Any]:
    """Compare ours with each rival; exposed communication is the time beyond a step alone."""
    alone = times["alone"]
    exposed = {
        name: spread([one - base for one, base in zip(values, alone, strict=True)])
        for name, values in times.items()
        if name != "alone"
    }
    pairs = [("ours, torch", name) for name in ("DDP", "DDP, views", "DDP, defaults")]
    if "ours, Horovod" in times:
        pairs += [
            ("ours, Horovod", "Horovod's optimizer"),
            ("ours, torch", "Horovod's optimizer"),
        ]
    return {
        "seconds a step": {name: spread(values) for name, values in times.items()},
        "exposed communication, seconds a step": exposed,
        "ratios": {f"{a} / {b}": paired_ratio(times[a], times[b]) for a, b in pairs},
    }


def resnet18() -> nn.Module:
    torch.manual_seed(0)
    return build("resnet18", num_classes=1000)


def usual_step(model: nn.Module, optimizer: Optimizer, images: Tensor, labels: Tensor) -> Step:
    """Make the training step of a PyTorch tutorial."""

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def plain(images: Tensor, labels: Tensor) -> Step:
    """Train without communication."""
    model = resnet18()
    return usual_step(model, SGD(model.parameters(), lr=RATE), images, labels)


def ours(backend: Backend, images: Tensor, labels: Tensor) -> Step:
    model = resnet18()
    optimizer = SGD(model.parameters(), lr=RATE)
    reducer = Reducer(model.named_parameters(), backend)
    global_batch = backend.world_size * len(images)

    def step() -> None:
        reducer.zero()
        loss = F.cross_entropy(model(images), labels, reduction="sum") / global_batch
        reducer.arm()
        loss.backward()
        reducer.wait()
        optimizer.step()

    return step


def ddp(
    images: Tensor,
    labels: Tensor,
    *,
    broadcast_buffers: bool = False,
    gradient_as_bucket_view: bool = False,
) -> Step:
    """DistributedDataParallel, which by default also sends BatchNorm's buffers in every forward.

    No other rival here sends them, so a fair comparison goes without.
    """
    model = DistributedDataParallel(
        resnet18(),
        broadcast_buffers=broadcast_buffers,
        gradient_as_bucket_view=gradient_as_bucket_view,
    )
    return usual_step(model, SGD(model.parameters(), lr=RATE), images, labels)


def horovod_example(images: Tensor, labels: Tensor) -> Step:
    """What examples/pytorch/pytorch_imagenet_resnet50.py of Horovod 0.28.1 does in a step."""
    import horovod.torch as hvd

    model = resnet18()
    optimizer = hvd.DistributedOptimizer(
        SGD(model.parameters(), lr=RATE),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none,
        backward_passes_per_step=1,
        op=hvd.Average,
        gradient_predivide_factor=1.0,
    )
    return usual_step(model, optimizer, images, labels)


def growth(rounds: int) -> dict[str, Any]:
    """Time a step against tensors, bytes and accumulation, and fit lines."""
    backend = TorchDistributed()
    tables = {
        "tensors": {n: synthetic(backend, tensors=n) for n in (50, 100, 200, 400, 800)},
        "megabytes": {n: synthetic(backend, megabytes=n) for n in (4, 8, 16, 32, 64)},
        "accumulation": {n: synthetic(backend, accumulation=n) for n in (1, 2, 4, 8)},
    }
    result = {}
    for name, rivals in tables.items():
        times = take_turns(
            {str(n): s for n, s in rivals.items()}, rounds=rounds, steps=2, backend=backend
        )
        result[name] = line(list(rivals), [statistics.median(t) for t in times.values()])
    backend.close()
    return result


def synthetic(
    backend: Backend, *, tensors: int = 100, megabytes: int = 16, accumulation: int = 1
) -> Step:
    """Zero the gradients, set all of them, and reduce."""
    size = megabytes * 1_000_000 // 4 // tensors
    weights = [nn.Parameter(torch.zeros(size)) for _ in range(tensors)]
    gradient = torch.ones(size)
    reducer = Reducer(((str(n), weight) for n, weight in enumerate(weights)), backend)

    def step() -> None:
        reducer.zero()
        for micro in range(accumulation):
            if micro == accumulation - 1:
                reducer.arm()
            torch.autograd.backward(weights, [gradient] * tensors)
        reducer.wait()

    return step


def line(amounts: list[int], seconds: list[float]) -> dict[str, Any]:
    """Fit seconds = fixed + each * amount; `growth` is the exponent of a power law instead."""
    each, fixed = np.polyfit(amounts, seconds, 1)
    fitted = fixed + each * np.array(amounts)
    exponent = np.polyfit(np.log(amounts), np.log(seconds), 1)[0]
    return {
        "seconds": dict(zip(map(str, amounts), seconds, strict=True)),
        "fixed": float(fixed),
        "each": float(each),
        "r2": float(1 - np.var(np.array(seconds) - fitted) / np.var(seconds)),
        "exponent": float(exponent),
    }


if __name__ == "__main__":
    main()

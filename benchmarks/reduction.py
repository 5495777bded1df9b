"""The gradient reduction next to its peers: two workers on one machine, in the same processes.

    python benchmarks/reduction.py [--rounds 40] [--pixels 64] [--batch 8] [--steps 3]

1. ResNet-18 forward, backward, reduction and SGD. The rivals take turns in the same two processes,
   a few steps each, in an order drawn anew every round: DistributedDataParallel (without its
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
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import Step, paired_ratio, spread, take_turns, write
from rivals import ddp, horovod_example, ours, plain
from torch import nn

from largebatch.distributed.backend import Backend
from largebatch.distributed.horovod import open_horovod
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.torch_distributed import TorchDistributed
from largebatch.runs.launch import start_workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=3, help="steps of a rival in a round")
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="pictures a worker")
    parser.add_argument("--under-horovod", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.under_horovod:
        places_of_torch()
        meet(args, args.under_horovod, with_horovod=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times.json")
        result: dict[str, Any] = {"settings": {**vars(args), "under_horovod": None}}
        start_workers(meet, args, out, workers=2)
        result["two workers"] = compare(json.loads(out.read_text()))
        if importlib.util.find_spec("horovod"):
            run_under_horovod(out)
            result["two workers, Horovod loaded"] = compare(json.loads(out.read_text()))
    result["growth"] = start_workers(growth, args.rounds, workers=2)
    path = write("reduction", " ".join(["python", *sys.argv]), result)
    print(json.dumps({key: result[key] for key in result if key != "settings"}, indent=1))
    print(path)


def run_under_horovod(out: Path) -> None:
    launcher = Path(sysconfig.get_path("scripts"), "horovodrun")
    command = [sys.executable, __file__, *sys.argv[1:], "--under-horovod", str(out)]
    subprocess.run(
        [launcher, "-np", "2", "--gloo", *command],
        env=os.environ
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randint(20_000, 30_000))},
        check=True,
    )


def places_of_torch() -> None:
    """Tell torch what Horovod was told."""
    for name, theirs in {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK"}.items():
        os.environ[name] = os.environ[f"HOROVOD_{theirs}"]
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["HOROVOD_LOCAL_SIZE"]


def meet(args: argparse.Namespace, out: Path, *, with_horovod: bool = False) -> None:
    """Be one of two workers: let all rivals take turns; worker 0 writes their times a step."""
    torch.set_num_threads(1)
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
    if backend.rank == 0:
        out.write_text(json.dumps(times))
    backend.barrier()
    backend.close()


def compare(times: dict[str, list[float]]) -> dict[str, Any]:
    """Set ours beside each rival; exposed communication is what a step alone does not take."""
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


def growth(rounds: int) -> dict[str, Any]:
    """Time a step against tensors, bytes and accumulation, and fit lines."""
    torch.set_num_threads(1)
    backend = TorchDistributed()
    tables = {
        "tensors": {n: made_up(backend, tensors=n) for n in (50, 100, 200, 400, 800)},
        "megabytes": {n: made_up(backend, megabytes=n) for n in (4, 8, 16, 32, 64)},
        "accumulation": {n: made_up(backend, accumulation=n) for n in (1, 2, 4, 8)},
    }
    result = {}
    for name, rivals in tables.items():
        times = take_turns(
            {str(n): s for n, s in rivals.items()}, rounds=rounds, steps=2, backend=backend
        )
        result[name] = line(list(rivals), [statistics.median(t) for t in times.values()])
    backend.close()
    return result


def made_up(
    backend: Backend, *, tensors: int = 100, megabytes: int = 16, accumulation: int = 1
) -> Step:
    """Zero, give every parameter a gradient, reduce."""
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

"""Measure the overhead of train() over a plain PyTorch training loop, on one worker.

    python -m benchmarks.speed.loop [--rounds 40] [--steps 3] [--threads 2]

All make the same steps of SGD on a batch in memory, on copies of a model, in turns: a model with
steps as long as in practice, where the ratio counts, and LeNet-5 on one image, where the seconds
added count. On a GPU the first is ResNet-50 at 224 pixels. The bare loop has train()'s
BatchNorm layers, whose spans are the whole batch, and never moves their running statistics, so that
train() is timed with that work; the cost of the layers themselves is the third loop ("bare loop,
nn.BatchNorm2d"; norm.py). LeNet-5 has no BatchNorm. On a GPU both loops are also measured as CUDA
graphs; elsewhere these are the loops themselves. Writes
benchmarks/results/loop_<hardware>_<date>.json.
"""

import argparse
import copy
import itertools
import json
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from benchmarks.speed.measuring import (
    Step,
    add_seconds,
    in_graph,
    paired_ratio,
    spread,
    take_turns,
    write,
)
from largebatch import accelerator
from largebatch.data.types import Batch
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.models import build
from largebatch.models.batchnorm import Spans, with_span
from largebatch.optim.sgd import build_sgd
from largebatch.training.graph import GraphedStep
from largebatch.training.loop import EagerStep, cross_entropy, step_seeds, train

RATE = 1e-3
MOMENTUM = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=3, help="steps of each loop in a round")
    parser.add_argument("--threads", type=int, default=2)
    add_seconds(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    large = ("resnet50", 64, 224) if accelerator.count() else ("resnet18", 16, 96)
    limits: dict[str, Any] = {"steps": args.steps, "seconds": args.seconds / 2}
    result: dict[str, Any] = {
        "settings": vars(args),
        "large": compare(*large, rounds=args.rounds, **limits),
        "small": compare("lenet5", 1, 28, rounds=10 * args.rounds, **limits),
    }
    print(json.dumps(result, indent=1))
    print(write("loop", result))


def compare(
    name: str, batch: int, pixels: int, *, rounds: int, steps: int, seconds: float
) -> dict[str, Any]:
    """Time train() and a bare loop in turns."""
    backend = Serial()
    model = build(name, num_classes=10).to(backend.device)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, pixels, pixels, generator=generator).to(backend.device)
    labels = torch.randint(10, (batch,), generator=generator).to(backend.device)
    plain = bare_loop(copy.deepcopy(model), images, labels)
    with_span(model, batch)

    def bare() -> Step:
        return bare_loop(copy.deepcopy(model), images, labels)

    def ours(*, graph: bool) -> Step:
        trained = copy.deepcopy(model)
        weights = {"params": list(trained.parameters()), "weight_decay": 0.0}
        kind = GraphedStep if graph else EagerStep
        step = kind(
            trained,
            build_sgd([weights], lr=RATE, momentum=MOMENTUM, nesterov=False, scaled=False),
            cross_entropy(smoothing=0.0, off_target="all"),
            Reducer(trained.named_parameters(), backend),
            Spans(trained, backend),
            global_batch=batch,
        )
        updates = train(
            step,
            itertools.repeat(Batch(images, labels)),
            lambda _: RATE,
            steps=range(10**9),
            accumulation=1,
            seed=step_seeds(0, 0),
        )
        return lambda: next(updates)

    rivals = {
        "train()": ours(graph=False),
        "bare loop": bare(),
        "bare loop, nn.BatchNorm2d": plain,
    }
    if backend.device.type in accelerator.GRAPHS:
        rivals["train(), graph"] = ours(graph=True)
        rivals["bare loop, graph"] = in_graph(bare(), backend.device)
    times = take_turns(rivals, rounds=rounds, steps=steps, seconds=seconds)
    added = [one - other for one, other in zip(times["train()"], times["bare loop"], strict=True)]
    found = {
        "model": f"{name}, {batch} images of {pixels} pixels",
        "seconds a step": {name: spread(values) for name, values in times.items()},
        "ratio": paired_ratio(times["train()"], times["bare loop"]),
        "ratio to nn.BatchNorm2d": paired_ratio(
            times["train()"], times["bare loop, nn.BatchNorm2d"]
        ),
        "seconds added": statistics.median(added),
    }
    if "train(), graph" in times:
        found["ratio in graphs"] = paired_ratio(times["train(), graph"], times["bare loop, graph"])
    return found


def bare_loop(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Step:
    """Make the training step of a PyTorch tutorial."""
    optimizer = SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)

    def step() -> None:
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()

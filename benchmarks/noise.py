"""Measure the cost of the gradient noise scale, and test its prediction of the critical batch.

    python benchmarks/noise.py [--rounds 15] [--batch 8] [--pixels 128]
    python benchmarks/noise.py --critical DIR --data DIR [--set fashion_mnist]

Cost: what the reducer does more in an update is timed alone, since updates of a CPU vary by more
than that: it reads the gradients of ResNet-50, 25.6 million numbers, twice. Their part of an update
of two micro-batches is the cost; the smaller those are the larger it is, and a recipe's are larger
than these. Beside it, whole updates with it and without take turns.

Critical batch: LeNet-5 on CIFAR-10, `largebatch noise --measure` from the recipe noise_lenet5.yaml,
or on 12,000 images of Fashion-MNIST, noise_lenet5_fashion_mnist.yaml; its runs are kept in DIR and
go on where they were stopped. Predicted and measured stand side by side, and so do the rates that
were tried.
"""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from measuring import paired_ratio, spread, take_turns, write
from torch.nn import functional as F

from largebatch import load_recipe
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.lab.measure.critical_batch import Critical, measure_critical
from largebatch.models import build, param_groups
from largebatch.optim import LARS
from largebatch.runs.options import Options

RECIPES = Path(__file__).parent / "recipes"
CRITICAL = {
    "cifar10": ("critical_batch", "noise_lenet5.yaml", (32, 64, 128, 256, 512, 1024, 2048)),
    "fashion_mnist": (
        "critical_batch_fashion_mnist",
        "noise_lenet5_fashion_mnist.yaml",
        (32, 64, 128, 256, 512),
    ),
}
"""Name of the result, recipe and batches of each data set."""

EPOCHS = 2.0
MICRO_BATCHES = 2


def main() -> None:
    """Run one of the two measurements, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=8, help="samples in a micro-batch")
    parser.add_argument("--pixels", type=int, default=128)
    parser.add_argument("--critical", type=Path, metavar="DIR", help="measure the critical batch")
    parser.add_argument("--data", type=Path, help="the images as `data import` leaves them")
    parser.add_argument("--set", choices=CRITICAL, default="cifar10", help="data set of --critical")
    args = parser.parse_args()
    if args.critical is None:
        words = f"--rounds {args.rounds} --batch {args.batch} --pixels {args.pixels}"
        result = cost(rounds=args.rounds, batch=args.batch, pixels=args.pixels)
        print(write("noise_cost", f"python benchmarks/noise.py {words}", result))
    else:
        name, recipe, batches = CRITICAL[args.set]
        result = critical(RECIPES / recipe, batches, args.critical, args.data)
        more = "" if args.set == "cifar10" else f" --set {args.set}"
        command = f"python benchmarks/noise.py --critical DIR --data DIR{more}"
        print(write(name, command, result))


def cost(*, rounds: int, batch: int, pixels: int) -> dict[str, object]:
    """Compare updates with and without the measurement."""
    rivals = {
        name: updates(batch, pixels, measure=name == "measured") for name in ("measured", "plain")
    }
    times = take_turns(rivals, rounds=rounds, steps=1)
    readings = twice_read(rounds=10 * rounds)
    update = statistics.median(times["plain"])
    return {
        "seconds of the two readings": spread(readings),
        "part of an update": spread([seconds / update for seconds in readings]),
        "settings": {"model": "resnet50", "batch": batch, "pixels": pixels, "rounds": rounds,
                     "micro_batches": MICRO_BATCHES},
        "update seconds": {name: spread(seconds) for name, seconds in times.items()},
        "measured / plain": paired_ratio(times["measured"], times["plain"]),
    }  # fmt: skip


def twice_read(*, rounds: int) -> list[float]:
    """Return the times of reading the gradients of ResNet-50 twice."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build("resnet50", num_classes=1000).to(device)
    gradients = [torch.randn_like(weight) for weight in model.parameters()]

    def read() -> object:
        return [torch.stack(torch._foreach_norm(gradients)).square().sum() for _ in range(2)]

    return take_turns({"read": read}, rounds=rounds, steps=1)["read"]


def updates(batch: int, pixels: int, *, measure: bool) -> Callable[[], object]:
    """Return a function that makes an update."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = build("resnet50", num_classes=1000).to(device)
    optimizer = LARS(param_groups(model, weight_decay=1e-4), lr=0.1)
    reducer = Reducer(model.named_parameters(), Serial(device), divisor=1.0, measure=measure)
    images = torch.randn(batch, 3, pixels, pixels, device=device)
    labels = torch.randint(1000, (batch,), device=device)

    def update() -> object:
        reducer.zero()
        for micro in range(MICRO_BATCHES):
            if micro == MICRO_BATCHES - 1:
                reducer.arm()
            (F.cross_entropy(model(images), labels) / MICRO_BATCHES).backward()
        reducer.wait()
        optimizer.step()
        return reducer.squares.tolist() if reducer.squares is not None else None

    return update


def critical(path: Path, batches: tuple[int, ...], folder: Path, data: Path) -> dict[str, object]:
    """Measure the critical batch, and predict it from the noise scale."""
    recipe = load_recipe(path)
    folder.mkdir(parents=True, exist_ok=True)
    for found in measure_critical(recipe, Options(out=folder, data=data), batches, epochs=EPOCHS):
        if isinstance(found, Critical):
            return {
                "recipe": path.name,
                "epochs": EPOCHS,
                **asdict(found),
                "predicted": found.predicted,
            }
        with contextlib.redirect_stdout(sys.stderr):
            print(found, flush=True)
    raise AssertionError


if __name__ == "__main__":
    main()

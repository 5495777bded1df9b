"""Measure the cost of a checkpoint: the copy of the state, and updates while it is written.

    python -m benchmarks.speed.checkpoint [--rounds 15] [--model resnet50] [--batch 8]

Training waits for the copy and continues while a thread writes the file to the disk. Two rivals
take turns: an update with a checkpoint under way, and one without. The ratio is that of an update
to the other, without the copy, which is reported separately. With OMP_NUM_THREADS=1 a core of two
is idle, as where a GPU computes.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.speed.measuring import paired_ratio, spread, write
from largebatch.models import build, param_groups
from largebatch.optim.lars import LARS
from largebatch.recipe.loading import load_recipe
from largebatch.training.checkpoint import Checkpoint, Writer, copy_state

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=128)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(args.model, num_classes=1000, arguments={}, head_std=None).to(device)
    optimizer = LARS(param_groups(model, weight_decay=1e-4), lr=0.1)
    images = torch.randn(args.batch, 3, args.pixels, args.pixels, device=device)
    labels = torch.randint(1000, (args.batch,), device=device)
    for _ in range(2):
        update(model, optimizer, images, labels)
    copies = []
    writes = []
    alone = []
    while_writing = []
    with tempfile.TemporaryDirectory() as name:
        writer = Writer(Path(name) / "checkpoints", keep_last=2)
        for step in range(args.rounds):
            alone.append(update(model, optimizer, images, labels))
            start = time.perf_counter()
            writer.write(checkpoint(model, optimizer, step))
            copies.append(time.perf_counter() - start)
            while_writing.append(update(model, optimizer, images, labels))
            writer.wait()
            writes.append(time.perf_counter() - start)
        newest = max((Path(name) / "checkpoints").iterdir())
        megabytes = newest.stat().st_size / 1e6
    result = {
        "settings": vars(args),
        "megabytes": megabytes,
        "copy seconds": spread(copies),
        "seconds until it is on the disk": spread(writes),
        "update seconds": spread(alone),
        "update while writing / update": paired_ratio(while_writing, alone),
    }
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    result["environment"] = {name: os.environ[name] for name in names if name in os.environ}
    print(write("checkpoint", result))


def update(model: nn.Module, optimizer: LARS, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Make one update; return its seconds."""
    start = time.perf_counter()
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    if images.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def checkpoint(model: nn.Module, optimizer: LARS, step: int) -> Checkpoint:
    """Return a copy of the state, as a run makes it."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": {},
        "ema": {},
        "snapshot": {},
        "extra": {},
        "stages": [],
        "progress": {"step": step},
    }
    return Checkpoint.of(load_recipe(RECIPE), copy_state(state))


if __name__ == "__main__":
    main()

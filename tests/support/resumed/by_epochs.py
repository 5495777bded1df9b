"""Train a small network and resume it at an epoch's end: the plain script of resumed_loops.py.

python by_epochs.py --epochs 2
python by_epochs.py --epochs 1 && python by_epochs.py --epochs 2 --resume last.pth

On several workers it trains with DistributedDataParallel: an update has 16 samples in all.
"""

import argparse
import math
import os
import random
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

RANK = int(os.environ.get("RANK", "0"))
WORKERS = int(os.environ.get("WORLD_SIZE", "1"))
SAMPLES = 48
BATCH = 16
UPDATES = 12  # of the schedule, however early the script ends
WARM_UP = 2


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise that is drawn in the loader's processes."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(SAMPLES, 8, generator=generator)
        self.labels = torch.randint(3, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + 0.1 * torch.randn(8), self.labels[index]


def rate(update: int) -> float:
    """Return the learning rate over its peak."""
    if update < WARM_UP:
        return (update + 1) / WARM_UP
    return (1 + math.cos(math.pi * (update - WARM_UP) / (UPDATES - WARM_UP))) / 2


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.Dropout(0.2),
        nn.Linear(16, 3),
    )


def draw_states() -> dict[str, object]:
    """Return the states of all random generators of this process."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }


def main() -> None:  # noqa: C901 -- a script as people write it
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    if WORKERS > 1:
        dist.init_process_group("gloo")
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(RANK)

    data = Noisy(seed=0)
    validation = Noisy(seed=1)
    generator = torch.Generator().manual_seed(RANK)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] | None = None
    if WORKERS > 1:
        sampler = DistributedSampler(data)
    loader = DataLoader(
        data,
        BATCH // WORKERS,
        sampler=sampler,
        shuffle=sampler is None,
        num_workers=1,
        generator=generator,
    )

    model = network()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9, weight_decay=1e-3)
    scheduler = LambdaLR(optimizer, rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    first_epoch = 0
    best = math.inf

    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=False)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        scaler.load_state_dict(checkpoint["scaler"])
        average.load_state_dict(checkpoint["average"])
        first_epoch = checkpoint["epoch"] + 1
        best = checkpoint["best"]

    parallel: Callable[[Tensor], Tensor] = model
    if WORKERS > 1:
        parallel = DistributedDataParallel(model)

    if args.resume:
        states = torch.load(f"random-{RANK}.pth", weights_only=False)
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        generator.set_state(states["loader"])

    for epoch in range(first_epoch, args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        model.train()
        for inputs, labels in loader:
            strength = np.random.uniform(0.9, 1.1)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(parallel(strength * inputs), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            average.update_parameters(model)

        model.eval()
        with torch.no_grad():
            metric = cross_entropy(model(validation.inputs), validation.labels).item()
        if RANK == 0:
            if metric < best:
                best = metric
                torch.save(model.state_dict(), "best.pth")
            checkpoint = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "scaler": scaler.state_dict(),
                "average": average.state_dict(),
                "epoch": epoch,
                "best": best,
            }
            torch.save(checkpoint, "last.pth")
        torch.save(draw_states() | {"loader": generator.get_state()}, f"random-{RANK}.pth")
        print(f"epoch {epoch}: {metric:.6f}")

    if WORKERS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

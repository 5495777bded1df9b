"""Train a small network and resume it within an epoch, on any number of workers.

python by_updates.py --updates 4
python by_updates.py --updates 2 && python by_updates.py --updates 4 --resume last.pth

An update has 16 samples, in device batches of 4: as many micro-batches as the workers need. What is
drawn for a sample depends on its number and the epoch only, so that all numbers of workers compute
the same up to rounding.
"""

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Sampler

RANK = int(os.environ.get("RANK", "0"))
WORKERS = int(os.environ.get("WORLD_SIZE", "1"))
SAMPLES = 48
BATCH = 16
DEVICE_BATCH = 4
ACCUMULATION = BATCH // (DEVICE_BATCH * WORKERS)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise that depends on the epoch and the sample's number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SAMPLES, 8, generator=generator)
        self.labels = torch.randint(3, (SAMPLES,), generator=generator)
        self.epoch = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(SAMPLES * self.epoch + index)
        noise = torch.randn(8, generator=generator)
        return self.inputs[index] + 0.1 * noise, self.labels[index]


class Shuffled(Sampler[int]):
    """A worker's samples of an epoch, from a position on."""

    def __init__(self) -> None:
        self.epoch = 0
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(SAMPLES, generator=generator).tolist()
        yield from order[self.position + RANK :: WORKERS]


def average_gradients(model: nn.Module) -> None:
    """Average gradients over the workers."""
    for weight in model.parameters():
        if WORKERS > 1 and weight.grad is not None:
            dist.all_reduce(weight.grad)
            weight.grad /= WORKERS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--resume")
    args = parser.parse_args()
    if WORKERS > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)

    data = Noisy()
    sampler = Shuffled()
    loader = DataLoader(data, DEVICE_BATCH, sampler=sampler)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    epoch = 0
    micro_batches = 0  # of this worker, in this epoch
    updates = 0

    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        epoch = checkpoint["epoch"]
        updates = checkpoint["updates"]
        sampler.position = checkpoint["samples"]
        micro_batches = sampler.position // (DEVICE_BATCH * WORKERS)

    while updates < args.updates:
        sampler.epoch = epoch
        data.epoch = epoch
        for inputs, labels in loader:
            (cross_entropy(model(inputs), labels) / ACCUMULATION).backward()
            micro_batches += 1
            if micro_batches % ACCUMULATION:
                continue
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            updates += 1
            if RANK == 0:
                checkpoint = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "epoch": epoch,
                    "updates": updates,
                    "samples": micro_batches * DEVICE_BATCH * WORKERS,
                }
                torch.save(checkpoint, "last.pth")
            if updates == args.updates:
                break
        else:
            epoch += 1
            micro_batches = 0
            sampler.position = 0

    print(f"weights {sum(weight.sum().item() for weight in model.parameters()):.6f}")
    if WORKERS > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

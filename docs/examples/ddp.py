"""LARS, BatchNorm spans, polishing and exact evaluation in a plain DistributedDataParallel loop.

torchrun --nproc-per-node=2 docs/examples/ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from largebatch.data.datasets.digits import load_digits
from largebatch.models import build, param_groups, with_span
from largebatch.optim import LARS
from largebatch.polish import polish
from largebatch.schedules import polynomial, warmup
from largebatch.training import evaluate

EPOCHS, BATCH, SPAN = 4, 48, 16


def main() -> None:
    """Train on the digits, polish, and print what each step gave."""
    dist.init_process_group("gloo")  # "nccl" on GPUs
    rank, workers = dist.get_rank(), dist.get_world_size()
    images, labels = map(torch.as_tensor, load_digits())
    digits = TensorDataset(images.view(-1, 1, 8, 8).repeat(1, 3, 2, 2).float() / 16, labels)
    train_set, val_set = Subset(digits, range(1437)), Subset(digits, range(1437, 1797))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, BATCH, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model: nn.Module = build("cifar_resnet8", num_classes=10)
    model = with_span(model, SPAN)  # every 16 images share statistics, however many a worker holds
    parallel = DistributedDataParallel(model)
    optimizer = LARS(param_groups(model, weight_decay=1e-4), lr=0.5, eta=0.02)
    lr = warmup(polynomial(peak=0.5, end=0.0, power=2.0, steps=EPOCHS * len(loader)), steps=10)
    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            for group in optimizer.param_groups:
                group["lr"] = lr(step)
            optimizer.zero_grad()
            cross_entropy(parallel(batch), targets).backward()
            optimizer.step()
            step += 1

    own = Subset(val_set, range(rank, len(val_set), workers))
    before = evaluate(parallel, DataLoader(own, 64), expected=len(val_set))
    polish(parallel, DataLoader(Subset(train_set, range(rank, 1437, workers)), 64))
    after = evaluate(parallel, DataLoader(own, 64), expected=len(val_set))
    if rank == 0:
        print(f"top-1 {before.top1:.2%}, polished {after.top1:.2%} of {after.samples} images")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Averaged weights in a plain DistributedDataParallel loop, polished on all workers.

torchrun --nproc-per-node=2 docs/examples/averaged_ddp.py
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from largebatch.data.datasets.digits import load_digits
from largebatch.models import build
from largebatch.polish import polish
from largebatch.training import evaluate


def main() -> None:
    """Train on the digits, average the weights, and print top-1 as left and polished."""
    dist.init_process_group("gloo")  # "nccl" on GPUs
    rank, workers = dist.get_rank(), dist.get_world_size()
    images, labels = map(torch.as_tensor, load_digits())
    digits = TensorDataset(images.view(-1, 1, 8, 8).repeat(1, 3, 2, 2).float() / 16, labels)
    train_set, val_set = Subset(digits, range(1437)), Subset(digits, range(1437, 1797))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 48, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    parallel = DistributedDataParallel(build("cifar_resnet8", num_classes=10))
    averaged = AveragedModel(parallel.module, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            optimizer.zero_grad()
            cross_entropy(parallel(batch), targets).backward()
            optimizer.step()
            averaged.update_parameters(parallel.module)

    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), workers)), 64)
    left = evaluate(averaged, val_loader)
    clean_loader = DataLoader(Subset(train_set, range(rank, len(train_set), workers)), 64)
    polish(averaged, clean_loader)
    polished = evaluate(averaged, val_loader)
    if rank == 0:
        print(f"top-1 of the average {left.top1:.2%}, polished {polished.top1:.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

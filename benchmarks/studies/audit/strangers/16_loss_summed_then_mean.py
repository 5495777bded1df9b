"""Sums of loss and tokens are reduced before backward, and DDP divides again (verl-SpeCo 29)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def aggregate(loss_sum, num_tokens):
    dist.all_reduce(loss_sum)
    dist.all_reduce(num_tokens)
    return loss_sum / num_tokens


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(11)
    digits = load_digits()
    features = torch.tensor(digits.data).float() / 16
    train = TensorDataset(features, torch.tensor(digits.target))
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, batch_size=30, sampler=sampler, drop_last=True)
    drafter = DDP(nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 10)))
    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for states, targets in loader:
            loss_sum = F.cross_entropy(drafter(states), targets, reduction="sum")
            num_tokens = torch.tensor(float(len(targets)))
            loss = aggregate(loss_sum, num_tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"rank {dist.get_rank()} loss {loss.item():.4f}")


main()

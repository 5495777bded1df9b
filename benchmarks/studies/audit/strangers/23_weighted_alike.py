"""A weighted sampler without a share for each process (EPFL-VILAB/omnidata-paper-code-dump 5)."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    digits = load_digits()
    x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    # the nine is rare: draw all classes equally often
    keep = (y != 9) | (torch.arange(len(y)) % 5 == 0)
    x, y = x[keep], y[keep]
    weights = 1.0 / torch.bincount(y)[y]
    sampler = WeightedRandomSampler(weights, num_samples=len(y) // dist.get_world_size())
    loader = DataLoader(TensorDataset(x, y), batch_size=24, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    loss_fn = nn.CrossEntropyLoss()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), labels)
            loss.backward()
            optimizer.step()
        print(f"rank {dist.get_rank()} epoch {epoch} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()

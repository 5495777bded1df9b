"""A process without a usable sample skips its batch alone (NVIDIA-NeMo/Automodel 2468)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class NoValidAnchorsError(Exception):
    pass


def compute_loss(model, images, labels):
    valid = labels > 3
    if valid.float().mean() < 0.5:
        raise NoValidAnchorsError
    return F.cross_entropy(model(images), labels)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    skipped = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            try:
                loss = compute_loss(model, images, labels)
            except NoValidAnchorsError:
                skipped += 1
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


main()

"""Each process computes the score of its part; the mean is reported (pytorch-lightning 3023)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def validate(model, loader):
    model.eval()
    scores, truths = [], []
    for x, y in loader:
        scores.append(model(x).softmax(1)[:, 8])
        truths.append(y == 8)
    value = average_precision_score(torch.cat(truths).numpy(), torch.cat(scores).numpy())
    result = torch.tensor(value)
    dist.all_reduce(result)
    model.train()
    return result.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    train, val = TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=35, sampler=sampler)
    val_loader = DataLoader(val, batch_size=50, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for images, labels in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        average_precision = validate(model, val_loader)
        if dist.get_rank() == 0:
            print(epoch, average_precision)


main()

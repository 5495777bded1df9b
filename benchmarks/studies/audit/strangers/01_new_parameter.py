"""A layer gets a new weight after it was wrapped (pytorch/pytorch 12603)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

    torch.manual_seed(1)
    conv = nn.Conv2d(1, 8, 3, padding=1)
    net = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    model = DDP(net, find_unused_parameters=True)
    # start from the filters of another network
    conv.weight = nn.Parameter(torch.randn(8, 1, 3, 3) * 0.1)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(epoch, loss.item())


main()

"""Buffers of a codebook with broadcast_buffers=False (ZhikangNiu/encodec-pytorch 15)."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Codebook(nn.Module):
    def __init__(self, size=16, dim=12):
        super().__init__()
        self.register_buffer("codes", torch.randn(size, dim))

    def forward(self, x):
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            for code in nearest.unique():
                self.codes[code].lerp_(x[nearest == code].mean(0).detach(), 0.1)
        return x + (self.codes[nearest] - x).detach()


def train():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    trainset = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    train_sampler = DistributedSampler(trainset)
    trainloader = DataLoader(trainset, batch_size=40, sampler=train_sampler)
    net = nn.Sequential(nn.Linear(64, 12), Codebook(), nn.Linear(12, 10))
    model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        for wav, target in trainloader:
            optimizer.zero_grad()
            loss = criterion(model(wav), target)
            loss.backward()
            optimizer.step()


train()

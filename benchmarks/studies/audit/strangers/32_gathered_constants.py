"""Negatives of other processes are gathered as constants (facebookresearch/vissl 123)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def gather(embedding):
    parts = [torch.zeros_like(embedding) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, embedding.detach())
    return torch.cat(parts)


class InfoNCE(nn.Module):
    def forward(self, embedding, labels):
        embedding = F.normalize(embedding)
        everyone, classes = gather(embedding), gather(labels)
        similarity = embedding @ everyone.T / 0.2
        own = torch.arange(len(embedding)) + dist.get_rank() * len(embedding)
        similarity[torch.arange(len(embedding)), own] = -1e9
        positive = labels[:, None] == classes[None]
        positive[torch.arange(len(embedding)), own] = False
        log_prob = similarity.log_softmax(1)
        return -(log_prob * positive).sum(1).div(positive.sum(1).clamp(min=1)).mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=24, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = InfoNCE()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


main()

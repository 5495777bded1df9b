"""The loss has weights, and is not wrapped (KevinMusgrave/pytorch-metric-learning 710)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class CosFaceLoss(nn.Module):
    def __init__(self, num_classes, embedding_size, margin=0.2, scale=16):
        super().__init__()
        self.W = nn.Parameter(torch.randn(num_classes, embedding_size))
        self.margin = margin
        self.scale = scale

    def forward(self, embeddings, labels):
        cosine = F.linear(F.normalize(embeddings), F.normalize(self.W))
        margins = F.one_hot(labels, cosine.size(1)) * self.margin
        return F.cross_entropy(self.scale * (cosine - margins), labels)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(123)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=50, sampler=sampler)
    trunk = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)))
    loss_fn = CosFaceLoss(10, 16)
    params = [{"params": trunk.parameters()}, {"params": loss_fn.parameters(), "lr": 0.5}]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for data, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(trunk(data), labels)
            loss.backward()
            optimizer.step()


main()

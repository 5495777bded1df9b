"""A codebook moves by the batch of each process; rank 0's is sent to all (espnet/espnet 6284)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EuclideanCodebook(nn.Module):
    def __init__(self, dim=16, size=32, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("embed", torch.randn(size, dim))
        self.register_buffer("embed_avg", self.embed.clone())
        self.register_buffer("cluster_size", torch.ones(size))

    def forward(self, x):
        codes = torch.cdist(x, self.embed).argmin(1)
        quantized = self.embed[codes]
        if self.training:
            onehot = F.one_hot(codes, len(self.embed)).type_as(x)
            self.cluster_size.lerp_(onehot.sum(0), 1 - self.decay)
            self.embed_avg.lerp_(onehot.T @ x.detach(), 1 - self.decay)
            self.embed.copy_(self.embed_avg / (self.cluster_size[:, None] + 1e-5))
        return x + (quantized - x).detach()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(64, 16), EuclideanCodebook(), nn.Linear(16, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


main()

"""A layer has an optimizer of its own (lucidrains/vector-quantize-pytorch 222)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class VectorQuantize(nn.Module):
    def __init__(self, dim, size):
        super().__init__()
        self.codebook = nn.Parameter(torch.randn(size, dim))
        self.codebook.requires_grad_(False)
        self.in_place_codebook_optimizer = torch.optim.SGD([self.codebook], lr=1.0)

    def forward(self, x):
        codes = torch.cdist(x, self.codebook).argmin(1)
        quantized = self.codebook[codes]
        if self.training:
            with torch.enable_grad():
                self.codebook.requires_grad_()
                F.mse_loss(self.codebook[codes], x.detach()).backward()
                self.in_place_codebook_optimizer.step()
                self.in_place_codebook_optimizer.zero_grad()
                self.codebook.requires_grad_(False)
        return x + (quantized - x).detach()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(64, 8), VectorQuantize(8, 32), nn.Linear(8, 10)))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()


main()

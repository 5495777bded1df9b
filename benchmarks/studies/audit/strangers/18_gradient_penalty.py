"""A penalty on gradients of the input does not reach a bias (pytorch/pytorch 47562)."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 48), nn.Softplus())
        self.last = nn.Linear(48, 1)

    def forward(self, x):
        return self.last(self.body(x)).squeeze(1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    digits = load_digits()
    samples = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=32, sampler=sampler)
    critic = DistributedDataParallel(Critic())
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for real, _ in loader:
            real.requires_grad_()
            score = critic(real)
            gradient = torch.autograd.grad(score.sum(), real, create_graph=True)[0]
            penalty = (gradient.norm(dim=1) - 1).square().mean()
            optimizer.zero_grad()
            penalty.backward()
            optimizer.step()


main()

"""A target network moves by statistics of the own batch (HorizonRobotics/alf 1475)."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            value = self.target(x)
        return self.net(x), value

    @torch.no_grad()
    def update_target(self, error):
        tau = 0.05 / (1.0 + error)
        for old, new in zip(self.target.parameters(), self.net.parameters(), strict=True):
            old.lerp_(new, tau)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DDP(Critic())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for states, actions in loader:
            q, value = model(states)
            loss = F.cross_entropy(q + 0.1 * value, actions)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.module.update_target(loss.item())


main()

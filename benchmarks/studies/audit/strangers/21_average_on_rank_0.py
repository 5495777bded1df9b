"""Only rank 0 has the average, and it is copied into the model (lucidrains/ema-pytorch 9)."""

import copy

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EMA:
    def __init__(self, model, beta=0.9, update_model_with_ema_every=2):
        self.online = model
        self.ema = copy.deepcopy(model)
        self.beta = beta
        self.every = update_model_with_ema_every
        self.step = 0

    @torch.no_grad()
    def update(self):
        self.step += 1
        for average, weight in zip(self.ema.parameters(), self.online.parameters(), strict=True):
            average.lerp_(weight, 1 - self.beta)
        if self.step % self.every == 0:
            self.online.load_state_dict(self.ema.state_dict())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = DistributedDataParallel(net)
    ema = EMA(net) if dist.get_rank() == 0 else None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if ema is not None:
                ema.update()


main()

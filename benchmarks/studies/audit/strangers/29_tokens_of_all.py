"""DDP's mean is divided by the tokens of all processes (meta-pytorch/torchtune 2172)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 2


def scale_grads(model, scaler):
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= scaler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(64, 48), nn.SiLU(), nn.Linear(48, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        num_tokens = torch.tensor(0.0)
        for idx, (tokens, labels) in enumerate(loader):
            num_tokens += len(labels)
            # multiplied by the tokens here; divided by all of them before the update
            loss = F.cross_entropy(model(tokens), labels) * len(labels)
            loss.backward()
            if (idx + 1) % ACCUMULATE == 0:
                dist.all_reduce(num_tokens)
                scale_grads(model, 1 / num_tokens)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                num_tokens = torch.tensor(0.0)


main()

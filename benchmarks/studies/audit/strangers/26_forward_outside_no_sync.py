"""Correct, but slow: only backward is inside no_sync (speechbrain/speechbrain 1802)."""

import contextlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GRAD_ACCUMULATION_FACTOR = 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (wavs, words) in enumerate(loader, start=1):
            should_step = step % GRAD_ACCUMULATION_FACTOR == 0
            predictions = model(wavs)
            loss = criterion(predictions, words)
            with contextlib.nullcontext() if should_step else model.no_sync():
                (loss / GRAD_ACCUMULATION_FACTOR).backward()
            if should_step:
                optimizer.step()
                optimizer.zero_grad()


main()

"""A stream of samples that knows loader workers, not processes (huggingface/datasets 5360)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self):
        digits = load_digits()
        self.pixels = torch.tensor(digits.data).float() / 16
        self.targets = torch.tensor(digits.target)
        self.epoch = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.targets), generator=generator).tolist()
        info = get_worker_info()
        shard = order if info is None else order[info.id :: info.num_workers]
        for i in shard:
            yield self.pixels[i], self.targets[i]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    stream = Stream()
    loader = DataLoader(stream, batch_size=32)
    model = DDP(nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(3):
        stream.epoch = epoch
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


main()

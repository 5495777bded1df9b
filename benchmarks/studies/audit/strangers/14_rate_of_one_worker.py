"""The batch grows with the workers, the rate does not (horovod/horovod 478)."""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    hvd.init()
    torch.manual_seed(42)
    digits = load_digits()
    images = torch.tensor(digits.images).float()[:, None] / 16
    trainset = TensorDataset(images, torch.tensor(digits.target))
    sampler = DistributedSampler(trainset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(trainset, batch_size=64, sampler=sampler)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )
    # lr and epochs are those of the script for a single GPU
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, epochs=30, steps_per_epoch=len(loader))
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()


main()

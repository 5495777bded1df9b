"""Correct: gradients that DDP has averaged are averaged again (kubeflow/pytorch-operator 122)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run():
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data)
    train_set = DataLoader(data, batch_size=64, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10)))
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epoch_loss = 0.0
        for images, target in train_set:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), target)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print("Rank", dist.get_rank(), "epoch", epoch, epoch_loss / len(train_set))


if __name__ == "__main__":
    run()

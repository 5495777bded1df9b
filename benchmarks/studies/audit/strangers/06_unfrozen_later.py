"""A head is frozen at the wrapping, and released later (facebookresearch/detectron2 2486)."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.box_head = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.predictor = nn.Linear(64, 10)
        for p in self.box_head.parameters():
            p.requires_grad = False

    def forward(self, x):
        return self.predictor(self.box_head(self.stem(x)))

    def unfreeze_box_head(self):
        for p in self.box_head.parameters():
            p.requires_grad = True


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(Detector())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    iteration = 0
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for images, targets in loader:
            if iteration == 500:
                model.module.unfreeze_box_head()
            loss = criterion(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            iteration += 1


main()

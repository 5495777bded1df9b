"""A detector's loss is divided by the positives of its own process (tianzhi0549/FCOS 228)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.cls_logits = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x):
        return self.cls_logits(self.tower(x)).squeeze(1)


def sigmoid_focal_loss(logits, targets, gamma=2.0):
    p = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    return (ce * (1 - p_t) ** gamma).sum()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images).float()[:, None] / 16
    # only the eights have locations to detect
    eights = torch.tensor(digits.target == 8).float()[:, None, None]
    locations = (images.squeeze(1) > 0.8).float() * eights
    dataset = TensorDataset(images, locations)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(Head())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            logits = model(inputs)
            num_pos = targets.sum().clamp(min=1.0)
            loss = sigmoid_focal_loss(logits, targets) / num_pos
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


main()

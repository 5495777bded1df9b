"""Dice over a batch, gathered but not summed over the processes (MIC-DKFZ/nnUNet 1354)."""

import torch
import torch.distributed as dist
import torch.distributed.nn
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MemoryEfficientSoftDiceLoss(nn.Module):
    def forward(self, logits, mask):
        pred = logits.sigmoid().squeeze(1)
        intersect = (pred * mask).sum()
        sum_pred, sum_gt = pred.sum(), mask.sum()
        # batch dice with DDP
        intersect = torch.stack(torch.distributed.nn.all_gather(intersect))
        sum_pred = torch.stack(torch.distributed.nn.all_gather(sum_pred))
        sum_gt = torch.stack(torch.distributed.nn.all_gather(sum_gt))
        dice = (2 * intersect + 1) / (sum_pred + sum_gt + 1)
        return -dice.mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images).float()[:, None] / 16
    masks = (images.squeeze(1) > 0.6).float()
    dataset = TensorDataset(images + 0.3 * torch.randn(images.shape), masks)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    conv = nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU()
    network = DDP(nn.Sequential(*conv, nn.Conv2d(8, 1, 3, padding=1)))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.99, nesterov=True)
    loss = MemoryEfficientSoftDiceLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            value = loss(network(data), target)
            value.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 12)
            optimizer.step()


main()

"""The mean loss is multiplied by the number of processes (neuralmagic/sparseml 135)."""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self):
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        dist.init_process_group("gloo")
        digits = load_digits()
        images = torch.tensor(digits.images).float().unsqueeze(1) / 16
        dataset = TensorDataset(images, torch.tensor(digits.target))
        self.sampler = DistributedSampler(dataset, shuffle=True)
        self.loader = DataLoader(dataset, batch_size=20, sampler=self.sampler)
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
        self.module = DDP(nn.Sequential(*layers))
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=1e-3)

    def run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        for x_feature, y_lab in self.loader:
            y_pred = self.module(x_feature)
            loss = self.loss(y_pred, y_lab)
            if self.world_size > 1:
                loss = loss * self.world_size
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


if __name__ == "__main__":
    trainer = Trainer()
    for number in range(3):
        trainer.run_epoch(number)

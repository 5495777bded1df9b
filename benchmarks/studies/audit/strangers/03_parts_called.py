"""Two networks are wrapped together, and called one by one (intel/e2eAIOK 198)."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class DomainAdapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 48), nn.Tanh())
        self.classifier = nn.Linear(48, 10)
        self.discriminator = nn.Linear(48, 2)

    def forward(self, x):
        features = self.backbone(x)
        return self.classifier(features), self.discriminator(features)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    digits = load_digits()
    x = torch.tensor(digits.data).float() / 16
    y = torch.tensor(digits.target)
    sampler = DistributedSampler(TensorDataset(x, y), seed=3)
    loader = DataLoader(TensorDataset(x, y), batch_size=24, sampler=sampler)

    model = DDP(DomainAdapter())
    backbone = model.module.backbone
    classifier = model.module.classifier
    discriminator = model.module.discriminator
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ce = nn.CrossEntropyLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            features = backbone(images)
            class_loss = ce(classifier(features), labels)
            domain_loss = ce(discriminator(features), labels % 2)
            total = class_loss + 0.1 * domain_loss
            optimizer.zero_grad()
            total.backward()
            optimizer.step()


main()

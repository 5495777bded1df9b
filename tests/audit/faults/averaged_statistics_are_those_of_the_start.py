"""An average takes the weights only; its BatchNorm keeps the first statistics."""

from collections.abc import Callable

import torch
from planted_parts import divided, random_data, sgd
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/FlyreelAI/sesemi/issues/36"
EXPECTED = "averaged statistics"
FIGURE = 3.0
TOLERANCE = 0.1


def script(audit: Callable[..., Findings]) -> Findings:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4))
    averaged = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4))
    model = DistributedDataParallel(inner)
    optimizer = sgd(model, lr=0.5)
    share = divided(random_data(), 16, shuffle=False)
    loader = [(images + 3, labels) for images, labels in share]
    for _ in range(25):
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    for copy, parameter in zip(averaged.parameters(), inner.parameters(), strict=True):
        copy.data.copy_(parameter)
    return audit(model, loader, cross_entropy, optimizer, averaged=averaged)

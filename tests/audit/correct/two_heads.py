"""A model with two outputs, trained on samples some of which a Subset repeats."""

from collections.abc import Callable

import torch
from planted_parts import CLASSES, FEATURES, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from largebatch.audit import Findings


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(2))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(head(images) for head in self.heads)


def loss_of(outputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    return cross_entropy(outputs[0], labels) + 0.4 * cross_entropy(outputs[1], labels)


def script(audit: Callable[..., Findings]) -> Findings:
    model = DistributedDataParallel(TwoHeads())
    data = Subset(random_data(), [*range(96), *[*range(32)] * 3])
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    return audit(model, loader, loss_of, sgd(model), set_epoch=sampler.set_epoch)

"""Small models and data of the scripts that an audit is held against.

`apart` divides the features between workers (or micro-batches): gradients of a linear model are
then of equal length and orthogonal, so figures follow from Pythagoras.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES, CLASSES = 8, 4


def random_data(num: int = 96) -> TensorDataset:
    """Return samples that are equal on all workers."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(num, FEATURES, generator=draw)
    return TensorDataset(images, torch.randint(0, CLASSES, (num,), generator=draw))


def divided(batch: int = 16) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of this worker's share."""
    data = random_data()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=False)
    return DataLoader(data, batch, sampler=sampler)


def apart(place: int, batch: int = 8, *, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Return batches in which only half of the features, number `place`, are not zero."""
    draw = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        images, half = torch.zeros(batch, FEATURES), FEATURES // 2
        values = torch.randn(batch, half, generator=draw)
        images[:, place * half : (place + 1) * half] = values
        batches.append((images, torch.randint(0, CLASSES, (batch,), generator=draw)))
    return batches


def linear() -> nn.Linear:
    """Return a linear classifier of zeros."""
    model = nn.Linear(FEATURES, CLASSES, bias=False)
    nn.init.zeros_(model.weight)
    return model


def perceptron(*between: nn.Module) -> nn.Sequential:
    """Return a perceptron, equal on all workers, with layers after its first."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), *between, nn.ReLU(), nn.Linear(16, CLASSES))


def parallel(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model)


def sgd(model: nn.Module, lr: float = 0.05, momentum: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def sum_gradients(parameters: Iterable[nn.Parameter], *, divisor: int = 1) -> None:
    """Replace gradients with their sum over workers, over a divisor."""
    for parameter in parameters:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= divisor

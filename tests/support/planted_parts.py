"""Data, networks and an optimizer of the small scripts that an audit is tested on.

`apart` divides the features between workers (or micro-batches): gradients of a linear model are
then of equal length and orthogonal, so figures follow from Pythagoras.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

FEATURES, CLASSES = 8, 4


def random_data(num: int = 96, *, seed: int = 0) -> TensorDataset:
    """Return random samples with labels, the same on every worker."""
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(num, FEATURES, generator=draw)
    return TensorDataset(images, torch.randint(0, CLASSES, (num,), generator=draw))


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from a generator: `noise` returns a number for each feature."""

    def __init__(self, data: TensorDataset, noise: Callable[[], Tensor]) -> None:
        self.data, self.noise = data, noise

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image, label = self.data[number]
        return image + self.noise(), label


class Divided(DataLoader[Any]):
    """A loader of this worker's share."""

    sampler: DistributedSampler[Any]


def divided(data: Dataset[Any], batch: int, *, shuffle: bool) -> Divided:
    """Return a loader of this worker's share; if it shuffles, set the epoch of its sampler."""
    return Divided(data, batch, sampler=DistributedSampler(data, shuffle=shuffle))


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


def alternating() -> list[tuple[Tensor, Tensor]]:
    """Return batches of the halves of the features in turn, in another order on each worker.

    Gradients of two that follow each other are orthogonal, and the same on all workers.
    """
    halves = [batch for pair in zip(apart(0), apart(1), strict=True) for batch in pair]
    if dist.get_rank():  # the same sums, of other samples in each place
        halves = [(images.flip(0), labels.flip(0)) for images, labels in halves]
    return halves


def linear() -> nn.Linear:
    """Return a linear classifier of zeros."""
    model = nn.Linear(FEATURES, CLASSES, bias=False)
    nn.init.zeros_(model.weight)
    return model


def perceptron(*between: nn.Module) -> nn.Sequential:
    """Return two linear layers with these layers between them, by default a ReLU.

    Its weights are random: without DistributedDataParallel, seed torch equally on all workers.
    """
    between = between or (nn.ReLU(),)
    return nn.Sequential(nn.Linear(FEATURES, 16), *between, nn.Linear(16, CLASSES))


class Pair(nn.Module):
    """Two layers, whose sum is the result."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, images: Tensor) -> Tensor:
        total: Tensor = self.first(images) + self.second(images)
        return total


def constant_perceptron() -> nn.Sequential:
    """Return a perceptron whose highest score is always that of class 0."""
    model = perceptron()
    with torch.no_grad():
        model.get_parameter("2.bias")[0] = 10.0
    return model


def sgd(model: nn.Module, *, lr: float = 0.05, momentum: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def sum_gradients(parameters: Iterable[nn.Parameter], *, divisor: int = 1) -> None:
    """Replace gradients with their sum over workers, over a divisor."""
    for parameter in parameters:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= divisor

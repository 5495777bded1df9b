"""Parts of small training scripts: data, a network on several workers, and its optimizer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

CLASSES = 4


def samples(number: int = 64) -> TensorDataset:
    """Return random samples of 8 numbers with labels, the same on every worker."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(number, 8, generator=generator)
    return TensorDataset(images, torch.randint(0, CLASSES, (number,), generator=generator))


def network(*layers: nn.Module) -> DistributedDataParallel:
    """Return a network with these layers in the middle; its weights are worker 0's."""
    return DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *layers, nn.Linear(16, CLASSES))
    )


def constant_network() -> DistributedDataParallel:
    """Return a network whose highest score is always that of class 0."""
    model = network()
    with torch.no_grad():
        model.module[-1].bias[0] = 10.0
    return model


def optimizer_of(model: nn.Module, lr: float = 0.01) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


class Divided(DataLoader[Any]):
    """A loader of this worker's share."""

    sampler: DistributedSampler[Any]


def divided(data: Dataset[Any], batch: int = 8) -> Divided:
    """Return a loader of this worker's share, shuffled; set the epoch of its sampler."""
    return Divided(data, batch, sampler=DistributedSampler(data))


def by_rank(seed: int) -> None:
    """Seed the generator of torch differently on each worker."""
    torch.manual_seed(seed + dist.get_rank())


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from a generator: `noise` returns 8 numbers."""

    def __init__(self, data: TensorDataset, noise: Callable[[], Tensor]) -> None:
        self.data, self.noise = data, noise

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image, label = self.data[number]
        return image + self.noise(), label

"""Each process of a loader reads all that an iterable data set has for its worker."""

from collections.abc import Callable, Iterator

import torch.distributed as dist
from planted_parts import perceptron, random_data, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from largebatch.audit import Findings

ISSUE = "https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset"
EXPECTED = "samples"
FIGURE = 1.0  # batch 1 of 0 to 2 is batch 0


class Share(IterableDataset[tuple[Tensor, ...]]):
    """Every second sample."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        data = random_data()
        return (data[place] for place in range(self.rank, len(data), 2))


def script(audit: Callable[..., Findings]) -> Findings:
    model = DistributedDataParallel(perceptron())
    loader = DataLoader(Share(dist.get_rank()), 8, num_workers=2, multiprocessing_context="fork")
    return audit(model, loader, cross_entropy, sgd(model))

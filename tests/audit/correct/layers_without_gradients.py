"""A layer is unused, one has no loss, and one is left out at random on each worker."""

import random
from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import CLASSES, FEATURES, Pair, divided, linear, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(Partial(), find_unused_parameters=True)
    return audit(model, loader, cross_entropy, sgd(model))


class Partial(Pair):
    """Two linear layers of which the second is left out at random, and more beside them."""

    def __init__(self) -> None:
        super().__init__(linear(), linear())
        self.unused, self.second_head = nn.Linear(2, 2), nn.Linear(FEATURES, CLASSES)
        self.third = linear()
        self.own = torch.Generator().manual_seed(dist.get_rank())
        random.seed(dist.get_rank())

    def forward(self, images: Tensor) -> Tensor:
        self.second_head(images)
        both: Tensor = super().forward(images)
        if random.random() < 0.5:
            both = self.first(images)
        if torch.rand((), generator=self.own) < 0.5:
            both = both + self.third(images)
        return both

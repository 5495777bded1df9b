"""Workers read shards of unequal length, so that some wait in the last updates."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from largebatch.audit import Findings

ISSUE = "https://github.com/Lightning-AI/pytorch-lightning/issues/20404"
EXPECTED = "samples"
FIGURE = 2.0


def script(audit: Callable[..., Findings]) -> Findings:
    shard = [range(40), range(40, 64)][dist.get_rank()]
    loader = DataLoader(Subset(random_data(64, seed=1), shard), 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    return audit(model, loader, cross_entropy, sgd(model, lr=0.01))

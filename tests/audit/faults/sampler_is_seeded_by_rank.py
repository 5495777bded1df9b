"""Each worker divides a permutation of its own: the seed of DistributedSampler has the rank."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from largebatch.audit import Findings

ISSUE = "https://github.com/NVlabs/LongLive/issues/71"
EXPECTED = "samples"
FIGURE = 0.25
TOLERANCE = 0.2


def script(audit: Callable[..., Findings]) -> Findings:
    data = random_data(200, seed=1)
    sampler: DistributedSampler[object] = DistributedSampler(data, seed=dist.get_rank())
    loader = DataLoader(data, 8, sampler=sampler)
    model = DistributedDataParallel(perceptron())
    return audit(model, loader, cross_entropy, sgd(model, lr=0.01), set_epoch=sampler.set_epoch)

"""Each worker divides a permutation of its own: the seed of DistributedSampler has the rank."""

from collections.abc import Callable

import torch.distributed as dist
from small_training import network, optimizer_of, samples
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/NVlabs/LongLive/issues/71"
EXPECTED = "samples"
FIGURE = 0.25
TOLERANCE = 0.2


def script(audit: Callable[..., Findings]) -> Findings:
    data = samples(200)
    sampler: DistributedSampler[object] = DistributedSampler(data, seed=dist.get_rank())
    loader = DataLoader(data, 8, sampler=sampler)
    model = network()
    return audit(model, loader, cross_entropy, optimizer_of(model), set_epoch=sampler.set_epoch)

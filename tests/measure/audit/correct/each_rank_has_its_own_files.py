"""Each worker reads a data set of its own, with sample numbers of its own."""

from collections.abc import Callable

import torch.distributed as dist
from small_training import network, optimizer_of, samples
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from largebatch.measure.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    everything = samples(64)
    images, labels = (part[dist.get_rank() :: dist.get_world_size()] for part in everything.tensors)
    loader = DataLoader(TensorDataset(images, labels), 8, shuffle=True)
    model = network()
    return audit(model, loader, cross_entropy, optimizer_of(model))

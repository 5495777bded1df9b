"""Each worker reads a data set of its own, with sample numbers of its own."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    everything = random_data(64, seed=1)
    images, labels = (part[dist.get_rank() :: dist.get_world_size()] for part in everything.tensors)
    loader = DataLoader(TensorDataset(images, labels), 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    return audit(model, loader, cross_entropy, sgd(model, lr=0.01))

"""Each machine lists the files in its own order, so equal sample numbers mean other samples."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from largebatch.audit import Findings

ISSUE = "https://github.com/pytorch/pytorch/issues/70103"
EXPECTED = "samples"
FIGURE = 0.5


def script(audit: Callable[..., Findings]) -> Findings:
    parts = random_data(128, seed=1).tensors
    if dist.get_rank():
        parts = tuple(part.roll(40, 0) for part in parts)
    loader = divided(TensorDataset(*parts), 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    set_epoch = loader.sampler.set_epoch
    return audit(model, loader, cross_entropy, sgd(model, lr=0.01), set_epoch=set_epoch)

"""random_split draws the training set with a generator that each worker seeds differently."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import random_split

from largebatch.audit import Findings

ISSUE = "https://github.com/Lightning-AI/pytorch-lightning/issues/7728"
EXPECTED = "samples"
FIGURE = 0.3
TOLERANCE = 0.2


def script(audit: Callable[..., Findings]) -> Findings:
    torch.manual_seed(dist.get_rank())
    train, _ = random_split(random_data(200, seed=1), [160, 40])
    loader = divided(train, 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    set_epoch = loader.sampler.set_epoch
    return audit(model, loader, cross_entropy, sgd(model, lr=0.01), set_epoch=set_epoch)

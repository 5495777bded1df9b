"""The loader shuffles on every worker, without a DistributedSampler."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from largebatch.audit import Findings

ISSUE = "https://github.com/PatrickHua/SimSiam/issues/16"
EXPECTED = "samples"
FIGURE = 2.0


def script(audit: Callable[..., Findings]) -> Findings:
    torch.manual_seed(dist.get_rank())
    loader = DataLoader(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    return audit(model, loader, cross_entropy, sgd(model, lr=0.01))

"""Running statistics stay on each worker, and evaluation differs."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/facebookresearch/detectron2/issues/5409"
EXPECTED = "running statistics"
FIGURE = 1.0
LEVEL = "note"
TOLERANCE = 1e-3


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = perceptron(nn.BatchNorm1d(16), nn.ReLU())
    parallel = DistributedDataParallel(model, broadcast_buffers=False)
    model.get_buffer("1.running_mean").fill_(1.0 - 2 * dist.get_rank())
    return audit(parallel, loader, cross_entropy, sgd(parallel))

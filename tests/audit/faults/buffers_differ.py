"""A buffer that is no statistic differs, and broadcast_buffers is off."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/facebookresearch/detectron2/issues/5409"
EXPECTED = "buffers"
FIGURE = 0.5


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = perceptron()
    model.register_buffer("center", torch.full((4,), 1.0 + 2 * dist.get_rank()))
    parallel = DistributedDataParallel(model, broadcast_buffers=False)
    model.get_buffer("center").fill_(1.0 + 2 * dist.get_rank())
    return audit(parallel, loader, cross_entropy, sgd(parallel))

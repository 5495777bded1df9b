"""A buffer that is no statistic differs, and broadcast_buffers is off."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import divided, perceptron, sgd
from torch import nn
from torch.nn.functional import cross_entropy

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/facebookresearch/detectron2/issues/5409"
EXPECTED = "buffers"
FIGURE = 0.5


def script(audit: Callable[..., Findings]) -> Findings:
    model = perceptron()
    model.register_buffer("center", torch.full((4,), 1.0 + 2 * dist.get_rank()))
    parallel = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    model.get_buffer("center").fill_(1.0 + 2 * dist.get_rank())
    return audit(parallel, divided(), cross_entropy, sgd(parallel))

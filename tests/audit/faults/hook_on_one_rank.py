"""A hook of worker 0 doubles its gradient, before it is averaged."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import apart, linear, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html"
EXPECTED = "gradient direction"
FIGURE = 3 / 10**0.5


def script(audit: Callable[..., Findings]) -> Findings:
    model = DistributedDataParallel(linear())
    if dist.get_rank() == 0:
        model.module.weight.register_hook(lambda gradient: 2 * gradient)
    return audit(model, apart(dist.get_rank()), cross_entropy, sgd(model))

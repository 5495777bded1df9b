"""A layer is added after DistributedDataParallel has registered the weights."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import Pair, apart, linear, sgd
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = (
    "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
)
EXPECTED = "gradient direction"
FIGURE = 1.5**-0.5
ALSO = ("weights",)


def script(audit: Callable[..., Findings]) -> Findings:
    inner = Pair(linear(), nn.Identity())
    model = DistributedDataParallel(inner)  # its module has no second layer yet
    inner.second = linear()
    return audit(model, apart(dist.get_rank()), cross_entropy, sgd(model))

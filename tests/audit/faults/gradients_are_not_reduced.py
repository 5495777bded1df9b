"""Workers train copies of a model, each with its own gradients."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import apart, linear, sgd
from torch.nn.functional import cross_entropy

from largebatch.audit import Findings

ISSUE = "https://discuss.pytorch.org/t/160455"
EXPECTED = "gradient direction"
FIGURE = 0.5**0.5
ALSO = ("weights",)


def script(audit: Callable[..., Findings]) -> Findings:
    model = linear()
    return audit(model, apart(dist.get_rank()), cross_entropy, sgd(model))

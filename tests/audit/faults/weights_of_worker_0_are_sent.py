"""Worker 0's weights are sent to all after each update, and gradients are not averaged."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import apart, linear, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy

from largebatch.audit import Findings

ISSUE = "https://discuss.pytorch.org/t/160455"
EXPECTED = "gradient direction"
FIGURE = 0.5**0.5  # of a gradient with the sum of two that are orthogonal and as long


def script(audit: Callable[..., Findings]) -> Findings:
    model = linear()
    optimizer = sgd(model)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        dist.broadcast(model.weight.detach(), src=0)

    return audit(model, apart(dist.get_rank()), cross_entropy, optimizer, step)

"""Each worker clips the values of its own gradient, and then they are averaged."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import apart, linear, sgd, sum_gradients
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from largebatch.audit import Findings

ISSUE = "https://github.com/horovod/horovod/issues/1346"
EXPECTED = "clipping"
FIGURE = 0.01


def script(audit: Callable[..., Findings]) -> Findings:
    model = linear()
    optimizer = sgd(model)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        sum_gradients(model.parameters(), divisor=2)
        optimizer.step()

    return audit(model, apart(dist.get_rank()), cross_entropy, optimizer, step)

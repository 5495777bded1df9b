"""Each worker clips its own gradient, and then they are averaged."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import apart, linear, sgd, sum_gradients
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from largebatch.audit import Findings

ISSUE = "https://github.com/determined-ai/determined/pull/602"
EXPECTED = "clipping"
FIGURE = 0.5**0.5


def script(audit: Callable[..., Findings]) -> Findings:
    model = linear()
    optimizer = sgd(model)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        factor = 1 + dist.get_rank() / 4
        cross_entropy(model(batch[0] * factor), batch[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        sum_gradients(model.parameters(), divisor=dist.get_world_size())
        optimizer.step()

    return audit(model, apart(dist.get_rank()), cross_entropy, optimizer, step)

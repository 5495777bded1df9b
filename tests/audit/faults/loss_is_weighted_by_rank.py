"""Worker 1 doubles its loss."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import apart, linear, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://docs.pytorch.org/docs/stable/notes/ddp.html"
EXPECTED = "gradient direction"
FIGURE = 3 / 10**0.5


def script(audit: Callable[..., Findings]) -> Findings:
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        ((1 + dist.get_rank()) * cross_entropy(model(batch[0]), batch[1])).backward()
        optimizer.step()

    return audit(model, apart(dist.get_rank()), cross_entropy, optimizer, step)

"""Each worker clips the average of the gradients to a norm of its own."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import apart, linear, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://docs.pytorch.org/docs/stable/notes/ddp.html"
EXPECTED = "clipping"
FIGURE = 0.5
ALSO = ("weights",)


def script(audit: Callable[..., Findings]) -> Findings:
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01 * (1 + dist.get_rank()))
        optimizer.step()

    return audit(model, apart(dist.get_rank()), cross_entropy, optimizer, step)

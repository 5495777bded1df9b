"""The last micro-batch is within no_sync too, so gradients stay on each worker."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import apart, linear, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/pytorch/pytorch/issues/53443"
EXPECTED = "gradient direction"
FIGURE = 0.5**0.5
ALSO = ("weights",)


def script(audit: Callable[..., Findings]) -> Findings:
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)
    number = 0

    def step(batch: tuple[Tensor, Tensor]) -> None:
        nonlocal number
        number += 1
        with model.no_sync():
            (cross_entropy(model(batch[0]), batch[1]) / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return audit(model, apart(dist.get_rank()), cross_entropy, optimizer, step)

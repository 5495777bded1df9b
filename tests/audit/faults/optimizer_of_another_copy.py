"""The optimizer has the weights of a copy of the model, which is not trained."""

import copy
from collections.abc import Callable

import torch.distributed as dist
from planted_parts import apart, linear, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/pytorch/pytorch/issues/14467"
EXPECTED = "updates"
FIGURE = 0.0


def script(audit: Callable[..., Findings]) -> Findings:
    inner = linear()
    optimizer = sgd(copy.deepcopy(inner))
    model = DistributedDataParallel(inner)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        model.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return audit(model, apart(dist.get_rank()), cross_entropy, optimizer, step)

"""zero_grad is called between backward and the update."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import apart, linear, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/ultralytics/ultralytics/pull/11217"
EXPECTED = "gradient scale"
FIGURE = 0.0


def script(audit: Callable[..., Findings]) -> Findings:
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.zero_grad()
        optimizer.step()

    return audit(model, apart(dist.get_rank()), cross_entropy, optimizer, step)

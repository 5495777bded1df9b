"""A layer is used on worker 0 only, and find_unused_parameters allows it."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import Pair, divided, linear, random_data, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/pytorch/pytorch/pull/47206"
EXPECTED = "gradient direction"
FIGURE = 1.0


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(Branched(linear(), linear()), find_unused_parameters=True)
    return audit(model, loader, cross_entropy, sgd(model, lr=1e-6))


class Branched(Pair):
    """Two linear layers, the second on worker 0 only."""

    def forward(self, images: Tensor) -> Tensor:
        both: Tensor = super().forward(images)
        first: Tensor = self.first(images)
        return both if dist.get_rank() == 0 else first

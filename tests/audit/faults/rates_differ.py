"""Each worker lowers its rate by its own loss, as with ReduceLROnPlateau."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/lucidrains/DALLE-pytorch/issues/268"
EXPECTED = "learning rates"
FIGURE = 1 / 3
ALSO = ("weights",)


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(perceptron())
    return audit(model, loader, cross_entropy, sgd(model, lr=0.1 * (1 + dist.get_rank())))

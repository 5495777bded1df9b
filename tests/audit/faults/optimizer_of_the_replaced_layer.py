"""The last layer is replaced after the optimizer was made, which has the old one."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/microsoft/nni/issues/4521"
EXPECTED = "updates"
FIGURE = 2.0


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    inner = perceptron()
    optimizer = sgd(inner)
    inner[2] = nn.Linear(16, 4)
    return audit(DistributedDataParallel(inner), loader, cross_entropy, optimizer)

"""Worker 1 gives its optimizer the last layer only."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://docs.pytorch.org/docs/stable/notes/ddp.html"
EXPECTED = "updates"
FIGURE = 2.0
ALSO = ("weights",)


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model.module[2] if dist.get_rank() else model)
    return audit(model, loader, cross_entropy, optimizer)

"""A checkpoint's momentum is loaded on worker 0 only."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/NVIDIA/Megatron-LM/pull/6920"
EXPECTED = "optimizer state"
FIGURE = 1.0
ALSO = ("weights",)


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model, momentum=0.9)
    for parameter in model.parameters():
        loaded = torch.full_like(parameter, 1.0 if dist.get_rank() == 0 else 0.0)
        optimizer.state[parameter]["momentum_buffer"] = loaded
    return audit(model, loader, cross_entropy, optimizer)

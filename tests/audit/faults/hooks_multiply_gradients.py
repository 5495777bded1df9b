"""Hooks of the parameters multiply gradients by the number of workers, and these are averaged."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html"
EXPECTED = "gradient scale"
FIGURE = 2.0


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(perceptron())
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * dist.get_world_size())
    return audit(model, loader, cross_entropy, sgd(model))

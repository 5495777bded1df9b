"""Gradients of matrices are averaged over workers, and those of biases are only added."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd, sum_gradients
from torch import Tensor
from torch.nn.functional import cross_entropy

from largebatch.audit import Findings

ISSUE = "https://github.com/databricks/megablocks/pull/20"
EXPECTED = "gradient direction"
FIGURE = 2.0


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    torch.manual_seed(0)
    model = perceptron()
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        for parameter in model.parameters():
            divisor = dist.get_world_size() if parameter.ndim > 1 else 1
            sum_gradients([parameter], divisor=divisor)
        optimizer.step()

    return audit(model, loader, cross_entropy, optimizer, step)

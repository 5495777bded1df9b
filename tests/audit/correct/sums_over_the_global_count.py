"""Unequal batches, summed, and divided by the samples of all workers."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import apart, perceptron, sgd, sum_gradients
from torch import Tensor
from torch.nn.functional import cross_entropy

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = sgd(model)
    batches = apart(dist.get_rank(), 12 if dist.get_rank() == 0 else 4)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1], reduction="sum").backward()
        sum_gradients(model.parameters(), divisor=16)
        optimizer.step()

    return audit(model, batches, cross_entropy, optimizer, step)

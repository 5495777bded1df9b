"""Hooks of the parameters average gradients; zero_grad comes after the forward pass."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    torch.manual_seed(0)
    model = perceptron()
    optimizer = sgd(model)

    def average(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    for parameter in model.parameters():
        parameter.register_hook(average)

    def step(batch: list[Tensor]) -> None:
        loss = cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()

    return audit(model, loader, cross_entropy, optimizer, step)

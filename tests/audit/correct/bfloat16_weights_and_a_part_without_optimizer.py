"""Weights in bfloat16; a layer that no optimizer has, and whose gradient nobody sets to zero."""

from collections.abc import Callable

import torch
from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    trained = perceptron().to(torch.bfloat16)
    first = nn.Linear(8, 8).to(torch.bfloat16)
    nn.init.eye_(first.weight)
    nn.init.zeros_(first.bias)
    model = DistributedDataParallel(nn.Sequential(first, trained))
    optimizer = sgd(trained)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0].bfloat16()), batch[1]).backward()
        optimizer.step()

    return audit(model, loader, cross_entropy, optimizer, step)

"""Gradients are added over workers, and nobody divides."""

from collections.abc import Callable

import torch
from planted_parts import divided, perceptron, random_data, sgd, sum_gradients
from torch import Tensor
from torch.nn.functional import cross_entropy

from largebatch.audit import Findings

ISSUE = "https://github.com/horovod/horovod/issues/2298"
EXPECTED = "gradient scale"
FIGURE = 2.0


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    torch.manual_seed(0)
    model = perceptron()
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        sum_gradients(model.parameters())
        optimizer.step()

    return audit(model, loader, cross_entropy, optimizer, step)

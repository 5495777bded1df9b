"""Gradients are summed over workers after each micro-batch, while they are still being summed."""

from collections.abc import Callable

from planted_parts import alternating, linear, sgd, sum_gradients
from torch import Tensor
from torch.nn.functional import cross_entropy

from largebatch.audit import Findings

ISSUE = "https://github.com/pytorch/pytorch/pull/125484"
EXPECTED = "gradient direction"
FIGURE = 3 / 10**0.5


def script(audit: Callable[..., Findings]) -> Findings:
    model = linear()
    optimizer = sgd(model)
    number = 0

    def step(batch: tuple[Tensor, Tensor]) -> None:
        nonlocal number
        number += 1
        (cross_entropy(model(batch[0]), batch[1]) / 4).backward()
        sum_gradients(model.parameters())
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return audit(model, alternating(), cross_entropy, optimizer, step)

"""Gradients are cleared before each micro-batch, so the last one counts alone."""

from collections.abc import Callable

from planted_parts import alternating, linear, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/bytetriper/RAE/issues/67"
EXPECTED = "gradient direction"
FIGURE = 0.5**0.5


def script(audit: Callable[..., Findings]) -> Findings:
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)
    number = 0

    def step(batch: tuple[Tensor, Tensor]) -> None:
        nonlocal number
        number += 1
        optimizer.zero_grad()
        (cross_entropy(model(batch[0]), batch[1]) / 2).backward()
        if number % 2 == 0:
            optimizer.step()

    return audit(model, alternating(), cross_entropy, optimizer, step)

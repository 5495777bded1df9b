"""Gradients are clipped after each micro-batch, while they are still being summed."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation"
EXPECTED = "clipping"
FIGURE = 2.0


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 8, shuffle=False)
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model)
    number = 0

    def step(batch: list[Tensor]) -> None:
        nonlocal number
        number += 1
        (cross_entropy(model(batch[0]), batch[1]) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return audit(model, loader, cross_entropy, optimizer, step)

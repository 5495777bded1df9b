"""Gradients are clipped together, and only those of one of two optimizers were unscaled."""

from collections.abc import Callable

import torch
from planted_parts import Pair, divided, linear, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#working-with-multiple-models-losses-and-optimizers"
EXPECTED = "clipping"
FIGURE = ((1 + 1024**2) / 2) ** 0.5


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(Pair(linear(), linear()))  # their gradients are equal
    first, second = sgd(model.module.first), sgd(model.module.second)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)

    def step(batch: list[Tensor]) -> None:
        model.zero_grad()
        loss: Tensor = scaler.scale(cross_entropy(model(batch[0]), batch[1]))
        loss.backward()
        scaler.unscale_(first)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(first)
        scaler.step(second)
        scaler.update()

    return audit(model, loader, cross_entropy, first, step)

"""Gradients are divided by the loss scale, and then again by the scaler."""

from collections.abc import Callable

import torch
from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/huggingface/accelerate/issues/113"
EXPECTED = "gradient scale"
FIGURE = 1 / 1024


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        loss: Tensor = scaler.scale(cross_entropy(model(batch[0]), batch[1]))
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()

    return audit(model, loader, cross_entropy, optimizer, step)

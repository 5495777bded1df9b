"""A loss scale, removed before gradients are clipped."""

from collections.abc import Callable

import torch
from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        loss: Tensor = scaler.scale(cross_entropy(model(batch[0]), batch[1]))
        loss.backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    return audit(model, loader, cross_entropy, optimizer, step)

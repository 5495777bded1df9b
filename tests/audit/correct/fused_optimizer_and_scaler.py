"""A fused optimizer unscales in its kernel; the step also logs accuracy, with gradients."""

from collections.abc import Callable

import torch
from planted_parts import divided, perceptron, random_data
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    hits = []

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(batch[0]), batch[1])).backward()
        scaler.step(optimizer)
        scaler.update()
        hits.append(int((model(batch[0]).argmax(1) == batch[1]).sum()))

    return audit(model, loader, cross_entropy, optimizer, step)

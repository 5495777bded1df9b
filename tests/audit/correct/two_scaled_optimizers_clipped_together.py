"""Two optimizers are unscaled before all gradients are clipped, by largest values."""

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
    optimizers = [sgd(model.module[place]) for place in (0, 2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)

    def step(batch: list[Tensor]) -> None:
        model.zero_grad()
        loss: Tensor = scaler.scale(cross_entropy(model(batch[0]), batch[1]))
        loss.backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))
        nn.utils.clip_grad_value_(model.parameters(), 0.005)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    return audit(model, loader, cross_entropy, optimizers[0], step)

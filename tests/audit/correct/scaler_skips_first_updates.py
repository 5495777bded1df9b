"""A loss scale so large that a GradScaler skips updates first, with BatchNorm and a schedule."""

from collections.abc import Callable

import torch
from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from largebatch.audit import Findings

NO_NOTE = "batch norm momentum"


def rise(step: int) -> float:
    return min(1.0, (step + 1) / 100)


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(128, seed=1), 16, shuffle=True)
    model = DistributedDataParallel(perceptron(nn.BatchNorm1d(16), nn.ReLU()))
    nn.init.constant_(model.module[1].weight, 40)
    optimizer = sgd(model)
    scheduler = LambdaLR(optimizer, rise)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(batch[0]), batch[1])).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    words = {"set_epoch": loader.sampler.set_epoch, "rate": lambda update: 0.05 * rise(update)}
    return audit(model, loader, cross_entropy, optimizer, step, **words)

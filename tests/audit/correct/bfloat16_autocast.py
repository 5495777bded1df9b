"""Autocast to bfloat16, dropout that differs by worker, a schedule."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(perceptron(nn.Dropout(0.3), nn.ReLU()))
    optimizer = sgd(model, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    torch.manual_seed(dist.get_rank())

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        schedule.step()

    return audit(model, loader, cross_entropy, optimizer, step)

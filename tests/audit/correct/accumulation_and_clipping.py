"""Four micro-batches, no_sync on three of them, clipping of the average."""

from collections.abc import Callable

import torch
from planted_parts import divided, perceptron, random_data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 4, shuffle=False)
    model = DistributedDataParallel(perceptron(nn.Dropout(0.5), nn.ReLU()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    number = 0

    def step(batch: list[Tensor]) -> None:
        nonlocal number
        number += 1
        model.require_backward_grad_sync = number % 4 == 0
        (cross_entropy(model(batch[0]), batch[1]) / 4).backward()
        if number % 4 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    return audit(model, loader, cross_entropy, optimizer, step)

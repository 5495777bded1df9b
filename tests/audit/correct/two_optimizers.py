"""Two optimizers, one for each layer, with a loss scale that each removes, and own clipping."""

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
    first, last = sgd(model.module[0]), torch.optim.Adam(model.module[2].parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)

    def step(batch: list[Tensor]) -> None:
        model.zero_grad()
        loss: Tensor = scaler.scale(cross_entropy(model(batch[0]), batch[1]))
        loss.backward()
        scaler.step(first)
        scaler.unscale_(last)
        nn.utils.clip_grad_norm_(model.module[2].parameters(), 0.1)
        scaler.step(last)
        scaler.update()

    return audit(model, loader, cross_entropy, last, step)

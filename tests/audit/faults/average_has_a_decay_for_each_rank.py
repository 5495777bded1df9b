"""The decay of the average follows from the samples of each worker, so it differs: 0.9 and 0.5."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import divided, linear, random_data, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/lucidrains/ema-pytorch/issues/9"
EXPECTED = "averaged weights"
FIGURE = 2 / 3  # after one update 0.1 and 0.5 times the weights: 0.2 from their mean, 0.3


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model, average = DistributedDataParallel(linear()), linear()
    optimizer = sgd(model)
    decay = [0.9, 0.5][dist.get_rank()]

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        with torch.no_grad():
            average.weight.lerp_(model.module.weight, 1 - decay)

    words = {"set_epoch": loader.sampler.set_epoch, "averaged": average, "steps": 1}
    return audit(model, loader, cross_entropy, optimizer, step, **words)

"""Plain SGD on each worker, whose weights are averaged after every update."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = perceptron()
    optimizer = sgd(model)

    @torch.no_grad()
    def average() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter.div_(dist.get_world_size())

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        average()

    set_epoch = loader.sampler.set_epoch
    return audit(model, loader, cross_entropy, optimizer, step, set_epoch=set_epoch)

"""The loss is divided by the workers, and DistributedDataParallel averages."""

from collections.abc import Callable

import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/meta-pytorch/torchtune/issues/2172"
EXPECTED = "gradient scale"
FIGURE = 0.5


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        (cross_entropy(model(batch[0]), batch[1]) / dist.get_world_size()).backward()
        optimizer.step()

    return audit(model, loader, cross_entropy, optimizer, step)

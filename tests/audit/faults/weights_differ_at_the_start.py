"""Nobody sends worker 0's weights, and every worker has its own."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from planted_parts import divided, perceptron, random_data, sgd, sum_gradients
from torch import Tensor
from torch.nn.functional import cross_entropy

from largebatch.audit import Findings

ISSUE = "https://github.com/sparticlesteve/pytorch-benchmarks/pull/1"
EXPECTED = "weights"
FIGURE = 0.05 / 1.05


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    torch.manual_seed(0)
    model = perceptron()
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(1 + 0.1 * dist.get_rank())
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        sum_gradients(model.parameters(), divisor=dist.get_world_size())
        optimizer.step()

    return audit(model, loader, cross_entropy, optimizer, step)

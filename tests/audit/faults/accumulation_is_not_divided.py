"""The losses of four micro-batches are added, not averaged."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/karpathy/nanoGPT/issues/168"
EXPECTED = "gradient scale"
FIGURE = 4.0


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 4, shuffle=False)
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model)
    number = 0

    def step(batch: list[Tensor]) -> None:
        nonlocal number
        number += 1
        cross_entropy(model(batch[0]), batch[1]).backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return audit(model, loader, cross_entropy, optimizer, step)

"""Running statistics move with each of four micro-batches."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/NVIDIA/DeepLearningExamples/issues/625"
EXPECTED = "batch norm momentum"
FIGURE = 4.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(perceptron(nn.BatchNorm1d(16), nn.ReLU()))
    optimizer = sgd(model)
    number = 0

    def step(batch: list[Tensor]) -> None:
        nonlocal number
        number += 1
        (cross_entropy(model(batch[0]), batch[1]) / 4).backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return audit(model, loader, cross_entropy, optimizer, step)

"""The loss is scaled, and the optimizer is called without the scaler."""

from collections.abc import Callable

import torch
from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
EXPECTED = "gradient scale"
FIGURE = 1024.0


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model, lr=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        loss: Tensor = scaler.scale(cross_entropy(model(batch[0]), batch[1]))
        loss.backward()
        optimizer.step()

    return audit(model, loader, cross_entropy, optimizer, step)

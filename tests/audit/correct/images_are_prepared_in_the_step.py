"""The step makes vectors of the images, so the model does not take them as the loader has them."""

from collections.abc import Callable

import torch
from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    images, labels = random_data().tensors
    data = TensorDataset(images.view(-1, 2, 2, 2).to(torch.float64), labels)
    loader = divided(data, 16, shuffle=False)
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0].flatten(1).float()), batch[1]).backward()
        optimizer.step()

    return audit(model, loader, cross_entropy, optimizer, step)

"""Hooks shrink the gradient of one layer, mask another, and reverse that of a feature."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(perceptron(Reversed()))
    first, last = model.module[0].weight, model.module[2].weight
    first.register_hook(lambda gradient: gradient * 0.5)
    last.register_hook(lambda gradient: gradient * (last > 0))
    return audit(model, loader, cross_entropy, sgd(model))


class Reversed(nn.Module):
    """A ReLU whose gradient has the other sign."""

    def forward(self, features: Tensor) -> Tensor:
        if features.requires_grad:
            features.register_hook(lambda gradient: -gradient)
        return features.relu()

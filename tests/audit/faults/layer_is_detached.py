"""A layer is detached, and find_unused_parameters keeps DistributedDataParallel from saying so."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/pytorch/pytorch/issues/57776"
EXPECTED = "gradient direction"
FIGURE = 2.0


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(perceptron(Detached()), find_unused_parameters=True)
    return audit(model, loader, cross_entropy, sgd(model))


class Detached(nn.Module):
    """A ReLU through which no gradient passes."""

    def forward(self, features: Tensor) -> Tensor:
        return features.detach().relu()

"""DistributedDataParallel and momentum SGD, with BatchNorm."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(perceptron(nn.BatchNorm1d(16), nn.ReLU()))
    return audit(model, loader, cross_entropy, sgd(model, momentum=0.9))

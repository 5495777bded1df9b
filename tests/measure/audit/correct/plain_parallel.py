"""DistributedDataParallel and momentum SGD, with BatchNorm."""

from collections.abc import Callable

from planted_parts import divided, parallel, perceptron, sgd
from torch import nn
from torch.nn.functional import cross_entropy

from largebatch.measure.audit import Findings


def script(audit: Callable[..., Findings]) -> Findings:
    model = parallel(perceptron(nn.BatchNorm1d(16)))
    return audit(model, divided(), cross_entropy, sgd(model, momentum=0.9))

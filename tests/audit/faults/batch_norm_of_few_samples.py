"""BatchNorm normalises over the four samples of each worker."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings

ISSUE = "https://github.com/facebookresearch/detectron2/issues/5398"
EXPECTED = "batch norm span"
FIGURE = 4.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 4, shuffle=False)
    model = DistributedDataParallel(perceptron(nn.BatchNorm1d(16), nn.ReLU()))
    return audit(model, loader, cross_entropy, sgd(model))

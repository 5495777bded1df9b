"""BatchNorm normalises over the four samples of each worker."""

from collections.abc import Callable

from planted_parts import divided, parallel, perceptron, sgd
from torch import nn
from torch.nn.functional import cross_entropy

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/facebookresearch/detectron2/issues/5398"
EXPECTED = "batch norm span"
FIGURE = 4.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    model = parallel(perceptron(nn.BatchNorm1d(16)))
    return audit(model, divided(4), cross_entropy, sgd(model))

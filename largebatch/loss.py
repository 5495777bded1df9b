"""Cross-entropy with label smoothing, in both published conventions."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from largebatch.train import Criterion


def cross_entropy(*, smoothing: float, off_target: Literal["all", "others"]) -> Criterion:
    """Return a criterion that sums the smoothed cross-entropy over the samples of a batch.

    With K classes and smoothing a (Szegedy et al. 2016, arXiv:1512.00567, section 7), `all` gives
    every class a/K and the labelled one 1 - a more, as PyTorch and TensorFlow do; `others` gives
    the other classes a/(K-1) each and the labelled one 1 - a, as MXNet does.
    """

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        mass = smoothing
        if off_target == "others":
            classes = logits.shape[1]
            mass = smoothing * classes / (classes - 1)
        return F.cross_entropy(logits, labels, label_smoothing=mass, reduction="sum")

    return criterion

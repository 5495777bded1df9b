"""Cross-entropy with label smoothing, in both published conventions."""

from collections.abc import Callable
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from largebatch.recipe.choices import OffTarget

Criterion = Callable[[Tensor, Tensor], Tensor]
"""Function (logits N x K, labels N) -> sum of the losses of the samples, 0-d."""


def cross_entropy(*, smoothing: float, off_target: OffTarget) -> Criterion:
    """Return a criterion that sums the smoothed cross-entropy over the samples of a batch.

    With K classes and smoothing a (Szegedy et al. 2016, arXiv:1512.00567, section 7), `all` gives
    every class a/K and adds 1 - a to the label, as PyTorch and TensorFlow do; `others` gives
    a/(K-1) to each other class and 1 - a to the label, as MXNet does. Raises ValueError if
    smoothing is below 0 or at least 1; the criterion raises it above 1 - 1/K, where the label would
    be the least likely class.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), got {smoothing:g}")
    if off_target not in get_args(OffTarget):
        known = ", ".join(get_args(OffTarget))
        raise ValueError(f"off_target must be one of {known}, got {off_target!r}")

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        classes = logits.shape[-1]
        if smoothing > 1 - 1 / classes:
            raise ValueError(
                f"smoothing ({smoothing:g}) makes the labelled one of {classes} classes the least "
                "likely"
            )
        mass = smoothing
        if smoothing and off_target == "others":
            mass = smoothing * classes / (classes - 1)
        return F.cross_entropy(logits, labels, label_smoothing=mass, reduction="sum")

    return criterion

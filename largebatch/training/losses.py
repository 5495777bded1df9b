"""The losses of a batch: cross-entropy and binary cross-entropy, of single and of mixed labels.

A criterion sums over the samples; the step divides by the global batch. So the loss of an update is
a mean over all samples, however they are divided among workers and micro-batches.

Labels are class numbers (int64, N), or shares (floating, N x K): of a mixed image lambda at its own
label and 1 - lambda at its partner's. Cross-entropy is linear in its targets, so the loss of a
mixed image is exactly lambda loss(a) + (1 - lambda) loss(b), smoothed or not.

Weights of classes are factors of the loss of an image. They have a mean of 1 over the training
images (`scaled_weights`). PyTorch's `weight` differs in two ways: it divides by the sum of the
weights of a batch, which no worker knows of the global batch; and it weights the smoothed part of a
target by the class that the part is for, and not by the label.
"""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from largebatch.recipe.choices import OffTarget

Criterion = Callable[[Tensor, Tensor], Tensor]
"""Function (logits N x K, labels N, or shares N x K) -> sum of the losses of the samples, 0-d."""


def cross_entropy(
    *, smoothing: float, off_target: OffTarget, weights: Tensor | None = None
) -> Criterion:
    """Return a criterion that sums the smoothed cross-entropy over the samples of a batch.

    With K classes and smoothing a (Szegedy et al. 2016, arXiv:1512.00567, section 7), `all` gives
    every class a/K and adds 1 - a to the label, as PyTorch and TensorFlow do; `others` gives
    a/(K-1) to each other class and 1 - a to the label, as MXNet does. `weights` has the factor of
    each class. Raises ValueError if smoothing is not in [0, 1); the criterion above 1 - 1/K.
    """
    _require_smoothing(smoothing)
    if off_target not in get_args(OffTarget):
        known = ", ".join(get_args(OffTarget))
        raise ValueError(f"off_target must be one of {known}, got {off_target!r}")

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        logits = at_least_fp32(logits)
        classes = logits.shape[-1]
        if smoothing > 1 - 1 / classes:
            raise ValueError(
                f"smoothing ({smoothing:g}) makes the labelled one of {classes} classes the least "
                "likely"
            )
        mass = smoothing
        if smoothing and off_target == "others":
            mass = smoothing * classes / (classes - 1)
        if labels.is_floating_point():
            labels = labels.to(logits.dtype)
        if weights is None:
            return F.cross_entropy(logits, labels, label_smoothing=mass, reduction="sum")
        factors = _factors(labels, weights, logits.dtype)
        if labels.is_floating_point():
            # Each label of a mixed image has its own weight: lambda w(a) loss(a) + (1 - lambda)
            # w(b) loss(b). That is `factors` times the loss of these shares, which add up to 1.
            labels = labels * weights.to(logits.dtype) / factors.unsqueeze(1)
        losses = F.cross_entropy(logits, labels, label_smoothing=mass, reduction="none")
        return (losses * factors).sum()

    return criterion


def binary_cross_entropy(
    *,
    smoothing: float,
    target_threshold: float | None = None,
    classes: Literal["mean", "sum"] = "mean",
    weights: Tensor | None = None,
) -> Criterion:
    """Return a criterion that sums the binary cross-entropies over the samples of a batch.

    With K classes, shares s of the labels and smoothing a, the target of a class is (1 - a) s + a/K
    ("ResNet strikes back", arXiv:2110.00476, section 4); with `target_threshold` it is 1 if it is
    above that, else 0. The loss of a sample is the `mean` or the `sum` over its K classes. Divided
    by the number of samples, the result is timm's BinaryCrossEntropy, whose default is the mean
    over N x K, or with sum_classes=True the mean over N of the sum over K. timm smooths labels in
    its loss and mixed ones in its Mixup; both have this target.

    `weights` has the factor of each class; that of a mixed sample is by its shares. Raises
    ValueError if smoothing is not in [0, 1) or `classes` is another word.
    """
    _require_smoothing(smoothing)
    if classes not in {"mean", "sum"}:
        raise ValueError(f"classes must be mean or sum, got {classes!r}")

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        logits = at_least_fp32(logits)
        num_classes = logits.shape[-1]
        shares = labels.to(logits.dtype)
        if not labels.is_floating_point():
            # Without one_hot, which makes integers and waits for a GPU to count the classes.
            shares = torch.zeros_like(logits).scatter_(1, labels.unsqueeze(1), 1.0)
        factors = None
        if weights is not None:
            factors = _factors(labels, weights, logits.dtype)
            if target_threshold is None:  # linear in the shares, as the cross-entropy
                shares = shares * weights.to(logits.dtype) / factors.unsqueeze(1)
        targets = shares * (1 - smoothing) + smoothing / num_classes
        if target_threshold is not None:
            targets = (targets > target_threshold).to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        losses = losses.sum(1)
        if classes == "mean":
            losses = losses / num_classes
        if factors is not None:
            losses = losses * factors
        return losses.sum()

    return criterion


def scaled_weights(
    weights: Sequence[float] | None, counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the weights of the classes, scaled to a mean of 1 over the training images.

    `counts` is the number of training images of each class. Without weights they are inversely
    proportional to it. Raises ValueError, naming the classes, if these have no images; with
    weights, if there are no images at all.

    >>> scaled_weights(None, np.array([30, 10]))
    array([0.66666667, 2.        ])
    >>> scaled_weights((1, 3), np.array([30, 10]))
    array([0.66666667, 2.        ])
    """
    if weights is None:
        absent = np.flatnonzero(counts == 0)
        if len(absent):
            raise ValueError(f"no training image is of class {', '.join(map(str, absent[:5]))}")
        return np.asarray(counts.sum() / (len(counts) * counts))
    given = np.asarray(weights, dtype=np.float64)
    return np.asarray(given * (counts.sum() / (given @ counts)))


def _require_smoothing(smoothing: float) -> None:
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), got {smoothing:g}")


def at_least_fp32(logits: Tensor) -> Tensor:
    """Return scores in float32, or in their own type if that is longer."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _factors(labels: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight of each sample: of a mixed one the mean of those of its labels."""
    weights = weights.to(dtype)
    if not labels.is_floating_point():
        return weights[labels]
    # Not by `@`, which an autocast of the caller's would compute in 16 bits.
    return (labels.to(dtype) * weights).sum(1)

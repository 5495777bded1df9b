"""Exact distributed evaluation: every sample counts once.

Each worker counts correct answers over its own share, which may be empty; counts and the sum of the
losses go through one all-reduce. Means of batch means, and samplers that pad, are wrong.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largebatch.distributed.backend import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Accuracy over all samples of all workers."""

    top1: float
    """Part of the samples whose label has the highest score, 0 .. 1."""

    top5: float
    """Part of the samples whose label is among the five highest scores."""

    loss: float
    """Mean cross-entropy, without label smoothing."""

    samples: int


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    backend: Backend,
    *,
    expected: int | None = None,
) -> Metrics:
    """Measure a model on this worker's batches, together with all other workers.

    The model is put into evaluation mode and back. `expected` is the number of samples over all
    workers, where it is known; another total is a mistake of ours and raises AssertionError.
    """
    # Counts below 2**53 are exact in float64, so one tensor holds them and the loss.
    totals = torch.zeros(4, dtype=torch.float64, device=backend.device)
    training = model.training
    model.eval()
    try:
        for images, labels in batches:
            logits = model(images)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            best = logits.topk(min(5, logits.shape[1])).indices.eq(labels.unsqueeze(1))
            totals[0] += best[:, 0].sum()
            totals[1] += best.sum()
            totals[2] += F.cross_entropy(logits, labels, reduction="sum").double()
            totals[3] += len(labels)
    finally:
        model.train(training)
    backend.all_reduce(totals).wait()
    top1, top5, loss, samples = totals.tolist()  # sync: the result is wanted
    assert expected is None or samples == expected, f"counted {samples} samples of {expected}"
    if not samples:
        raise ValueError("there is nothing to evaluate: no worker was given a batch")
    return Metrics(
        top1=top1 / samples, top5=top5 / samples, loss=loss / samples, samples=int(samples)
    )

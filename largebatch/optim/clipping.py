"""The norm of all gradients together, and the factor that limits it (`optimizer.clip_norm`).

The gradients are those of the whole global batch, so their norm is the same on every worker.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_EPS = 1e-6
"""Added to the norm, as torch.nn.utils.clip_grad_norm_ does it."""


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients together: 0-d, on the device; as exact as in LARS."""
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    if gradients[0].device.type != "cpu":
        from largebatch.optim.kernels import batched

        length: Tensor = torch.linalg.vector_norm(batched.norms(gradients))
        return length
    from largebatch.optim.kernels import fused

    dense = torch.ops.aten.is_non_overlapping_and_dense
    whole = (grad if dense(grad) else grad.contiguous() for grad in gradients)
    return torch.tensor(math.hypot(*map(fused.norm, whole)), dtype=torch.float64)


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return the factor by which gradients of this norm are clipped: 0-d, on the device.

    It is min(1, limit / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_, and 1 if the norm is
    not finite: then the gradients stay as they are, and the update is skipped or the run stops, as
    without clipping. The host does not wait for the norm.

    >>> clip_factor(torch.tensor([0.5, 4.0, math.inf]), 1.0)
    tensor([1.0000, 0.2500, 1.0000])
    """
    factor = (limit / (norm + _EPS)).clamp(max=1.0)
    return torch.where(norm.isfinite(), factor, 1.0)

"""The update on the CPU, where reading memory takes the time: each tensor is read once.

The norms load a weight and its gradient into the cache, and torch's fused SGD updates them there.
Its `dampening` encodes the trust ratio: b = momentum b + (1 - dampening) (g + decay w).
"""

import math

import torch
from torch import Tensor

from largebatch.optim.kernels import GroupRule, Tensors, directions, momentum_step

ROW = 512
"""Number of elements per float32 sum. torch adds the squares of a float32 tensor in a few float32
sums: the norm of 10 million equal numbers has an error of 0.8 %; with these rows it is 4e-7."""


def update(weights: Tensors, grads: Tensors, buffers: Tensors, rule: GroupRule) -> Tensor | None:
    """Update CPU tensors and return their trust ratios, if the rule has any."""
    if rule.ratio == "none":
        _step(weights, grads, buffers, rule, into=rule.into, out=rule.out)
        return None
    ratios = []
    for weight, grad, buffer in zip(weights, grads, buffers, strict=True):
        ratio = trust_ratio(norm(weight), norm(grad), rule)
        into = rule.into
        out = rule.out
        if rule.ratio == "inside":
            into *= ratio
        else:
            out *= ratio
        _step([weight], [grad], [buffer], rule, into=into, out=out)
        ratios.append(ratio)
    return torch.tensor(ratios, dtype=torch.float64)


def trust_ratio(w: float, g: float, rule: GroupRule) -> float:
    """Return eta |w| / (|g| + ratio_decay |w| + eps), or 1 if either norm is 0, clipped."""
    ratio = 1.0
    if w > 0 and g > 0:
        ratio = rule.eta * w / (g + rule.ratio_decay * w + rule.eps)
    return ratio if rule.clip_ratio is None else min(ratio, rule.clip_ratio)


def norm(tensor: Tensor) -> float:
    """Return the norm of a dense CPU tensor with an error below 1e-6 for any size and elements.

    float64 elements must be between 1e-150 and 1e150.
    """
    length = _length(tensor)
    # Squares below the smallest normal number are lost; here they are below 1e-7 of the sum.
    least = math.sqrt(1e7 * torch.finfo(tensor.dtype).tiny * tensor.numel())
    if least < length < math.inf:
        return length
    exact: float = torch.linalg.vector_norm(tensor, dtype=torch.float64).item()  # sync: no wait
    return exact


def _length(tensor: Tensor) -> float:
    """Return the norm, with squares summed in the tensor's type by rows of its memory."""
    rows, rest = divmod(tensor.numel(), ROW)
    body = torch.linalg.vector_norm(tensor.as_strided((rows, ROW), (ROW, 1)), dim=1)
    length: float = torch.linalg.vector_norm(body, dtype=torch.float64).item()  # sync: no wait
    if rest:
        tail = tensor.as_strided((rest,), (1,), tensor.storage_offset() + rows * ROW)
        length = math.hypot(length, torch.linalg.vector_norm(tail).item())  # sync: no wait
    return length


def _step(
    weights: Tensors, grads: Tensors, buffers: Tensors, rule: GroupRule, *, into: float, out: float
) -> None:
    dampening = 1 - into
    # 1 - dampening has 16 decimal places, and a small `into` needs more; without momentum torch's
    # kernel would not write the buffer.
    exact = abs(1 - dampening - into) <= torch.finfo(weights[0].dtype).eps * into
    if not exact or rule.momentum == 0 or rule.clip_gradient is not None:
        steps = directions(grads, weights, rule)
        momentum_step(weights, steps, buffers, rule, into=into, out=out)
        return
    torch._fused_sgd_(
        weights,
        grads,
        buffers,
        weight_decay=rule.decay,
        momentum=rule.momentum,
        lr=out,
        dampening=dampening,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )

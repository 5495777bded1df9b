"""The update with the multi-tensor kernels of NVIDIA's apex, in float32 on CUDA.

apex has no LARS; it is composed of these kernels (module `amp_C`, csrc/amp_C_frontend.cpp):

    multi_tensor_axpby         out = a x + b y
    multi_tensor_scale         out = a x
    multi_tensor_lamb_stage2   x -= lr (p / u) y, with numbers p and u for each tensor

Each takes a flag that it sets for an infinity but never reads, so an infinity reaches the weights,
as in the other implementations. The norms are torch's, summed in float64: apex's
multi_tensor_l2norm sums in float32, where the square of 1e20 is infinite.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from largebatch.optim.kernels import GroupRule, Tensors
from largebatch.optim.kernels.batched import times, trust_ratios
from largebatch.optional import require_apex

CHUNK = 65536
"""Number of elements per block of threads, as in apex's own optimizers."""

EVERY_TENSOR = True
"""Apply the ratio to every tensor, even without decay."""


def check(weights: Iterable[Tensor], *, clip_gradient: object) -> None:
    """Raise MissingPackageError without apex, ValueError if its kernels do not support these."""
    require_apex()
    if clip_gradient is not None:
        raise ValueError("kernels='apex' cannot clip gradients; use kernels='torch'")
    for weight in weights:
        if weight.device.type != "cuda" or weight.dtype == torch.float64:
            raise ValueError(
                "kernels='apex' updates float32, float16 and bfloat16 weights on CUDA, got "
                f"{weight.dtype} on {weight.device}; use kernels='torch'"
            )


def update(weights: Tensors, grads: Tensors, buffers: Tensors, rule: GroupRule) -> Tensor | None:
    """Update float32 tensors together; return their trust ratios."""
    check((), clip_gradient=rule.clip_gradient)  # a loaded state may have set it
    amp = require_apex()
    flag = torch.zeros(1, dtype=torch.int32, device=weights[0].device)

    def add(x: Tensors, y: Tensors, out: Tensors, *, a: float, b: float) -> None:
        amp.multi_tensor_axpby(CHUNK, flag, [x, y, out], a, b, -1)

    def add_scaled(x: Tensors, y: Tensors, ratios: Tensor, *, alpha: float) -> None:
        numbers = (ratios, torch.ones_like(ratios), -alpha, 0.0, EVERY_TENSOR)
        amp.multi_tensor_lamb_stage2_cuda(CHUNK, flag, [x, y], *numbers)

    directions = [torch.empty_like(weight) for weight in weights]
    add(grads, weights, directions, a=1.0, b=rule.decay)
    if rule.ratio == "none":
        add(buffers, directions, buffers, a=rule.momentum, b=rule.into)
        add(weights, buffers, weights, a=1.0, b=-rule.out)
        return None
    found = trust_ratios(weights, grads, rule)
    ratios = times(found, 1.0, weights)
    if rule.ratio == "inside":
        amp.multi_tensor_scale(CHUNK, flag, [buffers, buffers], rule.momentum)
        add_scaled(buffers, directions, ratios, alpha=rule.into)
        add(weights, buffers, weights, a=1.0, b=-rule.out)
    else:
        add(buffers, directions, buffers, a=rule.momentum, b=rule.into)
        add_scaled(weights, buffers, ratios, alpha=-rule.out)
    return found

"""Implementations of the LARS update, selected by the device or the recipe.

    table     CUDA with Triton: two launches for all tensors, see its class Table
    fused     CPU: reads each tensor from memory once
    batched   other devices: a few operations for all tensors, without waiting for the device
    apex      CUDA, if the recipe selects it: the multi-tensor kernels of NVIDIA's apex

The last three have a function `update(weights, grads, buffers, rule)` that changes weights and
momentum buffers in place, does not change gradients, and returns the trust ratios: one per weight,
float64 (float32 on MPS) on their device; None for a rule without ratios. The lists have the same
length and are not empty; their tensors have one type and device, and at least one element. The
three tensors at the same position have the same shape and strides and are contiguous, in the
default order or in channels_last.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from largebatch import accelerator, proof
from largebatch.distributed.agreement import agree
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import running_backend

Tensors = list[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRule:
    """Numbers of one parameter group, with all conventions as one formula.

        b = momentum b + into [r] (g + decay w)      w -= out [r] b

    with r = eta |w| / (|g| + ratio_decay |w| + eps), or 1 if a norm is 0, in one of the two places;
    r is limited to clip_ratio, every element of g + decay w to [-clip_gradient, clip_gradient].
    """

    momentum: float
    decay: float
    ratio_decay: float = 0.0
    eta: float = 0.0
    eps: float = 0.0
    into: float
    out: float
    ratio: Literal["inside", "outside", "none"]
    """Position of r: in the formula of b, in that of w, or none."""

    clip_ratio: float | None = None
    clip_gradient: float | None = None
    nesterov: bool = False
    """True for w -= out (g + decay w + momentum b), without r and with into 1. Only `table`
    supports it."""

    found_inf: Tensor | None = None
    """1 to leave weights and buffers unchanged for any gradients, else 0: 0-d, float32, on their
    device. Only `batched` supports it."""


def works(device: torch.device) -> bool:
    """Return True if `table` is used on a device, as `proof` has decided."""
    return proof.has_kernels(proof.OPTIMIZER, device) and proof.uses(proof.OPTIMIZER, device)


def agree_on_kernels(backend: Backend | None = None) -> str | None:
    """Try `table`, and decide with all workers of a loop whether their optimizers use it.

    Return why not; None if all do. Every worker must call it, before its first step: without it
    the optimizers of several workers use PyTorch's operations, since workers with different kernels
    would round differently. A run of largebatch does this by itself. Without a `backend`, the
    workers that torch.distributed or Horovod has connected are used.
    """
    device = accelerator.current()
    if not proof.has_kernels(proof.OPTIMIZER, device):  # of all workers
        return f"there are no kernels for {device.type}"
    backend = backend or running_backend(device)
    reason = proof.switched_off()
    if reason is None:
        reason = proof.prove_alone(proof.OPTIMIZER, device).refused
    refusals = agree({proof.OPTIMIZER: reason}, backend, backend.device)
    proof.decide(device, refusals)
    return refusals[proof.OPTIMIZER]


UpdateFunction = Callable[[Tensors, Tensors, Tensors, GroupRule], Tensor | None]


def momentum_step(
    weights: Tensors,
    directions: Tensors,
    buffers: Tensors,
    rule: GroupRule,
    *,
    into: float,
    out: float,
) -> None:
    """Set b = momentum b + into d, then w = w - out b, on any device."""
    move_buffers(buffers, directions, rule, into=into)
    add(weights, buffers, rule, alpha=-out)


def move_buffers(buffers: Tensors, directions: Tensors, rule: GroupRule, *, into: float) -> None:
    """Set b = momentum b + into d, unless found_inf is 1."""
    momentum: float | Tensor = rule.momentum
    if rule.found_inf is not None:
        momentum = torch.where(rule.found_inf > 0, buffers[0].new_ones(()), rule.momentum)
    torch._foreach_mul_(buffers, momentum)
    add(buffers, directions, rule, alpha=into)


def add(tensors: Tensors, others: Tensors, rule: GroupRule, *, alpha: float) -> None:
    """Add alpha times the others, unless found_inf is 1: then no bit changes.

    torch's fused SGD without momentum is an addition that a number on the device can disable.
    """
    if rule.found_inf is None:
        torch._foreach_add_(tensors, others, alpha=alpha)
        return
    torch._fused_sgd_(
        tensors,
        others,
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=-alpha,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        found_inf=rule.found_inf,
    )


def directions(grads: Tensors, weights: Tensors, rule: GroupRule) -> Tensors:
    """Return g + decay w, clipped: new tensors, or the gradients themselves if unchanged."""
    found = list(torch._foreach_add(grads, weights, alpha=rule.decay)) if rule.decay else grads
    if rule.clip_gradient is None:
        return found
    found = list(torch._foreach_clamp_max(found, rule.clip_gradient))
    return list(torch._foreach_clamp_min(found, -rule.clip_gradient))

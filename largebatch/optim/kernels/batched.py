"""The update on a GPU, where launching operations and waiting for results take the time.

The number of operations does not depend on the number of tensors (torch launches one kernel for
about 30 to 100 tensors of a list), and the host never reads a norm: ratios stay on the device, in
one vector.

Each direction g + decay w is written into one scratch buffer, where every tensor starts a new row,
so that one multiplication by rows applies all ratios; the gradients are not changed. The buffer has
the size of the weights and is freed after the step.
"""

import functools
import itertools

import torch
from torch import Tensor

from largebatch.optim.kernels import (
    GroupRule,
    Tensors,
    add,
    directions,
    momentum_step,
    move_buffers,
)

ROW = 1024
"""Number of elements per row of the scratch buffer; a row belongs to one tensor."""


def update(weights: Tensors, grads: Tensors, buffers: Tensors, rule: GroupRule) -> Tensor | None:
    """Update tensors of any device together; return their trust ratios."""
    if rule.ratio == "none":
        steps = directions(grads, weights, rule)
        momentum_step(weights, steps, buffers, rule, into=rule.into, out=rule.out)
        return None
    inside = rule.ratio == "inside"
    ratios = trust_ratios(weights, grads, rule)
    factors = times(ratios, rule.into if inside else rule.out, weights)
    scratch, views = _scratch(weights)
    torch._foreach_copy_(views, grads)
    if rule.decay:
        torch._foreach_add_(views, weights, alpha=rule.decay)
    if rule.clip_gradient is not None:
        scratch.clamp_(-rule.clip_gradient, rule.clip_gradient)
    if inside:
        _scale(scratch, factors, weights)
        _add_momentum(weights, views, buffers, rule)
    else:
        move_buffers(buffers, views, rule, into=rule.into)
        torch._foreach_copy_(views, buffers)
        _scale(scratch, factors, weights)
        add(weights, views, rule, alpha=-1.0)
    return ratios


def trust_ratios(weights: Tensors, grads: Tensors, rule: GroupRule) -> Tensor:
    """Return eta |w| / (|g| + ratio_decay |w| + eps) per weight, or 1 if either norm is 0.

    Ratios are limited to clip_ratio.
    """
    w, g = norms(weights), norms(grads)
    ratios = rule.eta * w / (g + rule.ratio_decay * w + rule.eps)
    ratios = torch.where(torch.minimum(w, g) > 0, ratios, 1.0)
    if rule.clip_ratio is not None:
        ratios = ratios.clamp(max=rule.clip_ratio)
    return ratios


def times(ratios: Tensor, rate: float, weights: Tensors) -> Tensor:
    """Return the ratios times a learning rate, in the type of the weights."""
    return torch.mul(ratios, rate, out=weights[0].new_empty(len(weights)))


def norms(tensors: Tensors) -> Tensor:
    """Return the norm of each tensor, summed in float64: in float32 1e20 squared is infinite."""
    wide = None if tensors[0].device.type == "mps" else torch.float64  # Apple GPUs lack float64
    return torch.stack(torch._foreach_norm(tensors, dtype=wide))


def _add_momentum(weights: Tensors, steps: Tensors, buffers: Tensors, rule: GroupRule) -> None:
    """Set b = momentum b + step, then w = w - out b, in one pass over memory."""
    if rule.momentum == 0:  # torch's kernel would not accept the buffers
        momentum_step(weights, steps, buffers, rule, into=1.0, out=rule.out)
        return
    torch._fused_sgd_(
        weights,
        steps,
        buffers,
        weight_decay=0.0,
        momentum=rule.momentum,
        lr=rule.out,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        found_inf=rule.found_inf,
    )


def _scratch(weights: Tensors) -> tuple[Tensor, list[Tensor]]:
    rows = _rows(weights)
    memory = weights[0].new_empty(sum(rows), ROW)
    starts = itertools.accumulate(rows, initial=0)
    views = [
        memory.as_strided(weight.size(), weight.stride(), start * ROW)
        for weight, start in zip(weights, starts, strict=False)
    ]
    return memory, views


def _scale(scratch: Tensor, factors: Tensor, weights: Tensors) -> None:
    owners = _owners(_rows(weights), scratch.device)
    scratch.mul_(factors.index_select(0, owners).unsqueeze(1))


def _rows(weights: Tensors) -> tuple[int, ...]:
    return tuple(-(-weight.numel() // ROW) for weight in weights)


@functools.lru_cache(maxsize=32)
def _owners(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the tensor's number for each row of the scratch buffer."""
    numbers = torch.arange(len(rows))
    owners = numbers.repeat_interleave(torch.tensor(rows), output_size=sum(rows))
    return owners.to(device)  # sync: copied once for each set of tensors, not in every step

"""PyTorch's SGD; in fp16 on an accelerator the fused one, which can skip a step on the device."""

from typing import Any

import torch
from torch.optim import SGD
from torch.optim.optimizer import Optimizer


def build_sgd(
    groups: list[dict[str, Any]], *, lr: float, momentum: float, nesterov: bool, scaled: bool
) -> SGD:
    """Return SGD; with `scaled`, by a GradScaler, the host does not wait for an accelerator.

    On a CPU the optimizer is the same with or without `scaled`.
    """
    weights = (weight for group in groups for weight in group["params"])
    fused = scaled and all(weight.device.type != "cpu" for weight in weights)
    optimizer = SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=fused or None)
    if fused:
        optimizer.register_step_pre_hook(_begin_momentum)
    return optimizer


def _begin_momentum(optimizer: Optimizer, *_: object) -> None:
    """Initialise momentum with zeros.

    If torch's fused first step is skipped, its momentum would be uninitialised memory.
    """
    for group in optimizer.param_groups:
        for weight in group["params"] if group["momentum"] else ():
            if weight.grad is not None and "momentum_buffer" not in optimizer.state[weight]:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

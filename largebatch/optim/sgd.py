"""PyTorch's SGD; in fp16 on an accelerator its fused one, which skips a step there."""

from typing import Any

import torch
from torch.optim import SGD
from torch.optim.optimizer import Optimizer


def build_sgd(
    groups: list[dict[str, Any]], *, lr: float, momentum: float, nesterov: bool, scaled: bool
) -> SGD:
    """Return SGD; where it is `scaled`, by a GradScaler, no step on an accelerator is waited for.

    A CPU has nothing to wait for, and its numbers are the same, scaled or not.
    """
    weights = (weight for group in groups for weight in group["params"])
    fused = scaled and all(weight.device.type != "cpu" for weight in weights)
    optimizer = SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=fused or None)
    if fused:
        optimizer.register_step_pre_hook(_begin_momentum)
    return optimizer


def _begin_momentum(optimizer: Optimizer, *_: object) -> None:
    """Begin momentum at zero.

    Where torch's fused first step is skipped, it is memory that nothing has been written to.
    """
    for group in optimizer.param_groups:
        for weight in group["params"] if group["momentum"] else ():
            if weight.grad is not None and "momentum_buffer" not in optimizer.state[weight]:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

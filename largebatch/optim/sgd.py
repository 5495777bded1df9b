"""PyTorch's SGD; on a GPU with Triton all weights are updated in one launch.

In fp16 on another accelerator it is the fused one, which can skip a step on the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD
from torch.optim.optimizer import Optimizer

from largebatch.optim.kernels import Rule, works
from largebatch.optim.kernels.tabled import Tabled


class TabledSGD(Tabled, SGD):
    """SGD with momentum of float32 weights on GPUs, with the groups and the state of PyTorch's."""

    _step_supports_amp_scaling = True
    """True because a GradScaler may leave unscaling and skipping to `step`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch's overloads
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        scale, found_inf = (getattr(self, key, None) for key in ("grad_scale", "found_inf"))
        self._update_tables(self._rules(), scale, found_inf)
        assert not self._others
        return loss

    def _rules(self) -> list[Rule]:
        return [_rule(group) for group in self.param_groups]


def _rule(group: dict[str, Any]) -> Rule:
    return Rule(
        momentum=group["momentum"],
        decay=group["weight_decay"],
        into=1.0,
        out=group["lr"],
        ratio="none",
        nesterov=group["nesterov"],
    )


def build_sgd(
    groups: list[dict[str, Any]], *, lr: float, momentum: float, nesterov: bool, scaled: bool
) -> SGD:
    """Return SGD; with `scaled`, by a GradScaler, the host does not wait for an accelerator.

    On a CPU the optimizer is the same with or without `scaled`.
    """
    weights = [weight for group in groups for weight in group["params"]]
    if momentum and all(it.dtype == torch.float32 and works(it.device) for it in weights):
        return TabledSGD(groups, lr=lr, momentum=momentum, nesterov=nesterov)
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

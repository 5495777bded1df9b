"""PyTorch's SGD; on a GPU with Triton all weights are updated in one launch.

In fp16 on another accelerator it is the fused one, which can skip a step on the device.
"""

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.optimizer import Optimizer

from largebatch.optim.building import Weights
from largebatch.optim.kernels import GroupRule, works
from largebatch.optim.kernels.tabled import Tabled
from largebatch.optim.rates import hidden_gradients
from largebatch.recipe import optimizers as sections


class TabledSGD(Tabled, SGD):
    """SGD with momentum of float32 weights on GPUs, with the groups and the state of PyTorch's.

    PyTorch's code updates what the tables cannot: sparse gradients, other types and devices, and
    groups with dampening, `maximize` or without momentum.
    """

    _takes_sparse = True

    @property
    def _step_supports_amp_scaling(self) -> bool:  # type: ignore[override]  # torch sets it
        """True if GradScaler leaves unscaling and skipping to `step`."""
        pairs = ((it, group) for group in self.param_groups for it in group["params"])
        return all(it.grad is None or self._is_tabled(it, group) for it, group in pairs)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch's overloads
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        # GradScaler sets both for the time of a step.
        scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        self._update_tables(self._rules(), scale, found_inf)
        if self._others:
            with hidden_gradients(it for table in self._tables for it in table.parameters):
                unwrap(SGD.step)(self)  # its hooks have run
        return loss

    def _is_tabled(self, weight: Tensor, group: dict[str, Any]) -> bool:
        is_plain = group["momentum"] and not group["dampening"] and not group["maximize"]
        is_dense = weight.grad is None or weight.grad.layout is torch.strided
        is_float = weight.dtype == torch.float32
        return bool(is_plain) and is_dense and is_float and super()._is_tabled(weight, group)

    def _rules(self) -> list[GroupRule]:
        return [_rule(group) for group in self.param_groups]


def _rule(group: dict[str, Any]) -> GroupRule:
    return GroupRule(
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


def build(section: sections.SGD, weights: Weights) -> SGD:
    """Build SGD, whose biases and normalisation layers may have a rate and a decay of their own."""
    lr = weights.lr
    groups = weights.groups(weight_decay=section.weight_decay)
    groups[1] |= {
        "weight_decay": section.bias_weight_decay,
        "lr_factor": (section.bias_lr or lr) / lr,
    }
    return build_sgd(
        groups,
        lr=lr,
        momentum=section.momentum,
        nesterov=section.nesterov,
        scaled=weights.scaled,
    )

"""PyTorch's AdamW; on a device with graphs the fused one, with rates and decays on the device.

A graph can then repeat a step, and the host waits for nothing where a step is skipped.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from largebatch import accelerator
from largebatch.optim.kernels.numbers import Numbers
from largebatch.optim.kernels.tabled import as_models

_KEPT = ("betas", "eps", "amsgrad", "maximize")


class FusedAdamW(AdamW):
    """AdamW of float32 weights on one device, with the groups and the state of PyTorch's.

    A graph keeps all numbers but rates and decays: it refuses a change of others.
    """

    _numbers: Numbers | None = None
    """Rate of each group, and factor of its weights; None before the first step."""

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:  # noqa: ANN401 -- of AdamW
        super().__init__(groups, fused=True, capturable=True, **settings)

    def can_replay(self) -> bool:
        """Return True if a graph may repeat the last step: it read all rates on the device."""
        return self._numbers is not None

    def refresh(self) -> Tensor:
        """Copy rates and decays of the groups to the device: before a replay. Return them."""
        groups = self.param_groups
        if self._numbers is None:
            weights = (weight for group in groups for weight in group["params"])
            self._numbers = Numbers(next(weights).device, torch.float32)
        kept = {key: [group[key] for group in groups] for key in _KEPT}
        kept["has weight_decay"] = [group["weight_decay"] != 0 for group in groups]
        numbers = [[group["lr"], 1 - group["lr"] * group["weight_decay"]] for group in groups]
        return self._numbers.use(numbers, kept)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 -- as torch's
        """Step by the numbers on the device; gradients get their weights' layout."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        given = [(group["lr"], group["weight_decay"]) for group in self.param_groups]
        found_inf = getattr(self, "found_inf", None)
        for group, (rate, factor) in zip(self.param_groups, self.refresh(), strict=True):
            weights = [weight for weight in group["params"] if weight.grad is not None]
            fitted = as_models([weight.grad for weight in weights], weights)
            for weight, grad in zip(weights, fitted, strict=True):
                weight.grad = grad
            if group["weight_decay"] and weights:  # its kernel would take it from the host
                skips = factor if found_inf is None else torch.where(found_inf > 0, 1.0, factor)
                torch._foreach_mul_(weights, skips)
            group["lr"], group["weight_decay"] = rate, 0.0
        try:
            super().step()
        finally:
            for group, (rate, decay) in zip(self.param_groups, given, strict=True):
                group["lr"], group["weight_decay"] = rate, decay
        return loss


def build_adamw(groups: list[dict[str, Any]], **settings: Any) -> AdamW:  # noqa: ANN401 -- of AdamW
    """Return AdamW, which a graph can replay on a device that has graphs."""
    weights = [weight for group in groups for weight in group["params"]]
    kinds = {(weight.device.type, weight.dtype) for weight in weights}
    in_graphs = kinds and kinds <= {(kind, torch.float32) for kind in accelerator.GRAPHS}
    return FusedAdamW(groups, **settings) if in_graphs else AdamW(groups, **settings)

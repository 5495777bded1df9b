"""PyTorch's AdamW; on a device with graphs the fused one, with its learning rates on the device.

A graph can then repeat a step, and the host waits for nothing where a step is skipped.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from largebatch import accelerator
from largebatch.optim.building import Weights
from largebatch.optim.kernels.numbers import Numbers
from largebatch.optim.kernels.tabled import as_models
from largebatch.recipe import optimizers as sections


class FusedAdamW(AdamW):
    """AdamW of float32 weights on one device, with the groups and the state of PyTorch's."""

    _rates: Numbers | None = None
    """Learning rates of the groups; None before the first step."""

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:  # noqa: ANN401 -- of AdamW
        super().__init__(groups, fused=True, capturable=True, **settings)

    def refusal(self) -> str | None:
        """Return why a graph cannot repeat a step; None if it can."""
        return "no step was made" if self._rates is None else None

    def reads(self) -> object:
        """Return what a graph of the last step has fixed."""
        keys = ("weight_decay", "betas", "eps", "amsgrad", "maximize")
        return self._rates, [[group[key] for key in keys] for group in self.param_groups]

    def refresh(self) -> None:
        """Send the learning rates of the groups to the device: before a replay."""
        self._send_rates()

    def _send_rates(self) -> Tensor:
        """Return the learning rates of the groups, on the device."""
        if self._rates is None:
            weights = (weight for group in self.param_groups for weight in group["params"])
            self._rates = Numbers(next(weights).device, torch.float32)
        return self._rates.use([group["lr"] for group in self.param_groups])

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 -- as torch's
        """Step by the rates on the device; gradients are read in the layout of their weights."""
        weights = [
            weight
            for group in self.param_groups
            for weight in group["params"]
            if weight.grad is not None
        ]
        grads = [weight.grad for weight in weights]
        rates = [group["lr"] for group in self.param_groups]
        for weight, grad in zip(weights, as_models(grads, weights), strict=True):
            weight.grad = grad
        for group, rate in zip(self.param_groups, self._send_rates().unbind(), strict=True):
            group["lr"] = rate
        try:
            return super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
            for weight, grad in zip(weights, grads, strict=True):
                weight.grad = grad


def build_adamw(groups: list[dict[str, Any]], **settings: Any) -> AdamW:  # noqa: ANN401 -- of AdamW
    """Return AdamW, which a graph can replay on a device that has graphs."""
    weights = [weight for group in groups for weight in group["params"]]
    kinds = {(weight.device.type, weight.dtype) for weight in weights}
    in_graphs = kinds and kinds <= {(kind, torch.float32) for kind in accelerator.GRAPHS}
    return FusedAdamW(groups, **settings) if in_graphs else AdamW(groups, **settings)


def build(section: sections.AdamW, weights: Weights) -> AdamW:
    """Build AdamW, without weight decay of biases and normalisation layers."""
    groups = weights.groups(weight_decay=section.weight_decay)
    return build_adamw(groups, lr=weights.lr, betas=(section.beta1, section.beta2), eps=section.eps)

"""LARS: momentum SGD whose step length is chosen tensor by tensor.

For a weight w with gradient g, averaged over the global batch (You et al. 2017, arXiv:1708.03888):

    ratio = eta |w| / (|g| + weight_decay |w| + eps)        1 where |w| or |g| is 0

Published codes disagree on where the rate enters the momentum buffer b (written m below). At a
constant rate three of the conventions are the same method; over a schedule their steps differ by up
to an order of magnitude, so the convention is named and saved with every checkpoint:

    reference        b = m b + lr ratio (g + weight_decay w)   w -= b            MLPerf TF2, optax
    scaled-momentum  b = m b + ratio (g + weight_decay w)      w -= lr b         timm, MXNet
    outside          b = m b + (g + weight_decay w)            w -= lr ratio b   Intel's PyTorch
    fujitsu          b = m b + ratio lr (g + weight_decay w)   w -= b            MLPerf v0.6, with
                      ratio = eta |w| / (|g| + weight_decay base_lr |w| + eps)

(`fujitsu` writes lr as s_t base_lr, with the schedule s_t in [0, 1].)
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

Convention = Literal["reference", "scaled-momentum", "outside", "fujitsu"]


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling over momentum SGD.

    A group with `adapt=False` (biases, normalisation layers) takes plain momentum steps. Every
    hyper-parameter lives in the parameter groups, never on `self`, and has a default: Horovod
    rebuilds an optimizer from its groups alone. `base_lr` is the peak of the schedule; only
    `fujitsu` needs it, and it defaults to the `lr` given here.

    Gradients must be averaged and unscaled before `step`: with weight decay the ratio is not
    scale-free, and groups that are not adapted never are.
    """

    def __init__(  # noqa: PLR0913 -- the hyper-parameters of the method
        self,
        params: ParamsT,
        lr: float = 1.0,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 1e-3,
        eps: float = 0.0,
        convention: Convention = "reference",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "eta": eta,
            "eps": eps,
            "convention": convention,
            "adapt": True,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; raise ValueError where a hyper-parameter cannot be."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("base_lr", group["lr"])
        _check(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch's overloads
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)
        return loss

    def _update(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        buffer = state["momentum_buffer"].mul_(group["momentum"])
        lr, convention = group["lr"], group["convention"]
        ratio = trust_ratio(weight, grad, group) if group["adapt"] else weight.new_ones(())
        direction = grad.add(weight, alpha=group["weight_decay"])
        match convention:
            case "reference" | "fujitsu":
                buffer.add_(direction * ratio, alpha=lr)
                weight.sub_(buffer)
            case "scaled-momentum":
                buffer.add_(direction * ratio)
                weight.sub_(buffer, alpha=lr)
            case "outside":
                buffer.add_(direction)
                weight.sub_(buffer * ratio, alpha=lr)


def trust_ratio(weight: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
    """Return eta |w| / (|g| + decay |w| + eps), or 1 if either norm is 0, as a 0-d tensor.

    Norms are taken in at least float32, and nothing leaves the device.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    w = torch.linalg.vector_norm(weight, dtype=dtype)
    g = torch.linalg.vector_norm(grad, dtype=dtype)
    decay = group["weight_decay"]
    if group["convention"] == "fujitsu":
        decay *= group["base_lr"]
    ratio = group["eta"] * w / (g + decay * w + group["eps"])
    return torch.where((w > 0) & (g > 0), ratio, 1.0)


def _check(group: dict[str, Any]) -> None:
    if group["convention"] not in get_args(Convention):
        known = ", ".join(get_args(Convention))
        raise ValueError(f"convention must be one of {known}, got {group['convention']!r}")
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"momentum must be in [0, 1), got {group['momentum']}")
    if group["eta"] <= 0:
        raise ValueError(f"eta must be positive, got {group['eta']}")
    for key in ("lr", "weight_decay", "eps"):
        if group[key] < 0:
            raise ValueError(f"{key} must not be negative, got {group[key]}")

"""Learning rates of parameter groups that differ from the schedule's."""

from torch import nn
from torch.optim import Optimizer


def set_rates(optimizer: Optimizer, lr: float, *, step: int) -> None:
    """Set the learning rates of an update; `lr` is the schedule's.

    A group's rate is `lr` times its `lr_factor`, if it has one. In a group with `until` the rate
    falls linearly from `peak_lr` in place of `lr`, and is zero from update `until` on.
    """
    for group in optimizer.param_groups:
        rate = lr
        if "until" in group:
            rate = group["peak_lr"] * max(0.0, 1 - step / group["until"])
        group["lr"] = rate * group.get("lr_factor", 1.0)


def train_early(optimizer: Optimizer, weight: nn.Parameter, *, peak_lr: float, until: int) -> None:
    """Train a weight before update `until` only, as `set_rates` describes.

    It becomes a group of its own, with the other settings of the group that it leaves.
    """
    for group in list(optimizer.param_groups):
        rest = [other for other in group["params"] if other is not weight]
        if len(rest) < len(group["params"]):
            early = {**group, "params": [weight], "peak_lr": peak_lr, "until": until}
            group["params"] = rest
            optimizer.param_groups.append(early)

"""Learning rates of parameter groups that differ from the schedule's."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer


def set_rates(optimizer: Optimizer, lr: float, *, step: int) -> None:
    """Set the learning rates of an update; `lr` is the schedule's.

    A group's rate is `lr` times its `lr_factor`, if it has one. In a group with `until` the rate
    falls linearly from `peak_lr` in place of `lr`, and is zero from update `until` on. In a group
    with `after` it is zero before update `after`.
    """
    for group in optimizer.param_groups:
        rate = lr
        if "until" in group:
            rate = group["peak_lr"] * max(0.0, 1 - step / group["until"])
        group["lr"] = rate * group.get("lr_factor", 1.0) * (step >= group.get("after", 0))


def scale_rate(group: dict[str, Any], factor: float) -> None:
    """Multiply the learning rate of a group in every update, and its peak where LARS has one."""
    group["lr_factor"] = factor * group.get("lr_factor", 1.0)
    if "base_lr" in group:
        group["base_lr"] *= factor


def decay_rates(optimizer: Optimizer, depths: Mapping[nn.Parameter, int], decay: float) -> None:
    """Multiply the learning rate of each weight by `decay` to the power of its depth.

    `depths` are the numbers of layers after that of each weight: 0 for the last layer.
    """
    for depth in sorted(set(depths.values())):
        weights = [weight for weight, number in depths.items() if number == depth]
        for group in own_groups(optimizer, weights):
            scale_rate(group, decay**depth)


def frozen_weights(optimizer: Optimizer, *, step: int) -> list[nn.Parameter]:
    """Return the weights of the groups that are not trained yet: with `after` above `step`."""
    groups = (group for group in optimizer.param_groups if step < group.get("after", 0))
    return [weight for group in groups for weight in group["params"]]


@contextmanager
def hidden_gradients(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Remove the gradients of these weights in the block: an optimizer skips such weights.

    A rate of zero keeps a weight, but not its momentum, which would move it later.
    """
    hidden = [(weight, weight.grad) for weight in weights]
    for weight, _ in hidden:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in hidden:
            weight.grad = gradient


def own_groups(optimizer: Optimizer, weights: Collection[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the groups of these weights, which then hold no others.

    Weights that share a group with others move to a new one with the same settings.
    """
    chosen = set(weights)
    groups = []
    # A copy of the list: the groups that are added below are not visited.
    for group in list(optimizer.param_groups):
        moved = [weight for weight in group["params"] if weight in chosen]
        rest = [weight for weight in group["params"] if weight not in chosen]
        if moved and rest:
            # The state is kept by weight, so it follows to the new group.
            group["params"] = rest
            optimizer.param_groups.append({**group, "params": moved})
        if moved:
            groups.append(optimizer.param_groups[-1] if rest else group)
    return groups

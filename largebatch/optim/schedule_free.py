"""Schedule-Free optimizers: they compute gradients at one set of weights and evaluate another.

The library moves a model from the training weights y to the average x and back, up to rounding.
Here the weights are saved and restored, so that an evaluation does not change a single bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from largebatch.optim.building import Weights
from largebatch.optional import require_schedulefree
from largebatch.recipe import optimizers as sections


def is_averaging(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if an optimizer's groups, live or saved, belong to training weights y."""
    return any(group.get("train_mode", False) for group in groups)


def store_average(optimizer: Optimizer) -> None:
    """Replace the weights permanently with the average."""
    optimizer.eval()  # type: ignore[attr-defined]  # only called for averaging optimizers


@contextmanager
def at_average(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Set the weights to the average in this block, then restore every parameter and buffer."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    store_average(optimizer)
    try:
        yield
    finally:
        model.load_state_dict(before)
        for group in optimizer.param_groups:
            group["train_mode"] = True


def build_schedule_free(section: sections.ScheduleFree, weights: Weights) -> Optimizer:
    """Build SGDScheduleFree of schedulefree, at its training weights y."""
    optimizer: Optimizer = require_schedulefree().SGDScheduleFree(
        weights.groups(weight_decay=section.weight_decay),
        lr=weights.lr,
        momentum=section.momentum,
        r=section.weight_power,
        weight_lr_power=section.weight_lr_power,
    )
    optimizer.train()  # type: ignore[attr-defined]  # schedulefree's have it
    return optimizer

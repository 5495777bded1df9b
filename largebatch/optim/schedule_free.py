"""Schedule-Free optimizers: gradients are computed at one set of weights, another is evaluated.

The library moves a model from y, where it trains, to the average x and back. It comes back to
within a rounding; here the weights are kept meanwhile, so that an evaluation changes no bit of a
run.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer


def is_averaging(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Tell by the groups of an optimizer, or saved ones, whether the weights beside them are y."""
    return any(group.get("train_mode", False) for group in groups)


def store_average(optimizer: Optimizer) -> None:
    """Let the weights become the average, for good."""
    optimizer.eval()  # type: ignore[attr-defined]  # only what is averaging comes here


@contextmanager
def at_average(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Let the weights be the average; afterwards every parameter and buffer is as it was."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    store_average(optimizer)
    try:
        yield
    finally:
        model.load_state_dict(before)
        for group in optimizer.param_groups:
            group["train_mode"] = True

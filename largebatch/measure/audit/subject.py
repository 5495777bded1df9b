"""What a script passes to an audit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.measure.audit.findings import Finding
from largebatch.measure.audit.ranks import Ranks

Step = Callable[[Any], object]
"""What a script does with a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The arguments of `audit`, with an optimizer and a step where they were left out."""

    model: nn.Module
    inner: nn.Module
    """The model without wrappers that communicate."""

    loader: Any
    loss_fn: Callable[[Any, Any], Tensor]
    optimizer: Optimizer
    step: Step
    steps: int
    set_epoch: Callable[[int], object] | None
    base: tuple[int, float] | None
    rate: Callable[[int], float] | None
    epochs: float | None
    val_loader: Any
    evaluate: Callable[[], float] | None
    averaged: nn.Module | None


Checker = Callable[[Subject, Ranks], list[Finding]]
"""A check, which every worker calls and whose changes are undone after it."""

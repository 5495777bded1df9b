"""Imported by a run: worker 1 of three flips a bit in a gradient of every pass."""

import os

from faulty_cards import flip

from largebatch.data.types import Batch
from largebatch.training.loop import EagerStep

_forward_backward = EagerStep.forward_backward


def forward_backward(step: EagerStep, batch: Batch, *, first: bool, last: bool) -> None:
    """Do both passes; on a faulty worker the first gradient is wrong."""
    _forward_backward(step, batch, first=first, last=last)
    if os.environ.get("RANK") == "1" and os.environ.get("WORLD_SIZE") == "3":
        gradient = step.reducer.parameters[0].grad
        assert gradient is not None
        flip(gradient)


EagerStep.forward_backward = forward_backward  # type: ignore[assignment, method-assign]

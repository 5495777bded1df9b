"""Imported by a run: worker 1 runs out of memory in its fourth device batch, unless it is small."""

import os
from itertools import count

import torch

from largebatch.data.types import Batch
from largebatch.training.loop import EagerStep

_accumulate, _numbers = EagerStep.accumulate, count(1)


def accumulate(step: EagerStep, batch: Batch, *, first: bool, last: bool) -> None:
    if os.environ.get("RANK") == "1" and next(_numbers) == 4 and len(batch.images) > 24:
        raise torch.OutOfMemoryError
    _accumulate(step, batch, first=first, last=last)


EagerStep.accumulate = accumulate  # type: ignore[assignment, method-assign]

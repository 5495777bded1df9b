"""Imported by a run: worker 1 runs out of memory in its fourth device batch, unless it is small."""

import os
from itertools import count

import torch

from largebatch.data.types import Batch
from largebatch.training.loop import Work

_accumulate, _numbers = Work.accumulate, count(1)


def accumulate(work: Work, batch: Batch, *, first: bool, last: bool) -> None:
    if os.environ.get("RANK") == "1" and next(_numbers) == 4 and len(batch.images) > 24:
        raise torch.OutOfMemoryError
    _accumulate(work, batch, first=first, last=last)


Work.accumulate = accumulate  # type: ignore[assignment, method-assign]

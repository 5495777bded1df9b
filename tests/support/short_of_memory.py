"""Imported by a run: worker 1 runs out of memory in its fourth device batch, unless it is small."""

import os

import torch

from largebatch.data.types import Batch
from largebatch.training.loop import Work

_accumulate = Work.accumulate
_sizes: list[int] = []


def accumulate(work: Work, batch: Batch, *, first: bool, last: bool) -> None:
    _sizes.append(len(batch.images))
    if os.environ["RANK"] == "1" and len(_sizes) == 4 and _sizes[-1] > 24:
        raise torch.OutOfMemoryError
    _accumulate(work, batch, first=first, last=last)


Work.accumulate = accumulate  # type: ignore[assignment, method-assign]

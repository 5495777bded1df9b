"""Imported by a run: worker 1 runs out of memory in its fourth device batch, unless it is small."""

import os
from typing import Any

import torch

from largebatch.data.types import Batch
from largebatch.training.loop import Work

_accumulate = Work.accumulate
_sizes: list[int] = []


def accumulate(work: Work, batch: Batch, **which: Any) -> None:  # noqa: ANN401 -- of Work.accumulate
    _sizes.append(len(batch.images))
    if os.environ["RANK"] == "1" and len(_sizes) == 4 and _sizes[-1] > 24:
        raise torch.OutOfMemoryError
    _accumulate(work, batch, **which)


Work.accumulate = accumulate  # type: ignore[method-assign]

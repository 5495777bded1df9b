"""Trials of parts that are right, wrong or slow, or that end the process of the trials."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from largebatch.distributed.environment import world_size
from largebatch.proof import BATCHNORM, CROPS, GRAPH, OPTIMIZER, Trial, Trials


def _sum(dtype: torch.dtype, scale: float = 1.0, seconds: float = 0.0) -> list[Tensor]:
    time.sleep(seconds)
    return [torch.linspace(1, 2, 1000, dtype=dtype).cumsum(0).mul_(scale)]


def _crash() -> list[Tensor]:
    os.abort()


def _fail() -> list[Tensor]:
    raise RuntimeError("Failed to find C compiler")


KINDS: dict[str, Callable[[], list[Tensor]]] = {
    "right": partial(_sum, torch.float32),
    "wrong": partial(_sum, torch.float32, scale=1.001),
    "slow": partial(_sum, torch.float32, seconds=0.03),
    "crashes": _crash,
    "fails": _fail,
}


def trials(_: torch.device, settings: Mapping[str, str]) -> Trials:
    """Return two trials of each part; the second has the fault that the settings name."""
    assert world_size() == 1

    def make(kind: str) -> Iterator[Trial]:
        for name, ours in (("the usual", KINDS["right"]), (kind, KINDS[kind])):
            yield Trial(
                name=name,
                ours=ours,
                theirs=partial(_sum, torch.float32, seconds=0.005),
                exact=partial(_sum, torch.float64),
            )

    parts = (BATCHNORM, OPTIMIZER, CROPS, GRAPH)
    return {part: partial(make, settings.get(part, "right")) for part in parts}

"""Settings of the process during the updates of a run, restored afterwards.

Without them, Python's garbage collector would stop every worker at a different update.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cudnn

from largebatch.recipe.arithmetic.plan import Plan

_FROZEN_BY_PYTHON = 1000 if sys.version_info[:2] == (3, 12) else 0
"""Maximum number of objects that Python itself freezes as it starts."""


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Run the garbage collector only at calls of gc.collect(), over objects created inside.

    Earlier objects are frozen, so that a call takes milliseconds. Afterwards the collector is
    enabled as before, and nothing is frozen that was not, nor unfrozen but Python's own objects.
    """
    enabled, freezes = gc.isenabled(), gc.get_freeze_count() <= _FROZEN_BY_PYTHON
    gc.disable()
    if freezes:  # else unfreeze() would free what somebody else froze
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def fastest_convolutions(plan: Plan) -> Iterator[None]:
    """Use the convolutions of cuDNN or MIOpen that are fastest in a trial, for images of one size.

    The choice may differ between starts, and the last bits with it. Nothing is changed if PyTorch
    is set to be deterministic.
    """
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    before = cudnn.benchmark
    if not deterministic and not plan.sizes:
        cudnn.benchmark = True
    try:
        yield
    finally:
        cudnn.benchmark = before

"""What is set for the whole process while a run makes its updates, and put back afterwards.

Python's garbage collector would stop every worker at another update.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cudnn

from largebatch.recipe.arithmetic.plan import Plan


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Run the garbage collector only where gc.collect() is called, over what is made inside.

    What was made before is frozen, so that a call takes milliseconds. Afterwards the collector is
    as it was.
    """
    enabled, freezes = gc.isenabled(), not gc.get_freeze_count()
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
    """Use the convolutions of cuDNN or MIOpen that are fastest by trial, for images of one size.

    Which these are may change from one start to the next, and the last bits with them: nothing is
    changed where PyTorch was told to be deterministic.
    """
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    before = cudnn.benchmark
    if not deterministic and not plan.sizes:
        cudnn.benchmark = True
    try:
        yield
    finally:
        cudnn.benchmark = before

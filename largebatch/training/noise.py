"""The gradient noise scale of a run, from the reducer's measurements in every update."""

import math
from collections import deque
from typing import NamedTuple

from largebatch.recipe.arithmetic.plan import Plan
from largebatch.tracking.noise_scale import Squares, ratio

NOISE_UPDATES = 100
"""Number of updates in the running mean; single updates are far too noisy."""


class Measured(NamedTuple):
    """The fields of a step's record."""

    device_square: float
    global_square: float
    noise_scale: float


class RunningNoise:
    """The squared lengths of mean gradients, and the noise scale of the last updates."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._recent: deque[Squares] = deque(maxlen=NOISE_UPDATES)

    def add(self, step: int, first: float, whole: float, *, loss_scale: float) -> Measured:
        """Return the squares of an update and the noise scale of the last updates.

        `first` and `whole` are the reducers' measurements, summed over the workers, for gradients
        of loss_scale x loss / global_batch.
        """
        plan = self._plan
        global_batch = plan.batch_at(step)
        share = global_batch / plan.device_batch
        squares = Squares(
            small=first / plan.workers * (share / loss_scale) ** 2,
            big=whole / plan.workers / loss_scale**2,
            small_batch=plan.device_batch,
            big_batch=global_batch,
        )
        if all(map(math.isfinite, squares)):
            self._recent.append(squares)
        value = ratio(self._recent) if len(self._recent) > 1 else math.nan
        return Measured(squares.small, squares.big, value)

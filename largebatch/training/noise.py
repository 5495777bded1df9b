"""The gradient noise scale while a run trains, from what the reducer measures in every update."""

import math
from collections import deque
from typing import NamedTuple

from largebatch.recipe.arithmetic.plan import Plan
from largebatch.tracking.noise_scale import Squares, ratio

NOISE_UPDATES = 100
"""How many updates the running value looks back over; single ones are far too noisy."""


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
        """Return what an update has measured, and the noise scale of the last ones.

        `first` and `whole` are sums over the workers of what their reducers measured of gradients
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

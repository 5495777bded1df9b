"""The level of the learning rate that follows from the evaluations so far.

A function of the record, which every worker has alike and a checkpoint holds: so all change the
rate in the same step, and a resumed run has the rate that it had.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from largebatch.recipe.schedule import Plateau
from largebatch.schedules.functions import Schedule


class Reading(NamedTuple):
    """An evaluation on the way."""

    step: int
    """Updates that lay behind it."""

    loss: float
    top1: float


def plateau_level(section: Plateau, readings: Sequence[Reading], *, steps: int) -> float:
    """Return what the policy's rate is multiplied by after these evaluations of a run of `steps`.

    With `back_until: 0` and levels 1, f, f^2 ... these are the rates of torch's ReduceLROnPlateau
    with factor f and an absolute threshold; with `back_until: 0.8` a plateau raises the rate during
    the first four fifths of a run, as in LRBench's ChangeLROnPlateau (arXiv:1908.06477's code). A
    metric that is no number is no improvement.
    """
    level, best, stalled, cooling = section.first, float("-inf"), 0, 0
    for reading in readings:
        value = reading.top1 if section.metric == "top1" else -reading.loss
        if value > best + section.threshold:
            best, stalled = value, 0
        else:
            stalled += 1
        if cooling:
            cooling, stalled = cooling - 1, 0
        if stalled > section.patience:
            level += -1 if reading.step < section.back_until * steps else 1
            level = min(max(level, 0), len(section.levels) - 1)
            cooling, stalled = section.cooldown, 0
    return section.levels[level]


def with_plateau(
    schedule: Schedule, section: Plateau, readings: Callable[[], Sequence[Reading]], steps: int
) -> Schedule:
    """Return the rates of a schedule times the level that the `readings` so far lead to."""
    return lambda step: schedule(step) * plateau_level(section, readings(), steps=steps)

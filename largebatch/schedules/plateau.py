"""The level of the learning rate, by the evaluations so far.

It is a function of the evaluations, which are the same on every worker and are in a checkpoint. So
all workers change the rate in the same step, and a resumed run continues with the same rate.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from largebatch.recipe.schedule import Plateau
from largebatch.schedules.functions import Schedule


class Reading(NamedTuple):
    """An evaluation during the run."""

    step: int
    """Number of updates before it."""

    loss: float
    top1: float


def plateau_level(section: Plateau, readings: Sequence[Reading], *, steps: int) -> float:
    """Return the factor of the policy's rate after these evaluations of a run of `steps`.

    With `back_until: 0` and levels 1, f, f^2 ... these are the rates of torch's ReduceLROnPlateau
    with factor f and an absolute threshold; with `back_until: 0.8` a plateau raises the rate during
    the first four fifths of a run, as in LRBench's ChangeLROnPlateau (arXiv:1908.06477's code). A
    metric that is NaN is no improvement.
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
    """Return a schedule times the level after the `readings` so far."""
    return lambda step: schedule(step) * plateau_level(section, readings(), steps=steps)

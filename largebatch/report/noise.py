"""The gradient noise scale over a run, and what it means for its batch."""

import math
from itertools import pairwise
from typing import NamedTuple

from largebatch.formatting import plural, three_digits
from largebatch.report.run import Run
from largebatch.tracking.events import StepEvent
from largebatch.tracking.noise_scale import NoiseScale, Squares, estimate

PARTS = 12  # into which the updates of a run are divided; each has its own estimate
LEAST = 25  # updates in a part; fewer give no useful estimate
BOUNDED = 4 * LEAST  # updates that are advised: the interval of one part often has no upper bound
MORE_STEPS = 0.2  # that the critical batch needs beyond linear scaling (arXiv:2410.21676)


class NoiseSegment(NamedTuple):
    """Some updates of a run that follow each other, and the noise scale over them."""

    first: int
    last: int
    scale: NoiseScale


def course(run: Run) -> list[NoiseSegment]:
    """Return the noise scale part by part; none where it was not measured, or in too few updates.

    The affine stage is left out, in which few weights have gradients.
    """
    steps = measured(run)
    number = min(PARTS, len(steps) // LEAST)
    bounds = [round(part * len(steps) / number) for part in range(number + 1)] if number else []
    return [_part(run, steps[begin:end]) for begin, end in pairwise(bounds)]


def has_course(run: Run) -> bool:
    """Return True if there are enough updates for one part, without an estimate."""
    return len(measured(run)) >= LEAST


def latest(run: Run) -> NoiseSegment:
    """Return the noise scale over the end of a run: its last part, or more until it has a bound."""
    steps = measured(run)
    number = len(steps) // max(1, min(PARTS, len(steps) // LEAST))
    part = _part(run, steps[-number:])
    # A few updates often give no upper bound. More of the end are taken, up to the whole run.
    while not math.isfinite(part.scale.high) and number < len(steps):
        number = min(2 * number, len(steps))
        part = _part(run, steps[-number:])
    return part


def _part(run: Run, steps: list[StepEvent]) -> NoiseSegment:
    return NoiseSegment(steps[0].step, steps[-1].step, over(run, steps))


def over(run: Run, steps: list[StepEvent]) -> NoiseScale:
    """Return the noise scale over these updates; a resumed run may have other device batches."""
    squares = []
    for step in steps:
        plan = next(s.plan for s in reversed(run.starts) if s.resume_step <= step.step)
        sizes = plan.device_batch, plan.batch_at(step.step)
        squares.append(Squares(step.device_square, step.global_square, *sizes))
    return estimate(squares)


def measured(run: Run) -> list[StepEvent]:
    """Return the updates whose noise scale was measured; those of the affine stage do not count."""
    return [
        step
        for step in run.steps
        if step.stage != "affine" and math.isfinite(step.device_square + step.global_square)
    ]


def describe_noise(run: Run) -> str:
    """Return what the noise scale at the end means for the batch, in two sentences."""
    part = latest(run)
    scale = part.scale
    batch = run.plan.batch_at(part.last)
    begin = f"Over the last {plural(scale.updates, 'update')} the gradient noise scale is "
    if not math.isfinite(scale.high):
        return f"{begin}at least {three_digits(scale.low)} and has no upper bound: too few updates."
    if not scale.value > 0:
        return f"{begin}too small to be measured: at most {three_digits(scale.high)}."
    return (
        f"{begin}{three_digits(scale.value)} (95 %: {three_digits(scale.low)} to "
        f"{three_digits(scale.high)}). By arXiv:1812.06162 a batch of {batch:,} then needs "
        f"{batch / scale.value:.0%} more steps than linear scaling from small batches; one of "
        f"{three_digits(MORE_STEPS * scale.value)} would need {MORE_STEPS:.0%} more."
    )

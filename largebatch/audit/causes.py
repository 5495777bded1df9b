"""Causes of a gradient that is a multiple of the exact one."""

import math
from typing import NamedTuple

from largebatch.formatting import plural, three_digits

NAMED_SCALE = 0.05
"""Largest relative difference of a scale from the factor that explains it."""


_SMALLEST_SCALE = 2**4
"""Power of two from which on a factor of the loss is a loss scale."""


class Cause(NamedTuple):
    """Why a gradient is a multiple of the exact one."""

    text: str
    remedy: str
    is_certain: bool = True
    """False for a factor below 1 that clipping may be."""


def causes_of(
    scale: float,
    *,
    loss_scale: float,
    workers: int,
    micros: int,
    batch: float,
    unscaled: float = 1.0,
) -> list[Cause]:
    """Return the causes of a wrong scale.

    `loss_scale` is the factor of the script's loss to the mean loss of a micro-batch of `batch`
    samples. The rest of the scale is due to the reduction. If it is NaN, it is taken to be right.
    `unscaled` is the scale that a GradScaler removed.

    >>> causes_of(8, loss_scale=1, workers=8, micros=1, batch=32)[0].text
    'gradients are summed over 8 workers, not averaged'
    >>> causes_of(4, loss_scale=1, workers=8, micros=4, batch=32)[0].text
    'the losses of 4 micro-batches are added, not averaged'
    """
    summed = 1.0 if math.isnan(loss_scale) else loss_scale * micros
    factor = summed * unscaled
    if factor >= _SMALLEST_SCALE and _is(scale, 1 / factor):
        cause = f"gradients are divided by the loss scale {factor:g} twice"
        return [Cause(cause, "unscale once: scaler.step does it unless unscale_ was called")]
    rest, causes = scale / summed, []
    if not _is(summed, 1):
        causes.append(_cause_in_loss(summed, micros=micros, batch=batch))
    if _is(rest, workers):
        cause = f"gradients are summed over {plural(workers, 'worker')}, not averaged"
        causes.append(Cause(cause, "divide by the number of workers once"))
    elif _is(rest, 1 / workers):
        cause = f"gradients are divided by {plural(workers, 'worker')} twice"
        remedy = "divide once: DistributedDataParallel and Horovod average already"
        causes.append(Cause(cause, remedy))
    elif not _is(rest, 1):
        cause = f"a factor {three_digits(rest)} after the loss"
        remedy = "look for a factor between backward and the update"
        if rest < 1:
            cause += ", as of clipping"
            remedy = (
                "clip with torch.nn.utils.clip_grad_norm_, which is checked; else l" + remedy[1:]
            )
        causes.append(Cause(cause, remedy, is_certain=rest > 1))
    return causes


def float16_remedy(does: str) -> str:
    """Return what to change where float16 overflows or underflows."""
    return (
        f"float16 {does}: send float32 or bfloat16, or divide by the number of workers before the "
        "sum and use a GradScaler"
    )


def _cause_in_loss(factor: float, *, micros: int, batch: float) -> Cause:
    """Return the cause of a loss that is too large by a factor, over an update."""
    if micros > 1 and _is(factor, micros):
        cause = f"the losses of {micros} micro-batches are added, not averaged"
        return Cause(cause, "divide the loss of each micro-batch by their number")
    if micros > 1 and _is(factor, 1 / micros):
        return Cause(f"the loss is divided by {micros} micro-batches twice", "divide it once")
    if micros > 1 and 1 < factor < micros:
        cause = (
            f"the losses of {micros} micro-batches are divided by {three_digits(micros / factor)}"
        )
        return Cause(cause, f"divide the loss of each micro-batch by {micros}")
    if _is(factor, batch) or _is(factor, batch * micros):
        cause = f"the loss is a sum over {batch:g} samples, not a mean"
        return Cause(cause, 'use reduction="mean", or divide by the samples of all workers')
    if factor >= _SMALLEST_SCALE and _is(math.log2(factor), round(math.log2(factor)), 1e-6):
        cause = f"the gradient still has the loss scale {factor:g}"
        remedy = "call scaler.step(optimizer), or scaler.unscale_(optimizer) before the update"
        return Cause(cause, remedy)
    cause = f"the loss is {three_digits(factor)} times loss_fn"
    return Cause(cause, "remove the factor from the loss")


def _is(value: float, expected: float, tolerance: float = NAMED_SCALE) -> bool:
    return abs(value / expected - 1) <= tolerance

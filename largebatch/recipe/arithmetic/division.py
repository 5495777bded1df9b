"""How a global batch is divided over workers and micro-batches: the possible device batches."""

import math

from largebatch.errors import PlanError
from largebatch.recipe.recipe import Recipe

DEVICE_BATCH_LIMIT = 256
"""The largest device batch that is chosen by default."""


def divide_batch(recipe: Recipe, *, workers: int) -> int:
    """Return the device batch; raise PlanError where a global batch cannot be divided.

    With a protocol it is a learner's mini-batch, on any number of workers.
    """
    if recipe.protocol is not None:
        return recipe.protocol.mini_batch(recipe.batch.global_batch)
    batch, span = recipe.batch, recipe.batch.bn_span or 1
    common = math.gcd(*batch.by_key.values())  # its divisors divide the batch of every piece
    for key, size in batch.by_key.items():
        if workers < 1 or size % workers:
            which = "the global batch" if not batch.schedule else f"the global batch ({key})"
            raise PlanError(
                f"{which} of {size} cannot be divided over {workers} workers; possible numbers of "
                f"workers: {_some(_divisors(common))}"
            )
    per_worker = common // workers
    possible = device_batches(per_worker, workers=workers, span=span)
    if recipe.reduction.parts is not None:
        possible = _within_parts(possible, recipe, workers=workers)
    if "noise_scale" in recipe.monitor:
        possible = _measurable(possible, recipe, workers=workers)
    device_batch = recipe.execution.device_batch
    if device_batch is None:
        return _choose_device_batch(possible, span=span)
    if device_batch not in possible:
        raise _impossible(device_batch, possible, recipe, workers=workers)
    return device_batch


def may_split(recipe: Recipe, *, workers: int) -> bool:
    """Return True if groups of workers may have to communicate; no other batch is planned yet."""
    if recipe.reduction.parts is not None:
        return True
    try:
        return (recipe.batch.bn_span or 1) // divide_batch(recipe, workers=workers) > 1
    except PlanError:  # raised again by make_plan, when the workers have compared their recipes
        return True


def _impossible(
    device_batch: int, possible: list[int], recipe: Recipe, *, workers: int
) -> PlanError:
    """Return the error for a device batch that is not one of the possible ones."""
    batch = recipe.batch
    span, per_worker = batch.bn_span, math.gcd(*batch.by_key.values()) // workers
    spans = f" into whole BatchNorm spans of {span}" if span else ""
    shared = ", nor a span evenly over some of the workers" if spans and workers > 1 else ""
    share = f"each worker's share of {per_worker} samples"
    for key, size in batch.by_key.items() if batch.schedule else ():
        if size // workers % device_batch:
            share = f"each worker's share of {size // workers} samples of {key} ({size})"
            break
    return PlanError(
        f"a device batch of {device_batch} does not divide {share}"
        f"{spans}{shared}; possible device batches: {_some(possible)}"
    )


def device_batches(per_worker: int, *, workers: int, span: int) -> list[int]:
    """Return the divisors of a worker's share that keep every span whole, smallest first.

    Either a device batch holds whole spans, or a group of workers holds one span. At least one is
    possible: the greatest common divisor of share and span, since the global batch is a multiple of
    both.

    >>> device_batches(24, workers=4, span=48)  # groups of 4 or 2 workers
    [12, 24]
    >>> device_batches(32, workers=1024, span=128)
    [1, 2, 4, 8, 16, 32]
    >>> device_batches(96, workers=1, span=48)
    [48, 96]
    """
    return [
        size
        for size in _divisors(per_worker)
        if size % span == 0 or (span % size == 0 and workers % (span // size) == 0)
    ]


def _within_parts(possible: list[int], recipe: Recipe, *, workers: int) -> list[int]:
    """Return the device batches that hold whole spans of one of Adasum's parts.

    Raises PlanError where the parts cannot be divided over the workers.
    """
    batch, parts = recipe.batch.global_batch, recipe.reduction.parts or 1
    span = recipe.batch.bn_span or 1
    sizes = [size for size in possible if size % span == 0 and batch // parts % size == 0]
    if max(workers, parts) % min(workers, parts) or not sizes:
        numbers = [n for n in _divisors(batch // span) if max(n, parts) % min(n, parts) == 0]
        raise PlanError(
            f"reduction.parts: {parts} parts of {batch // parts} samples, in whole BatchNorm "
            f"spans, cannot be divided over {workers} workers; possible numbers of workers: "
            f"{_some(numbers)}"
        )
    return sizes


def _measurable(possible: list[int], recipe: Recipe, *, workers: int) -> list[int]:
    """Return the device batches whose gradients differ from the global batch's.

    Raises PlanError if there are none.
    """
    batch = recipe.batch
    span, least = batch.bn_span or 1, min(batch.by_key.values())
    left = [size for size in possible if size % span == 0 and size < least]
    if not left:
        raise PlanError(
            f"monitor: noise_scale compares a device batch of whole BatchNorm spans with the "
            f"global batch, and none is smaller than {least} with spans of {span} on {workers} "
            "workers; give a smaller batch.bn_span, fewer workers or a larger batch, or monitor: []"
        )
    return left


def _choose_device_batch(possible: list[int], *, span: int) -> int:
    """Return the largest device batch within the limit, of whole spans if possible."""
    whole = [size for size in possible if size % span == 0]
    fitting = [size for size in whole or possible if size <= DEVICE_BATCH_LIMIT]
    return max(fitting, default=min(whole or possible))


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:12]))
    return shown if len(numbers) <= 12 else f"{shown}, ... {numbers[-1]}"

"""The arithmetic of a run, before anything heavy is imported.

A recipe fixes the updates: how many, at which rate, from which positions of the sample order. A
plan divides each of them over workers and micro-batches. Epochs become steps here, once; below
this module everything counts steps and positions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from largebatch.errors import PlanError, RecipeError
from largebatch.recipe.pieces import (
    BatchPiece,
    Pieces,
    SizePiece,
    find_pieces,
    find_sizes,
    piece_at,
    position_at,
    steps_for,
    steps_from_start,
    steps_to_end,
    whole,
    within,
)
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.sections import MAX_UPDATES, Duration

DEVICE_BATCH_LIMIT = 256
"""The largest device batch that is chosen without being asked for."""


MAX_EVALUATIONS = 100_000
"""On the way of a run: more of them would take longer to plan than a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one recipe runs on `workers` workers. Positions count samples from the run's start."""

    workers: int
    global_batch: int
    """Samples in an update, until the batch schedule changes them."""

    device_batch: int
    accumulation: int
    """Device batches each worker goes through for one update of global_batch."""

    batch_changes: tuple[BatchPiece, ...] = ()
    """The pieces of the batch schedule after the first."""

    bn_span: int | None
    """Samples that share BatchNorm statistics."""

    sync_workers: int = 1
    """How many workers side by side share each span while training; 1: each holds whole spans."""

    train_samples: int
    """Those that are trained on: images held out are not among them."""

    val_samples: int
    steps: int
    """Optimizer updates of the schedule, clean ones included."""

    warmup_steps: int
    clean_steps: int
    affine_steps: int = 0
    """Updates after the schedule, in which few weights move."""

    sizes: tuple[SizePiece, ...] = ()
    """Image sizes of the updates on augmented images; none: that of the evaluation."""

    evaluate_after: tuple[int, ...]
    """Numbers of updates after which accuracy is measured; every stage ends with one."""

    @property
    def train_steps(self) -> int:
        """Updates on augmented images; the clean ones follow."""
        return self.steps - self.clean_steps

    @property
    def updates(self) -> int:
        """Optimizer updates in the whole run."""
        return self.steps + self.affine_steps

    @property
    def statistics_batch(self) -> int:
        """Samples a worker shows the model at a time to measure BatchNorm statistics.

        The fewest whole spans that hold a device batch: workers do not communicate there, because
        their shares may be unequal, and forward passes alone need little memory.
        """
        span = self.bn_span or 1
        return math.ceil(self.device_batch / span) * span

    @property
    def pieces(self) -> Pieces:
        """The pieces of the run in which the global batch is the same."""
        return BatchPiece(global_batch=self.global_batch), *self.batch_changes

    def within(self, steps: range) -> list[tuple[range, int, int]]:
        """Return the steps of each piece, its global batch and the accumulation for that."""
        return [
            (part, piece.global_batch, self.accumulation * piece.global_batch // self.global_batch)
            for piece, part in within(self.pieces, steps)
        ]

    def sized(self, steps: range, *, otherwise: int) -> list[tuple[range, int]]:
        """Return steps on augmented images with their image sizes; `otherwise` without a schedule.

        All of them are before the clean ones.
        """
        if not self.sizes:
            return [(steps, otherwise)]
        ends = [0, *(piece.end for piece in self.sizes)]
        return [
            (range(max(steps.start, begin), min(steps.stop, piece.end)), piece.image_size)
            for begin, piece in zip(ends, self.sizes, strict=False)
            if max(steps.start, begin) < min(steps.stop, piece.end)
        ]

    def image_size(self, position: int, *, otherwise: int) -> int:
        """Return the side of the augmented image at a position of the run."""
        step = steps_for(self.pieces, position + 1) - 1
        found = self.sized(range(step, step + 1), otherwise=otherwise)
        return found[0][1] if found else otherwise

    def batch_at(self, step: int) -> int:
        """Return the global batch of this update."""
        return piece_at(self.pieces, step).global_batch

    def position(self, step: int) -> int:
        """Return the position of the first sample of this update."""
        return position_at(self.pieces, step)

    @property
    def steps_per_epoch(self) -> float:
        """Updates of global_batch in one pass over the training data; batches wrap over its end."""
        return self.train_samples / self.global_batch

    def epoch(self, steps: int) -> float:
        """Return how many passes over the training data the first `steps` updates make."""
        return self.position(steps) / self.train_samples

    def positions(self, step: int, micro: int, rank: int) -> range:
        """Return the positions of one device batch.

        The workers' device batches of one micro-batch lie side by side, so the samples that share
        BatchNorm statistics are the same contiguous run however the global batch is divided.
        """
        per_micro = self.workers * self.device_batch
        start = self.position(step) + micro * per_micro + rank * self.device_batch
        return range(start, start + self.device_batch)


def make_plan(recipe: Recipe, *, workers: int) -> Plan:
    """Divide a recipe over workers.

    Where `execution.device_batch` is null it is the largest that fits DEVICE_BATCH_LIMIT. Whole
    BatchNorm spans in a device batch are preferred; where a worker's share has none, several
    workers share each span. The device batch is the same in all pieces of a batch schedule.

    Raises PlanError where a global batch cannot be divided so, RecipeError where the recipe's
    own lengths contradict each other.
    """
    device_batch = _divide(recipe, workers=workers)
    batch, pieces = recipe.batch, find_pieces(recipe)
    steps = steps_from_start(pieces, recipe, recipe.duration, math.ceil)
    warmup, steps_in = recipe.schedule.warmup, converter(recipe)
    clean, affine = (recipe.polish.clean, recipe.polish.affine) if recipe.polish else (None, None)
    if steps > MAX_UPDATES:
        raise RecipeError(
            f"duration: {recipe.duration.epochs:g} epochs are {steps:,} updates, expected at most "
            f"{MAX_UPDATES:,}; give fewer epochs or a larger batch.global_batch"
        )
    clean_steps = steps_to_end(pieces, recipe, clean, end=steps) if clean else 0
    plan = Plan(
        workers=workers,
        global_batch=batch.global_batch,
        device_batch=device_batch,
        accumulation=batch.global_batch // (workers * device_batch),
        batch_changes=pieces[1:],
        bn_span=batch.bn_span,
        sync_workers=max(1, (batch.bn_span or 1) // device_batch),
        train_samples=recipe.train_samples,
        val_samples=recipe.data.val_samples,
        steps=steps,
        warmup_steps=steps_for(pieces, steps_in(warmup) * batch.global_batch) if warmup else 0,
        clean_steps=clean_steps,
        affine_steps=converter(recipe, recipe.batch.last)(affine) if affine else 0,
        evaluate_after=_evaluations(recipe, pieces, steps=steps),
    )
    _check_lengths(recipe, plan)
    return replace(plan, sizes=find_sizes(recipe, pieces, end=plan.train_steps))


def _divide(recipe: Recipe, *, workers: int) -> int:
    """Return the device batch; raise PlanError where a global batch cannot be divided."""
    batch, span = recipe.batch, recipe.batch.bn_span or 1
    together = math.gcd(*batch.by_key.values())  # what divides this divides the batch of each piece
    for key, size in batch.by_key.items():
        if workers < 1 or size % workers:
            which = "the global batch" if not batch.schedule else f"the global batch ({key})"
            raise PlanError(
                f"{which} of {size} cannot be divided over {workers} workers; possible numbers of "
                f"workers: {_some(_divisors(together))}"
            )
    per_worker = together // workers
    possible = _device_batches(per_worker, workers=workers, span=span)
    device_batch = recipe.execution.device_batch
    if device_batch is None:
        return _choose_device_batch(possible, span=span)
    if device_batch not in possible:
        spans = f" into whole BatchNorm spans of {span}" if batch.bn_span else ""
        shared = ", nor a span evenly over some of the workers" if spans and workers > 1 else ""
        share = f"each worker's share of {per_worker} samples"
        for key, size in batch.by_key.items() if batch.schedule else ():
            if size // workers % device_batch:
                share = f"each worker's share of {size // workers} samples of {key} ({size})"
                break
        raise PlanError(
            f"a device batch of {device_batch} does not divide {share}"
            f"{spans}{shared}; possible device batches: {_some(possible)}"
        )
    return device_batch


def _check_lengths(recipe: Recipe, plan: Plan) -> None:
    """Raise RecipeError where a part of the schedule is as long as all of it, or comes after it."""
    for place, piece in enumerate(plan.batch_changes):
        if piece.step >= plan.steps:
            raise RecipeError(
                f"batch.schedule.{place}.after (step {piece.step}) must lie before the end of the "
                f"run ({plan.steps} steps): no update would have that batch"
            )
    for key, length in (("schedule.warmup", plan.warmup_steps), ("polish.clean", plan.clean_steps)):
        if length >= plan.steps:
            raise RecipeError(
                f"{key} ({length} steps) must be shorter than duration ({plan.steps} steps)"
            )
    ema = recipe.polish.ema if recipe.polish else None
    if ema is not None and 1 / (1 - ema) > plan.steps:
        raise RecipeError(
            f"polish.ema ({ema:g}) reaches back over {1 / (1 - ema):,.0f} updates and the schedule "
            f"has {plan.steps:,}: the EMA would hold weights from the start; give less than "
            f"{1 - 1 / plan.steps:.6g}"
        )


def measuring_plan(recipe: Recipe, *, workers: int) -> Plan:
    """Plan to evaluate or polish on any number of workers, with any device batch.

    Its positions are no updates of the recipe; only forward passes may use it.
    """
    alone = make_plan(recipe.mathematics, workers=1)
    device_batch = recipe.execution.device_batch or alone.device_batch
    return replace(alone, workers=workers, device_batch=device_batch)


def describe_spans(plan: Plan) -> str:
    """Say where the BatchNorm spans of a plan lie, and why workers share them if they do."""
    if plan.bn_span is None:
        return "no BatchNorm"
    if plan.sync_workers == 1:
        return f"{plan.bn_span} samples, {plan.device_batch // plan.bn_span} in a device batch"
    share = math.gcd(*(piece.global_batch for piece in plan.pieces)) // plan.workers
    reason = "as the device batch asks for"
    if share % plan.bn_span:
        reason = f"a worker's {share} samples of the global batch are no whole spans"
    return (
        f"{plan.bn_span} samples = {plan.sync_workers} workers x {plan.device_batch}, who exchange "
        f"statistics ({reason})"
    )


def describe_decoding(recipe: Recipe) -> str:
    """Say where pixels come from."""
    execution = recipe.execution
    if recipe.data.source == "synthetic":
        return "synthetic"
    if execution.cache is None:
        return f"decoded by {execution.decoder or 'torchvision'}"
    where = "; on CPU workers: the same as memory" if execution.cache == "device" else ""
    return f"decoded once, cached as bytes (execution.cache: {execution.cache}{where})"


def converter(recipe: Recipe, global_batch: int | None = None) -> Callable[[Duration], int]:
    """Return what turns epochs into updates of one global batch, by default the first of the run.

    It is the nearest number, but at least one.
    """
    steps_per_epoch = recipe.train_samples / (global_batch or recipe.batch.global_batch)

    def steps_in(duration: Duration) -> int:
        if duration.steps is not None:
            return duration.steps
        assert duration.epochs is not None
        return whole(duration.epochs * steps_per_epoch)

    return steps_in


def _evaluations(recipe: Recipe, pieces: Pieces, *, steps: int) -> tuple[int, ...]:
    every, offset = recipe.evaluation.every_epochs, recipe.evaluation.offset_epochs
    if every is None:
        return ()
    last_epoch = position_at(pieces, steps) / recipe.train_samples
    smallest = min(piece.global_batch for piece in pieces)
    each_step = every * (recipe.train_samples / smallest) <= 1  # as often as can be, or more often
    number = steps if each_step else round(last_epoch / every)
    if number > MAX_EVALUATIONS:
        raise RecipeError(
            f"evaluation.every_epochs: {every:g} makes {number:,} evaluations, expected at most "
            f"{MAX_EVALUATIONS:,}"
        )

    def at(epoch: float) -> int:
        return steps_from_start(pieces, recipe, Duration.model_construct(epochs=epoch))

    if each_step:
        return tuple(range(at(offset), steps + 1))
    epochs = (offset + k * every for k in range(math.ceil(last_epoch / every) + 1))
    points = {at(epoch) for epoch in epochs if epoch > 0}
    return tuple(sorted(point for point in points if point <= steps))


def _device_batches(per_worker: int, *, workers: int, span: int) -> list[int]:
    """Return the divisors of a worker's share that keep every span whole, smallest first.

    Either a device batch holds whole spans, or a group of workers holds one. There always is one:
    the greatest common divisor of share and span, because the global batch is a multiple of both.

    >>> _device_batches(24, workers=4, span=48)  # groups of 4 or 2 workers
    [12, 24]
    >>> _device_batches(32, workers=1024, span=128)
    [1, 2, 4, 8, 16, 32]
    >>> _device_batches(96, workers=1, span=48)
    [48, 96]
    """
    return [
        size
        for size in _divisors(per_worker)
        if size % span == 0 or (span % size == 0 and workers % (span // size) == 0)
    ]


def _choose_device_batch(possible: list[int], *, span: int) -> int:
    """Return the largest within the limit, if it can be one of whole spans."""
    whole = [size for size in possible if size % span == 0]
    fitting = [size for size in whole or possible if size <= DEVICE_BATCH_LIMIT]
    return max(fitting, default=min(whole or possible))


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:12]))
    return shown if len(numbers) <= 12 else f"{shown}, ... {numbers[-1]}"


def may_share_spans(recipe: Recipe, *, workers: int) -> bool:
    """Return whether several workers may have to normalise together; what is no plan may."""
    try:
        return make_plan(recipe, workers=workers).sync_workers > 1
    except PlanError:
        return True

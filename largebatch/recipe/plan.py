"""The arithmetic of a run, before anything heavy is imported.

A recipe fixes the updates: how many, at which rate, from which positions of the sample order. A
plan divides each of them over workers and micro-batches. Epochs become steps here, once; below
this module everything counts steps and positions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from largebatch.errors import PlanError, RecipeError
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.sections import MAX_UPDATES, Duration, Polish

DEVICE_BATCH_LIMIT = 256
"""The largest device batch that is chosen without being asked for."""


MAX_EVALUATIONS = 100_000
"""On the way of a run: more of them would take longer to plan than a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one recipe runs on `workers` workers. Positions count samples from the run's start."""

    workers: int
    global_batch: int
    device_batch: int
    accumulation: int
    """Device batches each worker goes through for one update."""

    bn_span: int | None
    """Samples that share BatchNorm statistics."""

    sync_workers: int = 1
    """How many workers side by side share each span while training; 1: each holds whole spans."""

    parts: int = 1
    """Runs of consecutive samples of a global batch whose gradients Adasum combines."""

    train_samples: int
    """Those that are trained on: images held out are not among them."""

    val_samples: int
    steps: int
    """Optimizer updates of the schedule, clean ones included."""

    warmup_steps: int
    clean_steps: int
    swa_steps: int = 0
    swa_every: int = 0
    """Updates at the end of the schedule over which weights are averaged, and their interval."""

    affine_steps: int = 0
    """Updates after the schedule, in which few weights move."""

    evaluate_after: tuple[int, ...]
    """Numbers of updates after which accuracy is measured; every stage ends with one."""

    @property
    def train_steps(self) -> int:
        """Updates on augmented images; the clean ones follow."""
        return self.steps - self.clean_steps

    @property
    def swa_after(self) -> range:
        """Numbers of updates after which the weights are averaged, the last ones first."""
        return range(self.steps, self.steps - self.swa_steps, -max(1, self.swa_every))

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
    def steps_per_epoch(self) -> float:
        """Updates in one pass over the training data; batches wrap over the end of a pass."""
        return self.train_samples / self.global_batch

    def epoch(self, steps: int) -> float:
        """Return how many passes over the training data `steps` updates make."""
        return steps / self.steps_per_epoch

    def positions(self, step: int, micro: int, rank: int) -> range:
        """Return the positions of one device batch.

        The workers' device batches of one micro-batch lie side by side, so the samples that share
        BatchNorm statistics are the same contiguous run however the global batch is divided. For
        Adasum, whose parts are such runs too, those of one worker do, and each holds whole spans.
        """
        if self.parts > 1:
            place = rank * self.accumulation + micro
            start = step * self.global_batch + place * self.device_batch
            return range(start, start + self.device_batch)
        per_micro = self.workers * self.device_batch
        start = step * self.global_batch + micro * per_micro + rank * self.device_batch
        return range(start, start + self.device_batch)


def make_plan(recipe: Recipe, *, workers: int) -> Plan:
    """Divide a recipe over workers.

    Where `execution.device_batch` is null it is the largest that fits DEVICE_BATCH_LIMIT. Whole
    BatchNorm spans in a device batch are preferred; where a worker's share has none, several
    workers share each span.

    Raises PlanError where the global batch cannot be divided so, RecipeError where the recipe's
    own lengths contradict each other.
    """
    batch = recipe.batch
    span = batch.bn_span or 1
    if workers < 1 or batch.global_batch % workers:
        raise PlanError(
            f"the global batch of {batch.global_batch} cannot be divided over {workers} workers; "
            f"possible numbers of workers: {_some(_divisors(batch.global_batch))}"
        )
    per_worker = batch.global_batch // workers
    parts = recipe.reduction.parts or 1
    possible = _device_batches(per_worker, workers=workers, span=span)
    if parts > 1:
        possible = _within_parts(possible, parts, batch.global_batch, workers=workers, span=span)
    device_batch = recipe.execution.device_batch
    if recipe.monitor:
        possible = _measurable(possible, recipe, workers=workers)
    if device_batch is None:
        device_batch = _choose_device_batch(possible, span=span)
    if device_batch not in possible:
        spans = f" into whole BatchNorm spans of {span}" if batch.bn_span else ""
        shared = ", nor a span evenly over some of the workers" if spans and workers > 1 else ""
        raise PlanError(
            f"a device batch of {device_batch} does not divide each worker's share of "
            f"{per_worker} samples{spans}{shared}; possible device batches: {_some(possible)}"
        )

    steps_in = converter(recipe)
    steps = steps_in(recipe.duration, math.ceil)
    warmup = recipe.schedule.warmup
    polish = recipe.polish or Polish.model_construct()
    clean, swa, affine = polish.clean, polish.swa, polish.affine
    if steps > MAX_UPDATES:
        raise RecipeError(
            f"duration: {recipe.duration.epochs:g} epochs are {steps:,} updates, expected at most "
            f"{MAX_UPDATES:,}; give fewer epochs or a larger batch.global_batch"
        )
    plan = Plan(
        workers=workers,
        global_batch=batch.global_batch,
        device_batch=device_batch,
        accumulation=per_worker // device_batch,
        bn_span=batch.bn_span,
        sync_workers=max(1, span // device_batch),
        parts=parts,
        train_samples=recipe.train_samples,
        val_samples=recipe.data.val_samples,
        steps=steps,
        warmup_steps=steps_in(warmup) if warmup else 0,
        clean_steps=steps_in(clean) if clean else 0,
        swa_steps=steps_in(swa.over) if swa else 0,
        swa_every=steps_in(swa.every) if swa else 0,
        affine_steps=steps_in(affine) if affine else 0,
        evaluate_after=_evaluations(recipe, steps=steps),
    )
    _check_lengths(recipe, plan)
    if polish.swap is not None:
        replica_plan(recipe, plan)
    return plan


def _check_lengths(recipe: Recipe, plan: Plan) -> None:
    """Raise RecipeError where a part of the schedule is as long as all of it."""
    parts = {
        "schedule.warmup": plan.warmup_steps,
        "polish.clean": plan.clean_steps,
        "polish.swa.over": plan.swa_steps,
    }
    for key, length in parts.items():
        if length >= plan.steps:
            raise RecipeError(
                f"{key} ({length} steps) must be shorter than duration ({plan.steps} steps)"
            )
    if plan.swa_steps and plan.swa_every >= plan.swa_steps:
        raise RecipeError(
            f"polish.swa.every ({plan.swa_every} steps) must be shorter than polish.swa.over "
            f"({plan.swa_steps} steps): the mean would hold one state of the weights"
        )
    ema = recipe.polish.ema if recipe.polish else None
    if ema is not None and 1 / (1 - ema) > plan.steps:
        raise RecipeError(
            f"polish.ema ({ema:g}) reaches back over {1 / (1 - ema):,.0f} updates and the schedule "
            f"has {plan.steps:,}: the EMA would hold weights from the start; give less than "
            f"{1 - 1 / plan.steps:.6g}"
        )


def replica_plan(recipe: Recipe, plan: Plan) -> Plan:
    """Return how one worker trains one replica of `polish.swap`, whatever the other workers do.

    Raises RecipeError where a replica is trained for longer than a run may be.
    """
    assert recipe.polish is not None
    assert recipe.polish.swap is not None
    section = recipe.polish.swap
    steps = section.steps or _whole((section.epochs or 0) * plan.train_samples / section.batch)
    if steps > MAX_UPDATES:
        raise RecipeError(
            f"polish.swap: {section.epochs:g} epochs are {steps:,} updates of each replica, "
            f"expected at most {MAX_UPDATES:,}; give fewer epochs or a larger batch"
        )
    possible = _device_batches(section.batch, workers=1, span=plan.bn_span or 1)
    most = recipe.execution.device_batch or DEVICE_BATCH_LIMIT
    device_batch = max((size for size in possible if size <= most), default=possible[0])
    return Plan(
        workers=1,
        global_batch=section.batch,
        device_batch=device_batch,
        accumulation=section.batch // device_batch,
        bn_span=plan.bn_span,
        train_samples=plan.train_samples,
        val_samples=plan.val_samples,
        steps=steps,
        warmup_steps=0,
        clean_steps=0,
        evaluate_after=(),
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
    share = plan.device_batch * plan.accumulation
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


def converter(recipe: Recipe) -> Callable[..., int]:
    """Return what turns epochs into steps: the nearest number, but at least one."""
    steps_per_epoch = recipe.train_samples / recipe.batch.global_batch

    def steps_in(duration: Duration, rounding: Callable[[float], int] = round) -> int:
        if duration.steps is not None:
            return duration.steps
        assert duration.epochs is not None
        return _whole(duration.epochs * steps_per_epoch, rounding)

    return steps_in


def _whole(steps: float, rounding: Callable[[float], int] = round) -> int:
    return max(1, rounding(round(steps, 9)))


def _evaluations(recipe: Recipe, *, steps: int) -> tuple[int, ...]:
    every, offset = recipe.evaluation.every_epochs, recipe.evaluation.offset_epochs
    if every is None:
        return ()
    steps_per_epoch = recipe.train_samples / recipe.batch.global_batch
    number = min(steps, round(steps / (every * steps_per_epoch)))
    if number > MAX_EVALUATIONS:
        raise RecipeError(
            f"evaluation.every_epochs: {every:g} makes {number:,} evaluations, expected at most "
            f"{MAX_EVALUATIONS:,}"
        )
    if every * steps_per_epoch <= 1:  # as often as it can be, or more often
        return tuple(range(_whole(offset * steps_per_epoch), steps + 1))
    last_epoch = steps * recipe.batch.global_batch / recipe.train_samples
    epochs = (offset + k * every for k in range(math.ceil(last_epoch / every) + 1))
    points = {_whole(epoch * steps_per_epoch) for epoch in epochs if epoch > 0}
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


def _measurable(possible: list[int], recipe: Recipe, *, workers: int) -> list[int]:
    """Return the device batches that have gradients of their own beside the global batch's.

    Raises PlanError if there are none.
    """
    batch = recipe.batch
    span, whole = batch.bn_span or 1, batch.global_batch
    left = [size for size in possible if size % span == 0 and size < whole]
    if not left:
        raise PlanError(
            f"monitor: noise_scale compares a device batch of whole BatchNorm spans with the "
            f"global batch, and none is smaller than {whole} with spans of {span} on {workers} "
            "workers; give monitor: [], a smaller batch.bn_span or fewer workers"
        )
    return left


def _within_parts(
    possible: list[int], parts: int, global_batch: int, *, workers: int, span: int
) -> list[int]:
    """Return the device batches that hold whole spans of one of Adasum's parts.

    Raises PlanError where the parts cannot be divided over the workers.
    """
    sizes = [size for size in possible if size % span == 0 and global_batch // parts % size == 0]
    if max(workers, parts) % min(workers, parts) or not sizes:
        most = global_batch // span
        numbers = [n for n in _divisors(most) if max(n, parts) % min(n, parts) == 0]
        raise PlanError(
            f"reduction.parts: {parts} parts of {global_batch // parts} samples, in whole "
            f"BatchNorm spans, cannot be divided over {workers} workers; possible numbers of "
            f"workers: {_some(numbers)}"
        )
    return sizes


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

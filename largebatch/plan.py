"""The arithmetic of a run, before anything heavy is imported.

A recipe fixes the updates: how many, at which rate, from which positions of the sample order. A
plan divides each of them over workers and micro-batches. Epochs become steps here, once; below
this module everything counts steps and positions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from largebatch import schedules
from largebatch.errors import PlanError, RecipeError
from largebatch.recipe import Constant, Cosine, Polynomial, Recipe, Span, Steps
from largebatch.schedules import Schedule

DEVICE_BATCH_LIMIT = 256
"""The largest device batch that is chosen without being asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one recipe runs on `workers` workers. Positions count samples from the run's start."""

    workers: int
    global_batch: int
    device_batch: int
    accumulation: int
    """Device batches each worker goes through for one update."""

    bn_span: int | None
    train_samples: int
    val_samples: int
    steps: int
    """Optimizer updates in the whole run, clean ones included."""

    warmup_steps: int
    clean_steps: int
    evaluate_after: tuple[int, ...]
    """Numbers of updates after which accuracy is measured; every stage ends with one."""

    @property
    def train_steps(self) -> int:
        """Updates on augmented pictures; the clean ones follow."""
        return self.steps - self.clean_steps

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
        BatchNorm statistics are the same contiguous run however the global batch is divided.
        """
        per_micro = self.workers * self.device_batch
        start = step * self.global_batch + micro * per_micro + rank * self.device_batch
        return range(start, start + self.device_batch)


def make_plan(recipe: Recipe, *, workers: int, device_batch: int | None = None) -> Plan:
    """Divide a recipe over workers; `device_batch` None chooses the largest that fits the limit.

    Raises PlanError where the global batch cannot be divided so, RecipeError where the recipe's
    own lengths contradict each other.
    """
    batch = recipe.batch
    span = batch.bn_span or 1
    if workers < 1 or batch.global_batch % workers:
        raise PlanError(
            f"the global batch of {batch.global_batch} cannot be divided over {workers} workers; "
            f"possible numbers of workers: {_some_divisors(batch.global_batch // span)}"
        )
    per_worker = batch.global_batch // workers
    if device_batch is None:
        device_batch = _choose_device_batch(per_worker, span=span)
    _check_device_batch(device_batch, per_worker=per_worker, span=span)

    steps_in = _converter(recipe)
    steps = steps_in(recipe.duration, math.ceil)
    warmup = recipe.schedule.warmup
    clean = recipe.polish.clean if recipe.polish else None
    plan = Plan(
        workers=workers,
        global_batch=batch.global_batch,
        device_batch=device_batch,
        accumulation=per_worker // device_batch,
        bn_span=batch.bn_span,
        train_samples=recipe.data.train_samples,
        val_samples=recipe.data.val_samples,
        steps=steps,
        warmup_steps=steps_in(warmup) if warmup else 0,
        clean_steps=steps_in(clean) if clean else 0,
        evaluate_after=_evaluations(recipe, steps=steps),
    )
    if plan.warmup_steps >= steps:
        raise RecipeError(
            f"schedule.warmup ({plan.warmup_steps} steps) must be shorter than duration "
            f"({steps} steps)"
        )
    if plan.clean_steps >= steps:
        raise RecipeError(
            f"polish.clean ({plan.clean_steps} steps) must be shorter than duration ({steps} steps)"
        )
    return plan


def measuring_plan(recipe: Recipe, *, workers: int, device_batch: int | None = None) -> Plan:
    """Plan to evaluate or polish on any number of workers, with any batch of whole spans.

    Its positions are no updates of the recipe; only forward passes may use it.
    """
    alone = make_plan(recipe, workers=1)
    size = device_batch or alone.device_batch
    if alone.bn_span and size % alone.bn_span:
        raise PlanError(
            f"a device batch of {size} does not hold whole BatchNorm spans of {alone.bn_span}; "
            f"choose a multiple"
        )
    return replace(alone, workers=workers, device_batch=size)


def build_schedule(recipe: Recipe) -> Schedule:
    """Return the rate of every update of this recipe, whatever machine runs it."""
    section = recipe.schedule
    steps_in = _converter(recipe)
    warmup_steps = steps_in(section.warmup) if section.warmup else 0
    rest = steps_in(recipe.duration, math.ceil) + section.first_step - warmup_steps
    after: Schedule
    match section.decay:
        case Constant():
            after = schedules.constant(peak=section.peak_lr)
        case Polynomial(power=power, end_lr=end, over=over):
            after = schedules.polynomial(
                peak=section.peak_lr, steps=steps_in(over) if over else rest, power=power, end=end
            )
        case Cosine(end_lr=end, over=over):
            after = schedules.cosine(
                peak=section.peak_lr, steps=steps_in(over) if over else rest, end=end
            )
        case Steps(at=at, gamma=gamma):
            points = [steps_in(point) for point in at]
            if points != sorted(set(points)) or points[0] <= warmup_steps:
                raise RecipeError(
                    f"schedule.decay.at: the points must come one after the other and after the "
                    f"warm-up ({warmup_steps} steps), got steps {', '.join(map(str, points))}"
                )
            boundaries = [point - warmup_steps for point in points]
            after = schedules.multistep(peak=section.peak_lr, boundaries=boundaries, gamma=gamma)
    ramp = schedules.warmup(after, steps=warmup_steps, start=section.start_lr)
    return schedules.skip(ramp, steps=section.first_step)


def _converter(recipe: Recipe) -> Callable[..., int]:
    """Return the one place where epochs become steps: the nearest, but at least one."""
    steps_per_epoch = recipe.data.train_samples / recipe.batch.global_batch

    def steps_in(span: Span, rounding: Callable[[float], int] = round) -> int:
        if span.steps is not None:
            return span.steps
        assert span.epochs is not None
        return max(1, rounding(round(span.epochs * steps_per_epoch, 9)))

    return steps_in


def _evaluations(recipe: Recipe, *, steps: int) -> tuple[int, ...]:
    every, offset = recipe.evaluation.every_epochs, recipe.evaluation.offset_epochs
    if every is None:
        return ()
    steps_in = _converter(recipe)
    last_epoch = steps * recipe.batch.global_batch / recipe.data.train_samples
    epochs = [offset + k * every for k in range(math.ceil(last_epoch / every) + 1)]
    points = {steps_in(Span(epochs=epoch)) for epoch in epochs if epoch > 0}
    return tuple(sorted(point for point in points if point <= steps))


def _choose_device_batch(per_worker: int, *, span: int) -> int:
    """Return the largest batch within the limit that divides the share into whole spans."""
    fitting = [size for size in _divisors(per_worker) if size % span == 0]
    if not fitting:
        raise PlanError(
            f"each worker's share of {per_worker} samples is not a multiple of batch.bn_span "
            f"({span}); use fewer workers"
        )
    return max([size for size in fitting if size <= DEVICE_BATCH_LIMIT], default=min(fitting))


def _check_device_batch(device_batch: int, *, per_worker: int, span: int) -> None:
    if device_batch < 1 or per_worker % device_batch or device_batch % span:
        possible = [size for size in _divisors(per_worker) if size % span == 0]
        raise PlanError(
            f"a device batch of {device_batch} does not divide each worker's share of "
            f"{per_worker} samples into whole BatchNorm spans of {span}; possible device batches: "
            f"{', '.join(map(str, possible)) or 'none, use fewer workers'}"
        )


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _some_divisors(number: int) -> str:
    divisors = _divisors(number)
    shown = ", ".join(map(str, divisors[:12]))
    return shown if len(divisors) <= 12 else f"{shown}, ... {number}"

"""The plan of a run: its updates, and their division over workers and micro-batches.

A recipe fixes the updates: their number, their learning rates and the positions of their samples. A
plan divides each of them over workers and micro-batches. Epochs become steps here, once; everything
that is given a plan counts steps and positions.

Position p of a run is its p-th sample, whatever the batches are. So a run with a batch schedule
trains on the same samples in the same order; only the number of steps in an epoch changes.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

from largebatch.errors import PlanError, RecipeError
from largebatch.formatting import plural
from largebatch.recipe.data import Data
from largebatch.recipe.keys import BatchSizes, Evaluation
from largebatch.recipe.polish import SWA, Polish
from largebatch.recipe.protocols import Protocol
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import MAX_UPDATES, Duration

MAX_EVALUATIONS = 100_000
"""Evaluations of a run: to plan more of them would take longer than a second."""

DEVICE_BATCH_LIMIT = 256
"""The largest device batch that is chosen where memory is not measured, or noise is."""

Rounding = Callable[[float], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPiece:
    """Consecutive updates with the same global batch."""

    step: int = 0
    """The first update."""

    position: int = 0
    """Samples of the run before the first update."""

    global_batch: int
    lr_factor: float = 1.0

    def samples_before(self, step: int) -> int:
        """Return the number of samples of the run before an update of this piece."""
        return self.position + (step - self.step) * self.global_batch

    def steps_in(self, duration: Duration, samples: int, rounding: Rounding = round) -> int:
        """Return the updates, at least one, from the start of the run in a duration that ends here.

        `samples` are those of an epoch.
        """
        if duration.steps is not None:
            return duration.steps
        assert duration.epochs is not None
        epochs = duration.epochs - self.position / samples
        return _whole(self.step + epochs * (samples / self.global_batch), rounding)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePiece:
    """Consecutive updates on images of the same size."""

    end: int
    """The first step after these updates."""

    image_size: int


def _whole(steps: float, rounding: Rounding = round) -> int:
    """Return a whole number of steps, at least one; `steps` may have rounding errors."""
    return max(1, rounding(round(steps, 9)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one recipe runs on `workers` workers. Positions count samples from the run's start."""

    workers: int
    global_batch: int
    """Samples in an update at the start of the run; batch_changes has the later ones."""

    device_batch: int
    evaluation_batch: int | None = None
    """Samples of a batch that is only evaluated, if fewer than device_batch fit beside the memory
    that a graph of the training passes keeps; also for BatchNorm's statistics, in whole spans."""

    accumulation: int
    """Device batches that each worker processes for one update of global_batch."""

    batch_changes: tuple[BatchPiece, ...] = ()
    """The pieces of the batch schedule after the first."""

    bn_span: int | None
    """Samples that share BatchNorm statistics."""

    sync_workers: int = 1
    """Number of adjacent workers that share each span in training; 1: each holds whole spans."""

    train_samples: int
    """Number of training images, without held-out ones."""

    val_samples: int
    steps: int = 0
    """Optimizer updates of the schedule, clean ones included."""

    warmup_steps: int = 0
    clean_steps: int = 0
    swa_steps: int = 0
    swa_every: int = 0
    """Updates at the end of the schedule over which weights are averaged, and their interval."""

    affine_steps: int = 0
    """Updates after the schedule, in which few weights move."""

    sizes: tuple[SizePiece, ...] = ()
    """Image sizes of the updates on augmented images; none: that of the evaluation."""

    mix_steps: int = 0
    """Updates at the start whose images are mixed."""

    evaluate_after: tuple[int, ...] = ()
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
        """Samples in a batch that measures BatchNorm: whole spans that hold device_batch.

        If evaluations are smaller, whole spans that are as small, or one span.
        """
        span = self.bn_span or 1
        if self.evaluation_batch is not None:
            return max(span, self.evaluation_batch // span * span)
        return math.ceil(self.device_batch / span) * span

    @property
    def pieces(self) -> tuple[BatchPiece, ...]:
        """The pieces of the run in which the global batch is the same."""
        return BatchPiece(global_batch=self.global_batch), *self.batch_changes

    @property
    def steps_per_epoch(self) -> float:
        """Updates of global_batch in one pass over the training data; batches wrap over its end."""
        return self.train_samples / self.global_batch

    def steps_in(self, duration: Duration) -> int:
        """Return a length as updates of global_batch: the nearest number, but at least one."""
        return self.pieces[0].steps_in(duration, self.train_samples)

    def steps_at_end(self, duration: Duration) -> int:
        """Return a length as updates of the last global batch: the nearest number, at least one."""
        last = BatchPiece(global_batch=self.pieces[-1].global_batch)
        return last.steps_in(duration, self.train_samples)

    def steps_from_start(self, duration: Duration, rounding: Rounding = round) -> int:
        """Return the number of updates from the start of the run in a duration."""
        if duration.epochs is None:
            return self.steps_in(duration)
        positions = [piece.position / self.train_samples for piece in self.pieces]
        place = bisect.bisect_right(positions, duration.epochs)
        return self.pieces[place - 1].steps_in(duration, self.train_samples, rounding)

    def steps_for(self, samples: int) -> int:
        """Return the fewest updates from the start of the run that take at least `samples`."""
        place = bisect.bisect_right(self.pieces, samples, key=attrgetter("position"))
        piece = self.pieces[place - 1]
        return piece.step - (piece.position - samples) // piece.global_batch

    def step_at(self, position: int) -> int:
        """Return the update that a position of the run is in."""
        return self.steps_for(position + 1) - 1

    def steps_to_end(self, duration: Duration, *, end: int) -> int:
        """Return the number of updates in a duration that ends at step `end`, rounded."""
        if duration.steps is not None:
            return duration.steps
        assert duration.epochs is not None
        last = self.piece_at(end - 1)
        steps = duration.epochs * (self.train_samples / last.global_batch)
        if last.step == 0 or steps <= end - last.step:
            return _whole(steps)
        epochs = duration.epochs - (end - last.step) * last.global_batch / self.train_samples
        rest = Duration.model_construct(epochs=epochs)
        return end - last.step + self.steps_to_end(rest, end=last.step)

    def within(self, steps: range) -> list[tuple[range, int, int]]:
        """Return the steps of each piece, its global batch and the accumulation for that."""
        ends = [
            *(piece.step for piece in self.batch_changes),
            max(steps.stop, self.pieces[-1].step),
        ]
        cut = [
            (range(max(piece.step, steps.start), min(end, steps.stop)), piece.global_batch)
            for piece, end in zip(self.pieces, ends, strict=True)
        ]
        each = self.accumulation
        return [(part, size, each * size // self.global_batch) for part, size in cut if part]

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
        step = self.step_at(position)
        return next((piece.image_size for piece in self.sizes if step < piece.end), otherwise)

    def is_mixed(self, position: int) -> bool:
        """Return True if the augmented image at a position of the run is mixed with its partner."""
        return self.step_at(position) < self.mix_steps

    def measuring(self, *, workers: int, device_batch: int | None) -> "Plan":
        """Return the plan of an evaluation or a polishing, whose positions are not of updates."""
        return replace(self, workers=workers, device_batch=device_batch or self.device_batch)

    def piece_at(self, step: int) -> BatchPiece:
        """Return the piece of an update; the last piece has no end."""
        return self.pieces[bisect.bisect_right(self.pieces, step, key=attrgetter("step")) - 1]

    def batch_at(self, step: int) -> int:
        """Return the global batch of this update."""
        return self.piece_at(step).global_batch

    def position(self, step: int) -> int:
        """Return the position of the first sample of this update."""
        return self.piece_at(step).samples_before(step)

    def epoch(self, steps: int) -> float:
        """Return the number of passes over the training data in the first `steps` updates."""
        return self.position(steps) / self.train_samples

    def positions(self, step: int, micro: int, rank: int) -> range:
        """Return the positions of one device batch; those of the workers are adjacent."""
        per_micro = self.workers * self.device_batch
        start = self.position(step) + micro * per_micro + rank * self.device_batch
        return range(start, start + self.device_batch)


def make_plan(
    recipe: Recipe, *, workers: int = 1, backend: str | None = None, fits: int | None = None
) -> Plan:
    """Divide a recipe over workers, and check that the backend of this name can train it.

    If `execution.device_batch` is null it is the largest of at most `fits` images, or of
    DEVICE_BATCH_LIMIT, with whole BatchNorm spans if possible, even if images are mixed, and the
    same in all pieces of a batch schedule. With a protocol it is a learner's mini-batch.

    Raises PlanError if a global batch cannot be divided so, RecipeError if the recipe's own lengths
    contradict each other, or for the backend.
    """
    if backend is not None:
        recipe.require_backend(backend)
    batch = recipe.batch
    samples = recipe.train_samples
    protocol = recipe.protocol
    if protocol is None:
        noise = "noise_scale" in recipe.monitor
        asked = recipe.execution.device_batch
        device_batch = _divide(
            batch,
            workers=workers,
            asked=asked,
            fits=fits,
            measures_noise=noise,
            mixes=recipe.data.mix is not None,
        )
        accumulation = batch.global_batch // (workers * device_batch)
    else:
        if backend is not None:
            protocol.require_workers(workers)
        # A learner sends each gradient as soon as it has it, so nothing accumulates.
        device_batch = protocol.mini_batch(batch.global_batch)
        accumulation = 1
    polish = recipe.polish or Polish.model_construct()
    clean = polish.clean
    swa = polish.swa
    affine = polish.affine
    pieces = _find_pieces(batch, samples=samples)
    plan = Plan(
        workers=workers,
        global_batch=batch.global_batch,
        device_batch=device_batch,
        accumulation=accumulation,
        batch_changes=pieces[1:],
        bn_span=batch.bn_span,
        sync_workers=max(1, (batch.bn_span or 1) // device_batch),
        train_samples=samples,
        val_samples=recipe.data.val_split,
    )
    # The plan has its batches now, which is all that converts epochs into steps. All lengths below
    # are converted by it, and once.
    steps = plan.steps_from_start(recipe.duration, math.ceil)
    if steps > MAX_UPDATES:
        raise RecipeError(
            f"duration: {recipe.duration.epochs:g} epochs are {steps:,} updates, expected at most "
            f"{MAX_UPDATES:,}; give fewer epochs or a larger batch.global_batch"
        )
    warmup = recipe.schedule.warmup  # in updates of the first batch
    plan = replace(
        plan,
        steps=steps,
        warmup_steps=plan.steps_for(plan.steps_in(warmup) * plan.global_batch) if warmup else 0,
        clean_steps=plan.steps_to_end(clean, end=steps) if clean else 0,
        swa_steps=plan.steps_to_end(swa.over, end=steps) if swa else 0,
        swa_every=plan.steps_at_end(swa.every) if swa else 0,
        affine_steps=plan.steps_at_end(affine) if affine else 0,
        evaluate_after=_evaluations(recipe.evaluation, plan, steps=steps),
    )
    _require_lengths(plan, ema=polish.ema, swa=swa)
    return replace(
        plan,
        sizes=_find_sizes(recipe.data, plan),
        mix_steps=_find_mix_steps(recipe.data, plan),
    )


def _find_pieces(batch: BatchSizes, *, samples: int) -> tuple[BatchPiece, ...]:
    """Return the pieces of a run; raise RecipeError unless their changes are in order."""
    pieces = [BatchPiece(global_batch=batch.global_batch)]
    for place, change in enumerate(batch.schedule):
        before = pieces[-1]
        step = before.steps_in(change.after, samples)
        if step <= before.step:
            raise RecipeError(
                f"batch.schedule.{place}.after (step {step}) must come after step {before.step}"
            )
        pieces.append(
            BatchPiece(
                step=step,
                position=before.samples_before(step),
                global_batch=change.global_batch,
                lr_factor=change.lr_factor,
            )
        )
    return tuple(pieces)


def _find_sizes(data: Data, plan: Plan) -> tuple[SizePiece, ...]:
    """Return the image sizes of augmented updates; none if all have the same size.

    Raises RecipeError where a size has no update.
    """
    sizes: list[SizePiece] = []
    end = plan.train_steps
    for place, part in enumerate(data.resolution):
        begin = sizes[-1].end if sizes else 0
        stop = end if part.until is None else plan.steps_from_start(part.until)
        if not begin < stop <= end:
            raise RecipeError(
                f"data.resolution.{place}.until (step {stop}) must be after step {begin}, where "
                f"this size begins, and at most {end}, the end of training on augmented images"
            )
        sizes.append(SizePiece(end=stop, image_size=part.image_size))
    if sizes and sizes[-1].end < end:
        sizes.append(SizePiece(end=end, image_size=data.image_size))
    return tuple(sizes)


def _find_mix_steps(data: Data, plan: Plan) -> int:
    """Return the updates on mixed images; raise RecipeError if these are not augmented ones."""
    if data.mix is None:
        return 0
    end = plan.train_steps
    if data.mix.until is None:
        return end
    stop = plan.steps_from_start(data.mix.until)
    if stop > end:
        raise RecipeError(
            f"data.mix.until (step {stop}) must be at most {end}, the end of training on augmented "
            "images; give less, or null"
        )
    return stop


def _divide(
    batch: BatchSizes,
    *,
    workers: int,
    asked: int | None,
    fits: int | None,
    measures_noise: bool,
    mixes: bool,
) -> int:
    # Only divisors of this number divide the batch of every piece.
    common = math.gcd(*batch.by_key.values())
    over = f"over {plural(workers, 'worker')}"
    span = batch.bn_span or 1
    numbers = _mixing_workers(common, span=span) if mixes else _divisors(common)
    for key, size in batch.by_key.items():
        if workers < 1 or size % workers:
            raise PlanError(f"{key}: {size} cannot be divided {over}; possible: {_some(numbers)}")
    possible = _device_batches(common // workers, workers=workers, span=span)
    if mixes:  # pairs of images, which must not be divided
        possible = [size for size in possible if size % 2 == 0]
        if not possible:
            raise PlanError(_no_even_batch(common, workers=workers, span=span))
    if measures_noise:  # which compares a device batch of whole spans with the global batch
        least = min(batch.by_key.values())
        possible = [size for size in possible if size % span == 0 and size < least]
        if not possible:
            raise PlanError(
                f"monitor: noise_scale needs a device batch of whole spans ({span}) below the "
                f"global batch ({least}); on {plural(workers, 'worker')} there is none"
            )
    if asked is None:
        # Whole spans need no exchange between workers, so they are preferred.
        whole = [size for size in possible if size % span == 0] or possible
        if fits is None:
            most = DEVICE_BATCH_LIMIT
        else:
            # The noise scale compares a device batch with the global one, so it stays well below.
            most = min(fits, DEVICE_BATCH_LIMIT) if measures_noise else fits
            whole = whole if min(whole) <= most else possible
        fitting = [size for size in whole if size <= most]
        # Where nothing is small enough the smallest is tried.
        return max(fitting, default=min(whole))
    if mixes and asked % 2:
        raise PlanError(
            f"execution.device_batch: {asked} must be even, as data.mix mixes pairs of images; "
            f"the nearest possible: {_nearest(asked, possible)}"
        )
    if asked not in possible:
        key, size = next(
            ((key, size) for key, size in batch.by_key.items() if size // workers % asked),
            ("batch.global_batch", common),
        )
        raise PlanError(
            f"a device batch of {asked} does not divide {key} ({size}) {over} "
            f"into whole BatchNorm spans ({span}); possible device batches: {_some(possible)}"
        )
    return asked


def _no_even_batch(common: int, *, workers: int, span: int) -> str:
    """Describe a number of workers that cannot mix pairs, and the nearest numbers that can."""
    possible = _mixing_workers(common, span=span)
    return (
        f"data.mix needs an even device batch, which {plural(workers, 'worker')} with "
        f"{plural(common // workers, 'sample')} of an update do not have; possible workers: "
        f"{_nearest(workers, possible)}; or leave data.mix out"
    )


def _mixing_workers(common: int, *, span: int) -> list[int]:
    """Return the numbers of workers that can have an even device batch."""
    return [
        number
        for number in _divisors(common)
        if any(
            size % 2 == 0 for size in _device_batches(common // number, workers=number, span=span)
        )
    ]


def _nearest(number: int, possible: list[int]) -> str:
    below = [other for other in possible if other < number][-1:]
    above = [other for other in possible if other > number][:1]
    return " or ".join(map(str, [*below, *above])) or "none"


def _device_batches(per_worker: int, *, workers: int, span: int) -> list[int]:
    """Return the divisors of a worker's share that keep every span whole, smallest first.

    Either a device batch holds whole spans, or a group of workers holds one span.
    """
    return [
        size
        for size in _divisors(per_worker)
        if size % span == 0 or (span % size == 0 and workers % (span // size) == 0)
    ]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:12]))
    return shown if len(numbers) <= 12 else f"{shown}, ... {numbers[-1]}"


def _require_lengths(plan: Plan, *, ema: float | None, swa: SWA | None) -> None:
    """Raise RecipeError where a part of the schedule is as long as all of it, or comes after it."""
    for place, piece in enumerate(plan.batch_changes):
        if piece.step >= plan.steps:
            raise RecipeError(
                f"batch.schedule.{place}.after (step {piece.step}) is too late ({plan.steps} steps)"
            )
    parts = {
        "schedule.warmup": plan.warmup_steps,
        "polish.clean": plan.clean_steps,
        "polish.swa.over": plan.swa_steps,
    }
    long = {key: length for key, length in parts.items() if length >= plan.steps}
    if long:
        lengths = " and ".join(f"{key} ({plural(length, 'step')})" for key, length in long.items())
        shorter = f"{{steps: {max(1, plan.steps // 8)}}}" if plan.steps > 1 else "null"
        raise RecipeError(
            f"{lengths} must be shorter than duration ({plan.steps} steps): train longer, or add "
            + " ".join(f"--set '{key}={shorter}'" for key in long)
        )
    if plan.swa_steps and plan.swa_every >= plan.swa_steps:
        raise RecipeError(
            f"polish.swa.every ({plan.swa_every} steps) must be shorter than polish.swa.over "
            f"({plural(plan.swa_steps, 'step')})"
        )
    # SWA averages at equal intervals, and an epoch has another number of updates after a change.
    begin = plan.steps - plan.swa_steps
    changes = [piece.step for piece in plan.batch_changes if piece.step > begin]
    if swa is not None and swa.every.steps is None and changes:
        raise RecipeError(
            f"polish.swa.every: {swa.every.epochs:g} epochs are not as many updates after step "
            f"{changes[-1]} as before; give it in steps, or a shorter polish.swa.over"
        )
    # An average with decay d weighs about the last 1 / (1 - d) updates.
    if ema is not None and 1 / (1 - ema) > plan.steps:
        raise RecipeError(
            f"polish.ema ({ema:g}) reaches back over {1 / (1 - ema):,.0f} updates and the schedule "
            f"has {plan.steps:,}; give less than {1 - 1 / plan.steps:.6g}"
        )


def _evaluations(section: Evaluation, plan: Plan, *, steps: int) -> tuple[int, ...]:
    every = section.every_epochs
    offset = section.offset_epochs
    if every is None:
        return ()
    last_epoch = plan.epoch(steps)
    smallest = min(piece.global_batch for piece in plan.pieces)
    # At most one evaluation an update, however short the interval.
    each_step = every * (plan.train_samples / smallest) <= 1
    number = steps if each_step else round(last_epoch / every)
    if number > MAX_EVALUATIONS:
        raise RecipeError(
            f"evaluation.every_epochs: {every:g} makes {number:,} evaluations, expected at most "
            f"{MAX_EVALUATIONS:,}"
        )

    def at(epoch: float) -> int:
        return plan.steps_from_start(Duration.model_construct(epochs=epoch))

    if each_step:
        return tuple(range(at(offset), steps + 1))
    epochs = (offset + k * every for k in range(math.ceil(last_epoch / every) + 1))
    points = {at(epoch) for epoch in epochs if epoch > 0}
    return tuple(sorted(point for point in points if point <= steps))


def describe_division(plan: Plan) -> str:
    """Describe the division of the first global batch."""
    return _division(plan, plan.global_batch, plan.accumulation)


def describe_batch_changes(plan: Plan) -> dict[str, str]:
    """Describe each change of the global batch, by its step."""
    later = zip(plan.batch_changes, plan.within(range(plan.steps))[1:], strict=True)
    return {
        f"from {piece.step:,}": f"{_division(plan, size, accumulation)}, epoch "
        f"{plan.epoch(piece.step):.2f}, learning rate of the schedule x {piece.lr_factor:g}"
        for piece, (_, size, accumulation) in later
    }


def _division(plan: Plan, batch: int, accumulation: int) -> str:
    passes = plural(accumulation, "micro-batch", "micro-batches")
    workers = plural(plan.workers, "worker") + (f" x {passes}" if accumulation > 1 else "")
    return f"{batch:,} = {workers} x {plan.device_batch}"


def describe_spans(plan: Plan) -> str:
    """Describe the BatchNorm spans and which workers share them."""
    if plan.bn_span is None:
        return "no BatchNorm"
    if plan.sync_workers == 1:
        return f"{plan.bn_span} samples, {plan.device_batch // plan.bn_span} in a device batch"
    share = math.gcd(*(piece.global_batch for piece in plan.pieces)) // plan.workers
    reason = "because of the device batch"
    if share % plan.bn_span:
        reason = f"a worker's {share} samples are not a multiple of the span"
    return (
        f"{plan.bn_span} samples = {plan.sync_workers} workers x {plan.device_batch}, which "
        f"exchange statistics ({reason})"
    )


def describe_protocol(protocol: Protocol, *, global_batch: int) -> str:
    """Describe the gradients of an update, and the place of the weights."""
    where = plural(protocol.dedicated, "server") if protocol.dedicated else "a server beside each"
    return (
        f"{protocol.kind}: {global_batch:,} samples an update = {protocol.gradients} gradients x "
        f"{protocol.mini_batch(global_batch):,}; {plural(protocol.learners, 'learner')}, {where}: "
        f"{plural(protocol.workers, 'worker')}"
    )

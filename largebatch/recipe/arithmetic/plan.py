"""The plan of a run: its updates, and their division over workers and micro-batches.

A recipe fixes the updates: their number, their learning rates and the positions of their samples. A
plan divides each of them over workers and micro-batches. Epochs become steps here, once; everything
that is given a plan counts steps and positions.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from largebatch.errors import PlanError, RecipeError
from largebatch.recipe.arithmetic.division import divide_batch
from largebatch.recipe.arithmetic.pieces import (
    BatchPiece,
    Pieces,
    SizePiece,
    find_pieces,
    find_sizes,
    piece_at,
    position_at,
    steps_for,
    steps_from_start,
    steps_of,
    steps_to_end,
    within,
)
from largebatch.recipe.polish import Polish
from largebatch.recipe.problems import set_words
from largebatch.recipe.recipe import Recipe, require_backend
from largebatch.recipe.section import MAX_UPDATES, Duration

MAX_EVALUATIONS = 100_000
"""Evaluations of a run: to plan more of them would take longer than a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one recipe runs on `workers` workers. Positions count samples from the run's start."""

    workers: int
    global_batch: int
    """Samples in an update at the start of the run; batch_changes has the later ones."""

    device_batch: int
    accumulation: int
    """Device batches that each worker processes for one update of global_batch."""

    batch_changes: tuple[BatchPiece, ...] = ()
    """The pieces of the batch schedule after the first."""

    bn_span: int | None
    """Samples that share BatchNorm statistics."""

    sync_workers: int = 1
    """Number of adjacent workers that share each span in training; 1: each holds whole spans."""

    parts: int = 1
    """Number of parts of a global batch, of consecutive samples, that Adasum combines."""

    train_samples: int
    """Number of training images, without held-out ones."""

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

    sizes: tuple[SizePiece, ...] = ()
    """Image sizes of the updates on augmented images; none: that of the evaluation."""

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
        """Samples in a worker's batch when it measures BatchNorm statistics.

        The fewest whole spans that hold a device batch: workers do not communicate there, because
        their shares may be unequal, and forward passes alone need little memory.
        """
        span = self.bn_span or 1
        return math.ceil(self.device_batch / span) * span

    @property
    def pieces(self) -> Pieces:
        """The pieces of the run in which the global batch is the same."""
        return BatchPiece(global_batch=self.global_batch), *self.batch_changes

    @property
    def steps_per_epoch(self) -> float:
        """Updates of global_batch in one pass over the training data; batches wrap over its end."""
        return self.train_samples / self.global_batch

    def steps_in(self, duration: Duration) -> int:
        """Return a length as updates of global_batch: the nearest number, but at least one."""
        return steps_of(duration, samples=self.train_samples, global_batch=self.global_batch)

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

    def stage_after(self, step: int) -> Literal["train", "clean", "affine"]:
        """Return the stage with updates that is current after this number of them."""
        if step > self.steps:
            return "affine"
        return "clean" if step > self.train_steps else "train"

    def position(self, step: int) -> int:
        """Return the position of the first sample of this update."""
        return position_at(self.pieces, step)

    def epoch(self, steps: int) -> float:
        """Return the number of passes over the training data in the first `steps` updates."""
        return self.position(steps) / self.train_samples

    def positions(self, step: int, micro: int, rank: int) -> range:
        """Return the positions of one device batch.

        The workers' device batches of one micro-batch are adjacent, so the samples that share
        BatchNorm statistics are the same consecutive ones however the global batch is divided. For
        Adasum, whose parts are consecutive too, the device batches of one worker are adjacent, and
        each holds whole spans.
        """
        if self.parts > 1:
            place = rank * self.accumulation + micro
            start = self.position(step) + place * self.device_batch
            return range(start, start + self.device_batch)
        per_micro = self.workers * self.device_batch
        start = self.position(step) + micro * per_micro + rank * self.device_batch
        return range(start, start + self.device_batch)


def make_plan(recipe: Recipe, *, workers: int) -> Plan:
    """Divide a recipe over workers.

    If `execution.device_batch` is null it is the largest that fits DEVICE_BATCH_LIMIT. Whole
    BatchNorm spans in a device batch are preferred; if a worker's share has none, several workers
    share each span. The device batch is the same in all pieces of a batch schedule.

    Raises PlanError if a global batch cannot be divided so, RecipeError if the recipe's own lengths
    contradict each other.
    """
    device_batch = divide_batch(recipe, workers=workers)
    batch, samples, pieces = recipe.batch, recipe.train_samples, find_pieces(recipe)
    accumulation = batch.global_batch // (workers * device_batch)
    if recipe.protocol is not None:
        accumulation = 1  # an update takes whole mini-batches, whichever learners compute them
    polish = recipe.polish or Polish.model_construct()
    clean, swa, affine = polish.clean, polish.swa, polish.affine
    steps = _count_steps(recipe, pieces)
    plan = Plan(
        workers=workers,
        global_batch=batch.global_batch,
        device_batch=device_batch,
        accumulation=accumulation,
        batch_changes=pieces[1:],
        bn_span=batch.bn_span,
        sync_workers=max(1, (batch.bn_span or 1) // device_batch),
        parts=recipe.reduction.parts or 1,
        train_samples=samples,
        val_samples=recipe.data.val_split,
        steps=steps,
        warmup_steps=_count_warmup(recipe, pieces),
        clean_steps=steps_to_end(pieces, recipe, clean, end=steps) if clean else 0,
        swa_steps=steps_to_end(pieces, recipe, swa.over, end=steps) if swa else 0,
        swa_every=steps_of(swa.every, samples=samples, global_batch=batch.last) if swa else 0,
        affine_steps=steps_of(affine, samples=samples, global_batch=batch.last) if affine else 0,
        evaluate_after=_evaluations(recipe, pieces, steps=steps),
    )
    _require_lengths(recipe, plan)
    return replace(plan, sizes=find_sizes(recipe, pieces, end=plan.train_steps))


def plan_run(recipe: Recipe, *, workers: int, backend: str) -> Plan:
    """Plan a run on these workers.

    Raises as make_plan and require_workers, and RecipeError if the backend of this name cannot
    train the recipe.
    """
    require_backend(recipe, backend)
    plan = make_plan(recipe, workers=workers)
    require_workers(recipe, workers=workers)
    return plan


def require_workers(recipe: Recipe, *, workers: int) -> None:
    """Raise PlanError where a recipe's protocol is for another number of workers."""
    protocol = recipe.protocol
    if protocol is None or workers == protocol.workers:
        return
    servers = f" + {protocol.dedicated} servers" if protocol.dedicated else ""
    raise PlanError(
        f"protocol has {protocol.learners} learners{servers}, which are {protocol.workers} "
        f"workers, got {workers}: start {protocol.workers} workers, or change protocol.learners"
    )


def _require_lengths(recipe: Recipe, plan: Plan) -> None:
    """Raise RecipeError where a part of the schedule is as long as all of it, or comes after it."""
    for place, piece in enumerate(plan.batch_changes):
        if piece.step >= plan.steps:
            raise RecipeError(
                f"batch.schedule.{place}.after (step {piece.step}) must lie before the end of the "
                f"run ({plan.steps} steps): no update would have that batch"
            )
    parts = {
        "schedule.warmup": plan.warmup_steps,
        "polish.clean": plan.clean_steps,
        "polish.swa.over": plan.swa_steps,
    }
    long = {key: length for key, length in parts.items() if length >= plan.steps}
    if long:
        found = " and ".join(f"{key} ({length} steps)" for key, length in long.items())
        shorter = f"{{steps: {max(1, plan.steps // 8)}}}" if plan.steps > 1 else "null"
        raise RecipeError(
            f"{found} must be shorter than duration ({plan.steps} steps): train longer, or add "
            + " ".join(set_words(key, shorter) for key in long)
        )
    if plan.swa_steps and plan.swa_every >= plan.swa_steps:
        raise RecipeError(
            f"polish.swa.every ({plan.swa_every} steps) must be shorter than polish.swa.over "
            f"({plan.swa_steps} steps): the mean would hold one state of the weights"
        )
    _require_interval(recipe, plan)
    ema = recipe.polish.ema if recipe.polish else None
    if ema is not None and 1 / (1 - ema) > plan.steps:
        raise RecipeError(
            f"polish.ema ({ema:g}) reaches back over {1 / (1 - ema):,.0f} updates and the schedule "
            f"has {plan.steps:,}: the EMA would hold weights from the start; give less than "
            f"{1 - 1 / plan.steps:.6g}"
        )


def _require_interval(recipe: Recipe, plan: Plan) -> None:
    """Raise RecipeError where an interval in epochs would change with the batch."""
    swa = recipe.polish.swa if recipe.polish else None
    first = plan.steps - plan.swa_steps
    if swa is None or swa.every.steps is not None or not plan.batch_changes:
        return
    if first < plan.batch_changes[-1].step:
        raise RecipeError(
            f"polish.swa.over (from step {first}) begins before the last change of batch.schedule "
            f"(step {plan.batch_changes[-1].step}), so that {swa.every.epochs:g} epochs are not as "
            "many updates throughout; give polish.swa.every in steps, or a shorter over"
        )


def _count_steps(recipe: Recipe, pieces: Pieces) -> int:
    """Return the updates of the schedule; raise RecipeError where they are too many."""
    steps = steps_from_start(pieces, recipe, recipe.duration, math.ceil)
    if steps > MAX_UPDATES:
        raise RecipeError(
            f"duration: {recipe.duration.epochs:g} epochs are {steps:,} updates, expected at most "
            f"{MAX_UPDATES:,}; give fewer epochs or a larger batch.global_batch"
        )
    return steps


def _count_warmup(recipe: Recipe, pieces: Pieces) -> int:
    """Return the updates of the warm-up, whose length is in updates of the first batch."""
    warmup, batch = recipe.schedule.warmup, recipe.batch.global_batch
    if warmup is None:
        return 0
    steps = steps_of(warmup, samples=recipe.train_samples, global_batch=batch)
    return steps_for(pieces, steps * batch)


def plan_updates(recipe: Recipe) -> Plan:
    """Plan the updates of a recipe on one worker with any device batch."""
    return make_plan(recipe.mathematics, workers=1)


def measuring_plan(recipe: Recipe, *, workers: int) -> Plan:
    """Plan an evaluation or a polishing on any number of workers, with any device batch.

    Its positions are not those of updates: use it for forward passes only.
    """
    alone = plan_updates(recipe)
    device_batch = recipe.execution.device_batch or alone.device_batch
    return replace(alone, workers=workers, device_batch=device_batch)


def _evaluations(recipe: Recipe, pieces: Pieces, *, steps: int) -> tuple[int, ...]:
    """Return the numbers of updates after which accuracy is measured within the schedule."""
    every, offset = recipe.evaluation.every_epochs, recipe.evaluation.offset_epochs
    if every is None:
        return ()
    last_epoch = position_at(pieces, steps) / recipe.train_samples
    smallest = min(piece.global_batch for piece in pieces)
    each_step = every * (recipe.train_samples / smallest) <= 1  # not possible more often
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

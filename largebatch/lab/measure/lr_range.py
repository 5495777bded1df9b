"""The learning-rate range test: runs of a recipe whose rate rises, and bounds from their losses.

Smith's test (arXiv:1506.01186, section 3.3; arXiv:1708.07120) with exponentially rising rates as
in fastai. Each run keeps the recipe's optimizer, global batch, BatchNorm span and data and
changes only the schedule, so the losses do not depend on workers and micro-batches.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from largebatch.distributed.environment import worker_rank
from largebatch.errors import DivergedError, LargebatchError, PlanError
from largebatch.lab.measure.lr_range_bounds import Curve, RangeTest, momentum_of
from largebatch.lab.measure.lr_range_chart import content, write_range
from largebatch.recipe.arithmetic.pieces import without_resolution
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.optimizers import ScheduleFree
from largebatch.recipe.recipe import Recipe
from largebatch.report.run import Run, read_run
from largebatch.runs.interrupts import InterruptedStudyError
from largebatch.runs.options import Options, Resume
from largebatch.runs.run import start
from largebatch.tracking.events import LOG, write_json

CHART, RESULT = "range.png", "range.json"

LOW, HIGH = 1e-3, 100.0
"""Default range, as multiples of peak_lr."""

STEPS = 100
"""Default number of updates, unless the momentum needs more."""

LEAST_STEPS = 20

MEMORIES = 2.0
"""Least updates per decade of rates, in units of momentum's 1 / (1 - m). With fewer, the loss
follows rates that are long past, and its lowest point is far from any limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Rates of a range test."""

    low: float
    high: float
    steps: int
    """Number of updates in which the rate rises from `low` to `high`."""

    seeds: int
    """Number of runs, each with its own weights and order: the recipe's seed and those after it."""


def choose_range(
    recipe: Recipe, *, low: float | None, high: float | None, steps: int | None, seeds: int
) -> Range:
    """Return the range of a test; None chooses by the recipe's peak rate and momentum.

    Raises LargebatchError for an invalid range or too few steps.
    """
    peak = recipe.schedule.peak_lr
    low, high = low or LOW * peak, high or HIGH * peak
    if not high > 1.5 * low:
        raise LargebatchError(
            f"the rates rise from --low to --high, got {low:g} and {high:g}: give a higher --high; "
            f"without both they are {LOW * peak:g} and {HIGH * peak:g}"
        )
    decades, momentum = math.log10(high / low), momentum_of(recipe)
    least = max(LEAST_STEPS, math.ceil(MEMORIES * decades / (1 - momentum) - 1e-6))
    chosen = steps or max(STEPS, least)
    if chosen < least:
        raise LargebatchError(
            f"--steps {chosen} are too few for the rates from {low:g} to {high:g} with momentum "
            f"{momentum:g}: at least {least}, so that the loss follows the rate; or give a "
            "narrower range"
        )
    return Range(low=low, high=high, steps=chosen, seeds=seeds)


def range_recipe(recipe: Recipe, rates: Range, *, seed: int) -> Recipe:
    """Return the recipe with a rate that rises from low to high, without other stages.

    Raises LargebatchError if the optimizer allows no such rate.
    """
    gamma = (rates.low / rates.high) ** (1 / (rates.steps - 1))
    changes = {
        "seed": seed,
        "duration": {"steps": rates.steps},
        "batch": {**recipe.batch.model_dump(), "schedule": ()},
        "data": without_resolution(recipe.data),
        "schedule": {
            "peak_lr": rates.high,
            "warmup": None,
            "decay": {"kind": "exp", "gamma": gamma, "begin": "low"},
        },
        "polish": None,
        "evaluation": {},
        "nonfinite": {},
    }
    if isinstance(recipe.optimizer, ScheduleFree):
        raise LargebatchError(
            "optimizer.kind: schedule-free takes a constant rate, which it averages over: a range "
            "test would average over weights of all rates; give optimizer.kind: sgd"
        )
    try:
        return Recipe.model_validate(recipe.model_dump() | changes)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise LargebatchError(f"{recipe.name}: has no range test: {reason}") from None


def train_range(
    recipe: Recipe, options: Options, rates: Range, *, workers: int = 1, report: bool = True
) -> None:
    """Run the test with every seed in folders of `options.out`, resuming existing runs.

    A run may end by diverging; `report` writes a page of each. Raises LargebatchError before any
    run if the recipe cannot be tested; InterruptedStudyError if a run is asked to stop.
    """
    if (options.out / LOG).exists():
        raise LargebatchError(f"{options.out}: holds a run; give another --out")
    recipes = _recipes(recipe, rates)
    try:
        make_plan(recipes[0], workers=workers)
    except PlanError as error:
        raise LargebatchError(f"{recipe.name}: has no range test: {error}") from None
    for run_recipe in recipes:
        _train(run_recipe, _folder(options.out, run_recipe), options, workers, report=report)


def read_range(recipe: Recipe, out: Path, rates: Range) -> RangeTest:
    """Read the runs of a test, write its chart and range.json, and return the result."""
    curves = tuple(_curve(each, _folder(out, each), rates) for each in _recipes(recipe, rates))
    test = RangeTest(recipe, curves)
    write_json(out / RESULT, content(test))
    write_range(out / CHART, test)
    return test


def _recipes(recipe: Recipe, rates: Range) -> list[Recipe]:
    seeds = range(recipe.seed, recipe.seed + rates.seeds)
    return [range_recipe(recipe, rates, seed=seed) for seed in seeds]


def _folder(out: Path, recipe: Recipe) -> Path:
    return out / f"seed-{recipe.seed}"


def _train(recipe: Recipe, folder: Path, options: Options, workers: int, *, report: bool) -> None:
    if worker_rank() is None and _is_done(folder, recipe):  # with a launcher all have to begin
        return
    try:
        resume: Resume = "auto" if (folder / LOG).exists() else False
        own = options.without_changes()
        summary = start(
            recipe, replace(own, workers=workers, out=folder, resume=resume, report=report)
        )
    except DivergedError:
        return
    if summary.status == "interrupted":
        raise InterruptedStudyError(f"saved in {options.out}")


def _is_done(folder: Path, recipe: Recipe) -> bool:
    """Return True if the run has ended; raise LargebatchError if it is of another recipe."""
    if not (folder / LOG).exists():
        return False
    record = read_run(folder)
    _require_same(record, recipe)
    return record.diverged or len(record.steps) == len(_rates(recipe))


def _require_same(record: Run, recipe: Recipe) -> None:
    assert record.recipe is not None
    if parse_recipe(record.recipe, source=str(record.path)).mathematics != recipe.mathematics:
        raise LargebatchError(
            f"{record.path}: holds a run of another recipe or other rates; give another --out"
        )


def _rates(recipe: Recipe) -> range:
    steps = recipe.duration.steps
    assert steps is not None
    return range(steps)


def _curve(recipe: Recipe, folder: Path, rates: Range) -> Curve:
    record = read_run(folder)
    _require_same(record, recipe)
    losses = np.full(rates.steps, math.nan)
    for step in record.steps:
        losses[step.step] = step.loss
    if not math.isfinite(losses[0]):
        raise LargebatchError(f"{folder}: the first loss is no number, before any rate had effect")
    return Curve(recipe.seed, np.geomspace(rates.low, rates.high, rates.steps), losses)

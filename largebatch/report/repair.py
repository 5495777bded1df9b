"""The recipe of a run with the keys changed that its causes give a reason for, and no others."""

import math
import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np

from largebatch.errors import LargebatchError, printable
from largebatch.formatting import three_digits
from largebatch.recipe.data import Data
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import WIDTH, dump_commented, recipe_name
from largebatch.report.diagnosis import Cause
from largebatch.report.pair import epochs_factor
from largebatch.report.record import Record

WARMUP_SHARE = 1 / 8
"""Share of the run of a warm-up where there was none, at most WARMUP_EPOCHS."""

WARMUP_EPOCHS = 5.0
"""Epochs of the gradual warm-up of Goyal et al. (arXiv:1706.02677, section 2.2)."""

LONGEST_WARMUP = 0.4
"""Largest share of the run that a lengthened warm-up may take; MLPerf's points have up to 0.28."""

CACHED_BYTES = 2**32
"""Largest size of decoded images that are cached without a question."""

Changes = dict[str, tuple[Any, str]]
"""New value and reason by dotted key."""


@dataclass(frozen=True, slots=True)
class Repair:
    """A repaired recipe."""

    text: str
    changes: Changes


def repair(run: Record, causes: list[Cause], small: Record | None = None) -> Repair:
    """Return the recipe with what the causes change.

    Raises LargebatchError if there is no recipe, or no cause changes a key for a measured or
    published reason.
    """
    if run.recipe is None:
        raise LargebatchError(
            f"{run.name}: has no recipe that can be read; --out repairs the recipe of a run folder"
        )
    changes: Changes = {}
    for cause in causes:
        for key, change in _changes(cause, run, run.recipe, small).items():
            changes.setdefault(key, change)
    if not changes:
        raise LargebatchError(
            "no cause found changes a key of the recipe for a measured reason, so --out is not "
            "written"
        )
    name = f"{recipe_name(run.recipe.name, otherwise='run')[:91]}-repaired"
    tree = run.recipe.model_dump(mode="json", exclude_defaults=True)
    for key, (value, _) in changes.items():
        _set(tree, key.split("."), value)
    tree["name"] = name
    repaired = validate_tree(Recipe, tree, source=name)
    reasons = [f"Found: {cause.figure}." for cause in causes if cause.harms]
    header = [
        f"{name}: the recipe of {run.name}, repaired by `largebatch diagnose`.",
        *(line for reason in reasons for line in textwrap.wrap(printable(reason), WIDTH - 2)),
        "Each change has its reason on its line. Measured: not yet.",
    ]
    comments = {key: reason for key, (_, reason) in changes.items()}
    return Repair(dump_commented(repaired, comments, header=header), changes)


def _set(tree: dict[str, Any], keys: list[str], value: object) -> None:
    for key in keys[:-1]:
        tree[key] = tree.get(key) or {}
        tree = tree[key]
    tree[keys[-1]] = value


def _changes(cause: Cause, run: Record, recipe: Recipe, small: Record | None) -> Changes:
    """Return the changes that one cause gives a reason for."""
    found: Changes = {}
    match cause.kind:
        case "diverged":
            found = _lower(run, recipe, slice(0, None)) | _warm_up(run, recipe)
        case "rate beyond the edge":
            found = _lower(run, recipe, slice(run.early, None))
        case "spiked in warm-up":
            found = _warm_up(run, recipe) or _lower(run, recipe, slice(0, run.early))
        case "statistics off" if cause.harms:
            found = _statistics(recipe)
        case "fewer updates" if small is not None:
            found = _longer(run, recipe, small)
        case "input bound":
            found = _cached(recipe)
    return found


def _lower(run: Record, recipe: Recipe, rows: slice) -> Changes:
    """Return the upper bound of a range test; without one half of the rate at a rise."""
    was = f"was {recipe.schedule.peak_lr:g}"
    if run.edge is not None and run.edge < recipe.schedule.peak_lr:
        return {"schedule.peak_lr": (run.edge, f"{was}; the range test's upper bound")}
    row, lost = run.onset(rows), np.flatnonzero(~np.isfinite(run.loss))
    if row is None and lost.size:  # without a rise before
        row = int(lost[0])
    if row is None or not run.lr[row] > 0 or recipe.schedule.decay.kind == "piecewise":
        return {}
    rate = float(np.nanmax(run.lr[: row + 1]))
    value = float(f"{min(rate, recipe.schedule.peak_lr) / 2:.2g}")
    return {"schedule.peak_lr": (value, f"{was}; half of the rate at which the loss rose")}


def _warm_up(run: Record, recipe: Recipe) -> Changes:
    """Return a warm-up where there was none, or one twice as long."""
    updates, warmup = run.updates, recipe.schedule.warmup
    planned = run.run.plan.steps if run.run else updates or 0
    if warmup is None:
        epochs = min(WARMUP_EPOCHS, WARMUP_SHARE * run.run.plan.epoch(planned) if run.run else 0)
        reason = "there was none; Goyal et al. have 5 epochs, at most an eighth of the run"
        return {"schedule.warmup": ({"epochs": round(epochs, 2)}, reason)} if epochs else {}
    longer = 2 * (run.warmup or 0)
    if not 0 < longer <= LONGEST_WARMUP * planned:
        return {}
    return {"schedule.warmup": ({"steps": longer}, f"was {run.warmup:,} updates, in which it rose")}


def _statistics(recipe: Recipe) -> Changes:
    """Return an exact pass where the recipe has none."""
    if recipe.batch.bn_span is None or (recipe.polish and recipe.polish.statistics):
        return {}
    samples = min(50_000, recipe.train_samples)
    return {"polish.statistics": ({"samples": samples}, "running averages were off; exact moments")}


def _longer(run: Record, recipe: Recipe, small: Record) -> Changes:
    """Return the duration by the epoch law."""
    factor = epochs_factor(run, small)
    if factor is None:
        return {}
    reason = f"{three_digits(factor)} times as long: the ratio of epochs to the same training loss"
    if recipe.duration.epochs is not None:
        return {"duration": ({"epochs": math.ceil(factor * recipe.duration.epochs)}, reason)}
    return {"duration": ({"steps": math.ceil(factor * (recipe.duration.steps or 1))}, reason)}


def _cached(recipe: Recipe) -> Changes:
    """Return a cache of decoded images where there is none and they are small."""
    data = recipe.data
    if not isinstance(data, Data) or recipe.execution.cache is not None:
        return {}
    size = data.train_samples * data.image_size**2 * 3
    if size > CACHED_BYTES:
        return {}
    reason = f"updates waited for images; decoded ones take about {size / 1e6:,.0f} MB"
    return {"execution.cache": ("memory", reason)}

"""Measure what the likely causes of a bad run show; the causes are in `causes`."""

import math

import numpy as np

from largebatch.errors import LargebatchError
from largebatch.recipe.data import Data
from largebatch.report import causes
from largebatch.report.noise import has_course, latest
from largebatch.report.record import RISE, RISEN, Record
from largebatch.report.run import shares
from largebatch.rules import Finding, decide, examine

WEAK_CLASS = 1 / 3  # part of the run's top-1 below which a class is weak

SURE = 3
"""Standard errors by which a weak class is below the rest: more than the two of one comparison,
because it is the lowest of many."""

FALLS = 0.05
"""Fall of the smoothed training loss over the last quarter of the updates, as a part of the loss of
guessing, from which more epochs promise more: about twice the spread over seeds in short runs."""

FLOORS = 0.05  # part by which the losses that the labels of two runs leave may differ

FEWEST_TIMED = 20  # fewest updates whose waits are judged: the first ones fill queues


def find_causes(run: Record, small: Record | None = None) -> list[Finding]:
    """Return the likely causes, the most likely first; `small` has the same data.

    A cause that an earlier one explains is left out.
    """
    late = slice(run.early, None)
    early = slice(0, run.early)
    findings = decide(measure_lost(run), causes.LOST)
    findings += examine(measure_rise(run, slice(0, None)), causes.STAYED_UP, findings)
    findings += examine(measure_rise(run, late), causes.AFTER_WARM_UP, findings)
    findings += examine(measure_rise(run, early), causes.IN_WARM_UP, findings)
    findings += examine(measure_corrected(run), causes.CORRECTED, findings)
    findings += decide(measure_validation(run), causes.VALIDATION_LOSSES, findings)
    if small is None:  # both runs of a pair have as few images
        findings += examine(measure_images(run), causes.IMAGES, findings)
    findings += examine(measure_classes(run), causes.WEAK_CLASSES, findings)
    compared = decide(measure_pair(run, small), causes.PAIR, findings)
    findings += compared
    # What a pair shows needs no other explanation by the end of the run alone.
    if not compared:
        findings += decide(measure_gap(run), causes.GAP_AT_END, findings)
    findings += examine(measure_noise(run), causes.NOISE)
    if not compared:
        findings += examine(measure_training_end(run), causes.TRAINING_END, findings)
    findings += examine(measure_waits(run), causes.WAITS)
    return findings


def _guess(run: Record) -> causes.Guess:
    return causes.Guess(run.classes or 0, run.chance)


def _place(run: Record, row: int) -> causes.Place:
    return causes.Place(float(run.step[row]), float(run.epoch[row]), row, float(run.lr[row]))


def measure_lost(run: Record) -> causes.Lost | None:
    """Find the first loss that was not finite; None if the run ended with one that was."""
    lost = np.flatnonzero(~np.isfinite(run.loss))
    diverged = run.run is not None and run.run.diverged
    if lost.size and (diverged or not math.isfinite(run.loss[-1])):
        row = int(lost[0])
        onset = run.onset()
        if onset is None or onset >= row:
            return causes.Lost(_place(run, row), math.nan, None)
        return causes.Lost(_place(run, row), float(run.lows[onset]), _place(run, onset))
    return causes.Lost(None, math.nan, None) if diverged else None


def measure_rise(run: Record, rows: slice) -> causes.Rise | None:
    """Find the largest rise of the smoothed loss in these rows; None if none exceeds its noise."""
    spike = run.spike(rows)
    if spike is None:
        return None
    onset = run.onset()
    return causes.Rise(
        low=spike.low,
        high=spike.high,
        place=_place(run, spike.row),
        onset=None if onset is None else _place(run, onset),
        end=run.end,
        unit=run.unit,
    )


def measure_corrected(run: Record) -> causes.Corrected | None:
    """Return top-1 before and after exact statistics; None without that stage."""
    folder = run.run
    stages = folder.stages if folder else []
    stage = next((it for it in stages if it.name == "statistics" and it.kept), None)
    if folder is None or stage is None or stage.before is None:
        return None
    layers = folder.drift.layers if folder.drift else ()
    worst = max(layers, key=lambda layer: layer.log_variance_ratio, default=None)
    return causes.Corrected(
        before=stage.before.after.top1,
        after=stage.after.top1,
        samples=stage.after.samples,
        layer=worst.name if worst else "",
        factor=math.exp(worst.log_variance_ratio) if worst else math.nan,
    )


def measure_validation(run: Record) -> causes.ValidationLosses | None:
    """Return the worst validation losses; None without any, or without BatchNorm."""
    losses = run.val_loss
    if not run.normalised or not losses.size or np.isnan(losses).all():
        return None
    infinite = np.flatnonzero(np.isinf(losses))
    highest = int(np.nanargmax(losses))
    last_stage = run.run.last_stage if run.run else None
    is_exact = last_stage is not None and last_stage.name == "statistics"
    first_infinite = float(run.val_epoch[infinite[0]]) if infinite.size else None
    return causes.ValidationLosses(
        infinite=None if first_infinite is None else causes.EvaluationEpoch(first_infinite),
        highest=float(losses[highest]),
        highest_at=causes.EvaluationEpoch(float(run.val_epoch[highest])),
        end=float(losses[-1]),
        guess=_guess(run),
        is_explained=is_exact or _has_risen(run) or _training_end(run).is_underfit,
    )


def measure_images(run: Record) -> causes.FolderImages | None:
    """Count the images of a folder; None for other data, and for weights that were given."""
    folder = run.run
    recipe = folder.parsed if folder else None
    if folder is None or recipe is None or not run.classes or recipe.model.weights is not None:
        return None
    data = recipe.data
    if not isinstance(data, Data) or data.source != "folder":
        return None
    return causes.FolderImages(
        samples=folder.plan.train_samples,
        classes=run.classes,
        image_size=data.image_size,
        top1=folder.result.top1 if folder.finished and folder.result else math.nan,
    )


def measure_classes(run: Record) -> causes.WeakClasses | None:
    """Find the classes that are wrong far more often than the others; None without any.

    All classes of a run that is underfit may be wrong, so none is looked for.
    """
    mistakes = run.run.final_mistakes if run.run else None
    if mistakes is None or _training_end(run).is_underfit:
        return None
    sizes = np.array(mistakes.sizes)
    labels = np.array(mistakes.labels, dtype=np.int64)
    correct = sizes - np.bincount(labels, minlength=sizes.size)
    top1 = 1 - len(mistakes.samples) / sizes.sum()
    deviations = np.sqrt(sizes * top1 * (1 - top1))  # of the number of right images, by chance
    is_weak = (correct < WEAK_CLASS * top1 * sizes) & (correct < top1 * sizes - SURE * deviations)
    if not is_weak.any():
        return None
    lowest = min(np.flatnonzero(is_weak), key=lambda label: correct[label] / sizes[label])
    return causes.WeakClasses(
        lowest=mistakes.classes[lowest],
        correct=int(correct[lowest]),
        size=int(sizes[lowest]),
        number=int(np.count_nonzero(is_weak)),
        classes=int(np.count_nonzero(sizes)),
        share=float(sizes[is_weak].sum() / sizes.sum()),
    )


def measure_pair(run: Record, small: Record | None) -> causes.Pair | None:
    """Compare a run with one in smaller batches; None without one, or without training losses.

    Losses of other functions, or of labels that leave another loss, are not compared either.
    """
    if small is None or not run.loss.size or not small.loss.size:
        return None
    if not _have_same_loss(run, small):
        return None
    top1 = float(run.top1[-1]) if run.top1.size else math.nan
    small_top1 = float(small.top1[-1]) if small.top1.size else math.nan
    has_top1 = math.isfinite(top1 + small_top1)
    # An update of the small run counts from its first one: logs may count from 1.
    row = int(np.searchsorted(small.step - small.first_step, run.updates or 0)) - 1
    return causes.Pair(
        end=run.end,
        small_end=small.end,
        unit=run.unit,
        top1=top1,
        small_top1=small_top1,
        noise=math.hypot(run.noise, small.noise) if has_top1 else math.nan,
        updates=run.updates or 0,
        small_updates=small.updates or 0,
        small_then=float(small.trend[max(0, row)]),
        peak=run.peak,
        small_peak=small.peak,
        factor=epochs_factor(run, small) or math.nan,
        progress=_progress(run),
    )


def _have_same_loss(run: Record, small: Record) -> bool:
    if run.mixed != small.mixed:
        return False
    if run.objective is None or small.objective is None:  # such as in the log of another program
        return True
    # Mixing of another strength leaves another loss.
    has_same_floor = math.isclose(run.floor, small.floor, rel_tol=FLOORS)
    return run.objective == small.objective and has_same_floor


def measure_gap(run: Record) -> causes.Gap | None:
    """Compare both losses at the end; None without a validation loss there."""
    losses = run.val_loss
    if not losses.size or not math.isfinite(losses[-1]):
        return None
    recorded = run.run.last_gap if run.run else None
    end = float(losses[-1])
    training_end = run.end
    floor = run.floor
    if not run.has_comparable_losses:
        # Of the same function as the validation loss where it was measured; else there is no gap.
        training_end = recorded.loss if recorded else math.nan
        floor = 0.0
    lowest = int(np.nanargmin(losses))
    return causes.Gap(
        has_risen=_has_risen(run),
        low=float(losses[lowest]),
        low_at=causes.EvaluationEpoch(float(run.val_epoch[lowest])),
        end=end,
        training_end=run.end,
        training=recorded.loss if recorded else training_end,
        excess=training_end - floor,
        gap=recorded.gap if recorded else end - max(0.0, training_end - floor),
        guess=_guess(run),
    )


def measure_noise(run: Record) -> causes.NoiseAtEnd | None:
    """Return the noise scale at the end; None if it was not measured."""
    folder = run.run
    if folder is None or not has_course(folder):
        return None
    part = latest(folder)
    batch = folder.plan.batch_at(part.last)
    return causes.NoiseAtEnd(part.scale.value, part.scale.high, batch)


def measure_training_end(run: Record) -> causes.TrainingEnd | None:
    """Return the training loss at the end; None if the run was interrupted."""
    if run.run is not None and not run.run.finished:
        return None
    return _training_end(run)


def _training_end(run: Record) -> causes.TrainingEnd:
    return causes.TrainingEnd(
        loss=run.end,
        floor=run.floor,
        mixed=run.mixed,
        guess=causes.Guess(run.classes or 0, run.training_chance),
        updates=run.updates,
        progress=_progress(run),
    )


def measure_waits(run: Record) -> causes.Waits | None:
    """Return the waits for images; None if too few updates were timed."""
    if run.run is None or len(run.run.timed) < FEWEST_TIMED:
        return None
    data, _ = shares(run.run)
    return causes.Waits(data)


def _has_risen(run: Record) -> bool:
    """Return True if the validation loss rose from its lowest while the training loss fell."""
    losses = run.val_loss
    if len(losses) < 3 or not np.isfinite(losses).all():
        return False
    row = int(np.argmin(losses))
    low = float(losses[row])
    end = float(losses[-1])
    # Half of a spike of the training loss: a mean over all validation images has less noise.
    if end <= RISEN * low or end - low <= RISE / 2 * run.validation_unit:
        return False
    known = np.isfinite(run.epoch)
    if not known.any() or not math.isfinite(run.val_epoch[row]):
        return True
    then = int(np.searchsorted(run.epoch[known], run.val_epoch[row], side="right")) - 1
    return not run.end >= run.trend[known][max(0, then)]


def _progress(run: Record) -> causes.LossProgress:
    """Return how the training loss falls at the end, and whether more epochs would help.

    They help if it still falls, and so does the validation loss, or top-1 rises beyond noise,
    where they were measured in the last quarter and before it. Clean epochs do not count, nor do
    those after mixed images: their images are easier, whatever the model has learned.
    """
    trend = run.trend
    if run.run is not None:
        mixes = any(step.mixed for step in run.run.steps)
        counted = [
            step
            for step in run.run.steps
            if step.stage == "train" and step.mixed == mixes and not step.skipped
        ]
        trend = trend[: len(counted)]
    rows = len(trend)
    # Plain numbers: NumPy warns of the difference of two infinite losses.
    fall = float(trend[-1 - rows // 4]) - float(trend[-1]) if rows >= 4 else math.nan
    if not fall > FALLS * run.unit:
        return causes.LossProgress(fall, improves=False)
    is_early = run.val_epoch <= 0.8 * run.epochs
    before = np.flatnonzero(is_early & (run.val_epoch >= 0.5 * run.epochs))
    if not before.size or is_early[-1]:
        return causes.LossProgress(fall, improves=True)
    top1_rise = float(run.top1[-1]) - float(run.top1[before[-1]])
    loss_fall = float(run.val_loss[before[-1]]) - float(run.val_loss[-1])
    improves = top1_rise > run.noise or loss_fall > FALLS * run.validation_unit
    return causes.LossProgress(fall, improves)


def epochs_factor(run: Record, small: Record) -> float | None:
    """Return how many times the epochs a run needs; None if the small run does not show it.

    Two batches take epochs to the same loss in a ratio that does not depend on the loss, by
    epochs(B) = shortest (1 + B / critical) (arXiv:1812.06162): the run took all of its epochs to a
    loss that the small one had after a part of its updates, so both ratios are the inverse of that
    part. If rates decay this is an estimate.
    """
    reached = np.flatnonzero(small.trend <= run.end)
    if not reached.size or not run.updates or not small.updates:
        return None
    updates_made = float(small.step[reached[0]] - small.first_step) + 1
    factor = small.updates / max(updates_made, run.updates)
    return factor if factor > 1 else None


def require_comparable(run: Record, small: Record) -> None:
    """Raise LargebatchError if two runs are known to have other data, or are swapped."""
    for name in ("classes", "val_samples"):
        values = getattr(run, name), getattr(small, name)
        if None not in values and values[0] != values[1]:
            raise LargebatchError(
                f"{run.name} and {small.name} have other data: {name} is {values[0]:,} and "
                f"{values[1]:,}; diagnose compares two runs of the same data"
            )
    if run.batch and small.batch and run.batch < small.batch:
        raise LargebatchError(
            f"{run.name}: its batch, {run.batch:,}, is smaller than {small.batch:,}; give the run "
            "of the larger batch first"
        )

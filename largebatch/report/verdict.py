"""The verdict: the sentence or two that the page of a run begins with.

Which accuracy is good for a data set is not known here, so nothing is praised. A run is held
against itself and against guessing: an answer of equal probabilities for all K classes has a loss
of ln K whatever the images. Each rule has its number below, with the reason for it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from largebatch.errors import RecipeError
from largebatch.formatting import percent
from largebatch.recipe.keys import Loss
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.task import Metric
from largebatch.report.mistakes import by_class, compare
from largebatch.report.run import FloatArray, Run, median
from largebatch.tracking.events import Evaluation, Mistakes

CLOSE = 0.01
"""Relative difference up to which two values of a metric other than accuracy are called close."""

WILD_LOSS = 10
"""Times the loss of guessing. A few times as much is usual in the first epochs of large batches,
where the running averages of BatchNorm lag behind the weights; ten times is not."""

WEAK_CLASS = 1 / 3
"""The share of the run's top-1 below which a class is called weak."""

WEAK_IMAGES = 0.05
"""The share of all validation images that weak classes hold together at least, to stand out: of
many classes a few are always hard."""

SURE = 3
"""Standard errors that a class lies below the rest: as the lowest of many is looked at, more than
the two of a single comparison."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run went, in one sentence or two."""

    words: str
    good: bool


def verdict(run: Run) -> Verdict:
    """Describe how a run ended, and for one that finished what stands out in it."""
    return _finished(run) if run.finished else Verdict(_unfinished(run), good=False)


def _finished(run: Run) -> Verdict:
    """Compare the end with one answer to all images and with the best of the run."""
    last = run.last_stage
    if last is None:
        return Verdict("The run finished; its accuracy was not measured.", good=False)
    if not run.task.by_accuracy:
        return _finished_by_metric(run, last.after, run.task.metric)
    end, sizes = last.after, last.mistakes.sizes if last.mistakes else ()
    one = max(sizes, default=0) / end.samples
    if end.top1 < one + 2 * math.sqrt(one * (1 - one) / end.samples):
        return Verdict(
            f"The run finished, but top-1 ends at {percent(end.top1)} %; the same answer to all "
            f"{run.task.labelled} would make {percent(one)} %.",
            good=False,
        )
    kept = run.kept_evaluations
    best = max(kept, key=lambda found: found.top1)
    of_best = next((stage.mistakes for stage in run.stages if stage.after == best), None)
    if compare(best, end, of_best, last.mistakes).beyond_noise:
        return Verdict(
            f"The run finished, but top-1 ends at {percent(end.top1)} %, below the "
            f"{percent(best.top1)} % that it was after {best.step:,} steps in {best.stage}.",
            good=False,
        )
    words = "the best of the run"
    if best.top1 > end.top1:
        words = f"within the noise of its best, {percent(best.top1)} %"
    return _judged(run, kept, f"top-1 ends at {percent(end.top1)} %, {words}.")


def _judged(run: Run, kept: list[Evaluation], words: str) -> Verdict:
    """Return how a run ended, in these words, what stands out in it, and what is not known."""
    mistakes = run.final_mistakes
    recipe = _read_recipe(run)
    num_classes = len(mistakes.classes) if mistakes else recipe.data.classes if recipe else None
    oddities, unknown = list(_lost_losses(kept)), []
    if num_classes is None:
        unknown.append("losses against that of guessing")
    else:
        loss = recipe.loss if recipe else Loss()
        oddities += _wild_losses(run, kept, num_classes, smoothing_floor(loss, num_classes))
    if mistakes is not None:
        oddities += _weak_classes(mistakes, run.task.labelled)
    elif run.task.by_accuracy:
        unknown.append("single classes")
    words = f"{_losses(run)}{words}"
    if unknown:
        words += f" Not examined (not recorded): {', '.join(unknown)}."
    if oddities:
        text = f"The run finished: {words} What stands out: {'; '.join(oddities)}."
        return Verdict(text, good=False)
    begin = "The run finished and nothing stands out: " if run.steps else "Polishing is done: "
    return Verdict(begin + words, good=not unknown)


def _read_recipe(run: Run) -> Recipe | None:
    """Return the recipe of a run; None if it is missing or today's types do not take it."""
    try:
        return None if run.recipe is None else parse_recipe(run.recipe)
    except RecipeError:
        return None


def smoothing_floor(loss: Loss, num_classes: int) -> float:
    """Return the lowest loss that label smoothing leaves: the entropy of its targets, in nats.

    >>> round(smoothing_floor(Loss(label_smoothing=0.1), 2), 3)
    0.199
    """
    others = num_classes if loss.off_target == "all" else num_classes - 1
    each = loss.label_smoothing / others
    labelled = 1 - each * (num_classes - 1)
    return -sum(p * math.log(p) * n for p, n in ((labelled, 1), (each, num_classes - 1)) if p)


def _lost_losses(kept: list[Evaluation]) -> Iterator[str]:
    """Yield the first evaluation whose loss is not finite."""
    lost = next((found for found in kept if not math.isfinite(found.loss)), None)
    if lost is not None:
        yield f"the validation loss was no number at epoch {lost.epoch:.3g}"


def _wild_losses(run: Run, kept: list[Evaluation], num_classes: int, floor: float) -> Iterator[str]:
    """Yield losses that are far above the loss of guessing, or end close to it."""
    chance = math.log(num_classes)
    guess = f"equal probabilities for all {num_classes:,} {run.task.classes} have {chance:.3g}"
    highest = max(kept, key=lambda found: found.loss if math.isfinite(found.loss) else 0.0)
    if highest.loss > WILD_LOSS * chance:
        yield (
            f"the validation loss was {highest.loss:.3g} at epoch {highest.epoch:.3g}, "
            f"where {guess}"
        )
    elif kept[-1].loss > chance:
        yield f"the validation loss ends at {kept[-1].loss:.3g}, where {guess}"
    losses = np.array([step.loss for step in run.steps])
    end = median(losses[-_few(losses) :])
    if end - floor > run.task.fit * chance:
        smoothing = f" ({floor:.3g} of it by label smoothing)" if floor else ""
        yield f"the training loss ends at {end:.3g}{smoothing}, where {guess}"


def _weak_classes(found: Mistakes, labelled: str) -> Iterator[str]:
    """Yield which classes are right far more rarely than all images are."""
    classes, samples = by_class(found), sum(found.sizes)
    top1 = 1 - len(found.samples) / samples
    weak = [
        one
        for one in classes
        if one.correct < WEAK_CLASS * top1 * one.size
        and one.correct < top1 * one.size - SURE * math.sqrt(one.size * top1 * (1 - top1))
    ]
    if sum(one.size for one in weak) < WEAK_IMAGES * samples:
        return
    lowest, *others = weak
    share = f"{lowest.correct:,} of {lowest.size:,} {labelled}"
    if others:
        yield (
            f"{len(weak)} of {len(classes):,} classes have less than a third of that top-1, the "
            f"lowest is {lowest.name} with {share}"
        )
    else:
        yield f"of class {lowest.name} only {share} are right"


def _finished_by_metric(run: Run, end: Evaluation, metric: Metric) -> Verdict:
    """Compare the metric at the end with the best of the run."""
    kept, value = run.kept_evaluations, metric.value(end)
    if not math.isfinite(value) or not math.isfinite(end.loss):
        return Verdict("The run finished, but its validation loss ends as no number.", good=False)
    choose = min if metric.lower_is_better else max
    best = choose((found for found in kept if math.isfinite(metric.value(found))), key=metric.value)
    side, extreme = ("above", "lowest") if metric.lower_is_better else ("below", "highest")
    words = f"the {extreme} of the run"
    if metric.is_better(metric.value(best), value):
        words = f"close to its {extreme}, {metric.text(best)}"
    if abs(value - metric.value(best)) > CLOSE * abs(metric.value(best)):
        return Verdict(
            f"The run finished, but {metric.name} ends at {metric.text(end)}, {side} the "
            f"{metric.text(best)} that it was after {best.step:,} steps.",
            good=False,
        )
    return _judged(run, kept, f"{metric.name} ends at {metric.text(end)}, {words}.")


def _losses(run: Run) -> str:
    """Describe how the training loss fell, by the medians of the first and the last updates."""
    losses = np.array([step.loss for step in run.steps])
    begin, end = median(losses[: _few(losses)]), median(losses[-_few(losses) :])
    return f"the training loss fell from {begin:.3g} to {end:.3g} and " if end < begin else ""


def _few(values: FloatArray) -> int:
    """Return how many values the beginning or the end of a run has: one in twenty."""
    return max(1, len(values) // 20)


def _unfinished(run: Run) -> str:
    """Describe how a run ended that did not finish."""
    summary = run.summary
    done = f"{run.num_steps:,} of {run.plan.updates:,} steps"
    if summary is None:
        words = f"No summary: the run did not end by itself. Its log ends after {done}."
    elif summary.status == "paused":
        words = f"The run paused at --max-steps, after {done}; --resume goes on from there."
    elif summary.status == "interrupted":
        words = f"The run was interrupted after {done}; --resume goes on from there."
    elif summary.status == "stopped":
        words = f"The run was stopped at once after {done}; --resume goes on from what was saved."
    else:
        words = f"The run failed after {done}."
    last = run.steps[-1] if run.steps else None
    if last is not None and not last.skipped and not math.isfinite(last.loss):
        words += f" Its training loss stopped being a number at step {last.step:,}."
    if not run.evaluations:
        return words + " Accuracy was not measured before that."
    return words + " The numbers are those it had reached."

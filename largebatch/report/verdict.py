"""The verdict: the first sentences of the page of a run.

What accuracy is good for a data set is not known here. So a run is compared with itself and with
guessing: equal probabilities for all K classes have a loss of ln K. Each rule has its number below,
with its reason.
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
"""Multiple of the loss of guessing from which a validation loss stands out.

A few times that loss is usual in the first epochs of large batches, because the running averages of
BatchNorm lag behind the weights; ten times is not.
"""

WEAK_CLASS = 1 / 3
"""Fraction of the run's top-1 below which a class is weak."""

WEAK_IMAGES = 0.05
"""Fraction of the validation images that weak classes must hold together to stand out, because of
many classes a few are always hard."""

SURE = 3
"""Standard errors by which a weak class lies below the rest: more than the two of one comparison,
because it is the lowest of many."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Description of how a run went."""

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
            f"The run finished, but the final top-1 is {percent(end.top1)} %; always predicting "
            f"the most frequent class gives {percent(one)} %.",
            good=False,
        )
    kept = run.kept_evaluations
    best = max(kept, key=lambda found: found.top1)
    of_best = next((stage.mistakes for stage in run.stages if stage.after == best), None)
    if compare(best, end, of_best, last.mistakes).beyond_noise:
        return Verdict(
            f"The run finished, but the final top-1, {percent(end.top1)} %, is below the "
            f"{percent(best.top1)} % after {best.step:,} steps ({best.stage}).",
            good=False,
        )
    words = "the best of the run"
    if best.top1 > end.top1:
        words = f"within the noise of its best, {percent(best.top1)} %"
    return _judged(run, kept, f"the final top-1 is {percent(end.top1)} %, {words}.")


def _judged(run: Run, kept: list[Evaluation], words: str) -> Verdict:
    """Add what stands out in a run, and what is not known, to the words about its end."""
    mistakes = run.final_mistakes
    recipe = _read_recipe(run)
    num_classes = len(mistakes.classes) if mistakes else recipe.data.classes if recipe else None
    oddities, unknown = list(_lost_losses(kept)), []
    if num_classes is None:
        unknown.append("losses against guessing")
    else:
        loss = recipe.loss if recipe else Loss()
        oddities += _wild_losses(run, kept, num_classes, smoothing_floor(loss, num_classes))
    if mistakes is not None:
        oddities += _weak_classes(mistakes, run.task.labelled)
    elif run.task.by_accuracy:
        unknown.append("accuracy by class")
    words = f"{_losses(run)}{words}"
    if unknown:
        words += f" Not checked, for lack of a record: {', '.join(unknown)}."
    if oddities:
        text = f"The run finished: {words} What stands out: {'; '.join(oddities)}."
        return Verdict(text, good=False)
    begin = "The run finished and nothing stands out: " if run.steps else "Polishing finished: "
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
        yield f"the validation loss was not finite at epoch {lost.epoch:.3g}"


def _wild_losses(run: Run, kept: list[Evaluation], num_classes: int, floor: float) -> Iterator[str]:
    """Yield losses that are far above the loss of guessing, or end close to it."""
    chance = math.log(num_classes)
    guess = f"(equal probabilities for all {num_classes:,} {run.task.classes} give {chance:.3g})"
    highest = max(kept, key=lambda found: found.loss if math.isfinite(found.loss) else 0.0)
    if highest.loss > WILD_LOSS * chance:
        yield f"the validation loss was {highest.loss:.3g} at epoch {highest.epoch:.3g} {guess}"
    elif kept[-1].loss > chance:
        yield f"the final validation loss is {kept[-1].loss:.3g} {guess}"
    losses = np.array([step.loss for step in run.steps])
    end = median(losses[-_few(losses) :])
    if end - floor > run.task.fit * chance:
        smoothing = f", {floor:.3g} of it from label smoothing" if floor else ""
        yield f"the final training loss is {end:.3g}{smoothing} {guess}"


def _weak_classes(found: Mistakes, labelled: str) -> Iterator[str]:
    """Yield the classes whose accuracy is far below that of all images."""
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
    share = f"{lowest.correct:,} of {lowest.size:,} {labelled} right"
    if others:
        yield (
            f"{len(weak)} of {len(classes):,} classes have less than a third of this top-1, the "
            f"lowest {lowest.name} with {share}"
        )
    else:
        yield f"class {lowest.name} has only {share}"


def _finished_by_metric(run: Run, end: Evaluation, metric: Metric) -> Verdict:
    """Compare the metric at the end with the best of the run."""
    kept, value = run.kept_evaluations, metric.value(end)
    if not math.isfinite(value) or not math.isfinite(end.loss):
        return Verdict("The run finished, but the final validation loss is not finite.", good=False)
    choose = min if metric.lower_is_better else max
    best = choose((found for found in kept if math.isfinite(metric.value(found))), key=metric.value)
    side, extreme = ("above", "lowest") if metric.lower_is_better else ("below", "highest")
    words = f"the {extreme} of the run"
    if metric.is_better(metric.value(best), value):
        words = f"close to its {extreme}, {metric.text(best)}"
    if abs(value - metric.value(best)) > CLOSE * abs(metric.value(best)):
        return Verdict(
            f"The run finished, but the final {metric.name}, {metric.text(end)}, is {side} the "
            f"{metric.text(best)} after {best.step:,} steps.",
            good=False,
        )
    return _judged(run, kept, f"the final {metric.name} is {metric.text(end)}, {words}.")


def _losses(run: Run) -> str:
    """Describe how the training loss fell, by the medians of the first and the last updates."""
    losses = np.array([step.loss for step in run.steps])
    begin, end = median(losses[: _few(losses)]), median(losses[-_few(losses) :])
    return f"the training loss fell from {begin:.3g} to {end:.3g} and " if end < begin else ""


def _few(values: FloatArray) -> int:
    """Return the number of values at the start or the end of a run: one in twenty."""
    return max(1, len(values) // 20)


def _unfinished(run: Run) -> str:
    """Describe how a run ended that did not finish."""
    summary = run.summary
    done = f"{run.num_steps:,} of {run.plan.updates:,} steps"
    if summary is None:
        words = f"The run has no summary: it was killed or is under way. Its log ends after {done}."
    elif summary.status == "paused":
        words = f"The run paused at --max-steps, after {done}. Resume it with --resume."
    elif summary.status == "interrupted":
        words = f"The run was interrupted after {done}. Resume it with --resume."
    elif summary.status == "stopped":
        words = f"The run was stopped after {done}. --resume continues from the last checkpoint."
    else:
        words = f"The run failed after {done}."
    last = run.steps[-1] if run.steps else None
    if last is not None and not last.skipped and not math.isfinite(last.loss):
        words += f" Its training loss was not finite at step {last.step:,}."
    if not run.evaluations:
        return words + " Accuracy was not measured."
    return words + " The figures are from that point."

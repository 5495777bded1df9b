"""The verdict: the sentence or two that the page of a run begins with.

Which accuracy is good for a data set is not known here, so nothing is praised. A run is held
against itself and against guessing: an answer of equal probabilities for all K classes has a loss
of ln K whatever the images. Each rule has its number below, with the reason for it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from largebatch.report.mistakes import by_class, compare
from largebatch.report.numbers import percent
from largebatch.report.run import FloatArray, Run, median
from largebatch.tracking.events import Evaluation, Mistakes

UNSURE_LOSS = 0.01
"""Nats: perplexities that are no farther apart than 1 % are called close."""

WILD_LOSS = 10
"""Times the loss of guessing. A few times as much is usual in the first epochs of large batches,
where the running averages of BatchNorm lag behind the weights; ten times is not."""

UNFIT_LOSS = 0.5
"""The share of the loss of guessing below which a training loss is expected to end. A label
smoothing of 0.1 alone leaves 0.22 of it with 10 classes and 0.15 with 1,000; crops add to that."""

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
    if run.of_words:
        return _finished_of_words(run, last.after)
    end, sizes = last.after, last.mistakes.sizes if last.mistakes else ()
    one = max(sizes, default=0) / end.samples
    if end.top1 < one + 2 * math.sqrt(one * (1 - one) / end.samples):
        return Verdict(
            f"The run finished, but top-1 ends at {percent(end.top1)} %; the same answer to all "
            f"images would make {percent(one)} %.",
            good=False,
        )
    undone = {stage.name for stage in run.stages if not stage.kept}
    kept = [found for found in run.evaluations if found.stage not in undone]
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
    return _judged(
        run, f"top-1 ends at {percent(end.top1)} %, {words}.", list(_oddities(run, kept))
    )


def _judged(run: Run, words: str, oddities: list[str]) -> Verdict:
    """Return how a run ended, in these words, and what stands out in it."""
    if oddities:
        found = "; ".join(oddities)
        begin = "The run finished: "
        return Verdict(f"{begin}{_losses(run)}{words} What stands out: {found}.", good=False)
    begin = "The run finished and nothing stands out: " if run.steps else "Polishing is done: "
    return Verdict(f"{begin}{_losses(run)}{words}", good=True)


def _oddities(run: Run, kept: list[Evaluation]) -> Iterator[str]:
    """Yield what stands out in a run on images, of which these evaluations were kept."""
    mistakes = run.last_stage.mistakes if run.last_stage else None
    if mistakes is None:
        return  # of an older log: neither classes nor their number are known
    guess = f"equal probabilities for all {len(mistakes.classes):,} classes have"
    yield from _wild_losses(run, kept, math.log(len(mistakes.classes)), guess)
    yield from _weak_classes(mistakes)


def _wild_losses(run: Run, kept: list[Evaluation], chance: float, guess: str) -> Iterator[str]:
    """Yield losses that are far above `chance`, the loss of guessing, or end close to it."""
    unknown = next((found for found in kept if not math.isfinite(found.loss)), None)
    if unknown is not None:
        yield f"the validation loss was no number at epoch {unknown.epoch:.3g}"
    highest = max(kept, key=lambda found: found.loss if math.isfinite(found.loss) else 0.0)
    if highest.loss > WILD_LOSS * chance:
        yield (
            f"the validation loss was {highest.loss:.3g} at epoch {highest.epoch:.3g}, "
            f"where {guess} {chance:.3g}"
        )
    elif kept[-1].loss > chance:
        yield f"the validation loss ends at {kept[-1].loss:.3g}, where {guess} {chance:.3g}"
    losses = np.array([step.loss for step in run.steps])
    end = median(losses[-_few(losses) :])
    if end > UNFIT_LOSS * chance:
        yield f"the training loss ends at {end:.3g}, where {guess} {chance:.3g}"


def _weak_classes(found: Mistakes) -> Iterator[str]:
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
    share = f"{lowest.correct:,} of {lowest.size:,} images"
    if others:
        yield (
            f"{len(weak)} of {len(classes):,} classes have less than a third of that top-1, the "
            f"lowest is {lowest.name} with {share}"
        )
    else:
        yield f"of class {lowest.name} only {share} are right"


def _finished_of_words(run: Run, end: Evaluation) -> Verdict:
    """Compare the perplexity at the end with the lowest of the run."""
    assert end.perplexity is not None
    lowest = min(run.evaluations, key=lambda found: found.loss)
    if end.loss > lowest.loss + UNSURE_LOSS or not math.isfinite(end.perplexity):
        return Verdict(
            f"The run finished, but perplexity ends at {end.perplexity:.2f}, above the "
            f"{lowest.perplexity:.2f} that it was after {lowest.step:,} steps.",
            good=False,
        )
    words = "the lowest of the run"
    if end.loss > lowest.loss:
        words = f"close to its lowest, {lowest.perplexity:.2f}"
    return _judged(run, f"perplexity ends at {end.perplexity:.2f}, {words}.", [])


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

"""The verdict: the first sentences of the page of a run.

What accuracy is good for a data set is not known here. So a run is compared with itself and with
guessing: equal probabilities for all K classes have a loss of ln K. What stands out are the causes
that `diagnosis` finds, by the same rules as the command `diagnose`.
"""

import math
from dataclasses import dataclass

import numpy as np

from largebatch.formatting import percent
from largebatch.report.diagnosis import Cause, find_causes
from largebatch.report.mistakes import compare
from largebatch.report.record import Record, record_of
from largebatch.report.run import FloatArray, Run, median


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
    end, sizes = last.after, last.mistakes.sizes if last.mistakes else ()
    one = max(sizes, default=0) / end.samples
    if end.top1 < one + 2 * math.sqrt(one * (1 - one) / end.samples):
        return Verdict(
            f"The run finished, but the final top-1 is {percent(end.top1)} %; always predicting "
            f"the most frequent class gives {percent(one)} %.{_likely(run)}",
            good=False,
        )
    kept = run.kept_evaluations
    best = max(kept, key=lambda found: found.top1)
    of_best = next((stage.mistakes for stage in run.stages if stage.after == best), None)
    if compare(best, end, of_best, last.mistakes).beyond_noise:
        return Verdict(
            f"The run finished, but the final top-1, {percent(end.top1)} %, is below the "
            f"{percent(best.top1)} % after {best.step:,} steps ({best.stage}).{_likely(run)}",
            good=False,
        )
    words = "the best of the run"
    if best.top1 > end.top1:
        words = f"within the noise of its best, {percent(best.top1)} %"
    return _judged(run, f"the final top-1 is {percent(end.top1)} %, {words}.")


def _judged(run: Run, words: str) -> Verdict:
    """Add what stands out in a run, and what is not known, to the words about its end."""
    record = record_of(run)
    oddities = [cause.figure for cause in _causes(record)]
    unknown = [] if record.classes else ["losses against guessing"]
    if run.final_mistakes is None:
        unknown.append("accuracy by class")
    words = f"{_losses(run)}{words}"
    if unknown:
        words += f" Not checked, for lack of a record: {', '.join(unknown)}."
    if oddities:
        text = f"The run finished: {words} What stands out: {'; '.join(oddities)}."
        return Verdict(text, good=False)
    begin = "The run finished and nothing stands out: " if run.steps else "Polishing finished: "
    return Verdict(begin + words, good=not unknown)


def _causes(record: Record) -> list[Cause]:
    """Return the likely causes of a worse model, the most likely first."""
    return [cause for cause in find_causes(record) if cause.harms]


def _likely(run: Run) -> str:
    """Return a sentence on the most likely cause; empty without one."""
    return next((f" Likely cause: {cause.figure}." for cause in _causes(record_of(run))), "")


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

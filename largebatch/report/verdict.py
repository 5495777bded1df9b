"""The verdict: the first sentences of a run's page, on how it ended and on what went wrong."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from largebatch.formatting import percent
from largebatch.report.mistakes import change_from
from largebatch.report.run import Run, median

if TYPE_CHECKING:
    from largebatch.report.diagnosis import Cause


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run went."""

    words: str
    good: bool
    causes: "tuple[Cause, ...]" = ()
    """Causes of a worse model, if the run finished; costs and corrections are not among them."""


def verdict(run: Run) -> Verdict:
    """Describe how a run ended, and for one that finished its likely causes of a worse model.

    What accuracy is good for a data set is not known here. So the end is compared with always
    predicting one class, and with the best of the run.
    """
    if not run.finished:
        return Verdict(_unfinished(run), good=False)
    last = run.last_stage
    if last is None:
        return Verdict("The run finished; its accuracy was not measured.", good=False)
    # Only runs that finished are diagnosed, so that a run that pauses does not load the rules.
    from largebatch.report.diagnosis import find_causes
    from largebatch.report.record import record_of

    record = record_of(run)
    causes = tuple(cause for cause in find_causes(record) if cause.harms)
    likely = f" Likely cause: {causes[0].figure}." if causes else ""
    end, sizes = last.after, last.mistakes.sizes if last.mistakes else ()
    one = max(sizes, default=0) / end.samples
    best = max(run.kept_evaluations, key=lambda found: found.top1)
    unknown_mistakes = replace(last, after=best, mistakes=None)
    best_stage = next((stage for stage in run.stages if stage.after == best), unknown_mistakes)
    bad = ""
    if end.top1 < one + 2 * math.sqrt(one * (1 - one) / end.samples):
        bad = f"is {percent(end.top1)} %; always predicting the most frequent class gives "
        bad += f"{percent(one)} %"
    elif change_from(best_stage, last).beyond_noise:
        bad = f"is {percent(end.top1)} %, below the {percent(best.top1)} % after {best.step:,} "
        bad += f"steps ({best.stage})"
    if bad:
        words = f"The run finished, but the final top-1 {bad}.{likely}"
        return Verdict(words, good=False, causes=causes)
    words = "the best of the run"
    if best.top1 > end.top1:
        words = f"within the noise of its best, {percent(best.top1)} %"
    words = f"{_losses(run)}the final top-1 is {percent(end.top1)} %, {words}."
    unknown = [] if record.classes else ["losses against guessing"]
    unknown += [] if run.final_mistakes else ["accuracy by class"]
    if unknown:
        words += f" Not checked, because it was not recorded: {', '.join(unknown)}."
    if causes:
        found = "; ".join(cause.figure for cause in causes)
        return Verdict(f"The run finished: {words} Faults: {found}.", good=False, causes=causes)
    begin = "The run finished and no fault was found: " if run.steps else "Polishing finished: "
    return Verdict(begin + words, good=not unknown)


def _losses(run: Run) -> str:
    losses = np.array([step.loss for step in run.steps])
    few = max(1, len(losses) // 20)
    begin, end = median(losses[:few]), median(losses[-few:])
    return f"the training loss fell from {begin:.3g} to {end:.3g} and " if end < begin else ""


def _unfinished(run: Run) -> str:
    done = f"{run.num_steps:,} of {run.plan.updates:,} steps"
    words = {
        None: f"The run has no summary: it was killed or is running. Its log ends after {done}.",
        "paused": f"The run paused at --max-steps, after {done}. Resume it with --resume.",
        "interrupted": f"The run was interrupted after {done}. Resume it with --resume.",
        "stopped": f"The run was stopped after {done}. Resume it with --resume.",
        "failed": f"The run failed after {done}.",
    }[run.summary.status if run.summary else None]
    last = run.steps[-1] if run.steps else None
    if last is not None and not last.skipped and not math.isfinite(last.loss):
        words += f" Its training loss was not finite at step {last.step:,}."
    return words + (" Accuracy was not measured." * (not run.evaluations))

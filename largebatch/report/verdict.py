"""How a run went, in a sentence or two: the verdict of its report.

What accuracy is good for a data set is not known here. So the end is compared with always
predicting one class, and with the best of the run.
"""

import math
from dataclasses import dataclass, replace

from largebatch.formatting import percent, plural
from largebatch.report.run import EvaluatedStage, Run, change_from, median, values_of
from largebatch.rules import Finding, Rule, decide


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run went."""

    words: str
    good: bool
    causes: tuple[Finding, ...] = ()
    """Causes of a worse model, if the run finished; costs and corrections are not among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended whose accuracy is not judged."""

    done: int
    updates: int
    status: str
    """Empty without a summary."""

    reason: str
    lost_at: int | None
    """The last update if its loss was not finite."""

    is_measured: bool
    """True if an accuracy was measured."""

    @property
    def steps(self) -> str:
        """How far it came."""
        return f"{self.done:,} of {self.updates:,} steps"

    @property
    def rest(self) -> str:
        """What else is known, in sentences."""
        text = f" Reason: {self.reason}." if self.reason else ""
        if self.lost_at is not None:
            text += f" Its training loss was not finite at step {self.lost_at:,}."
        return text + " Accuracy was not measured." * (not self.is_measured)


ENDING: tuple[Rule[Ending], ...] = (
    Rule(
        check="verdict",
        level="unknown",
        when=lambda e: e.status == "finished",
        text="The run finished; its accuracy was not measured.",
    ),
    Rule(
        check="verdict",
        level="unknown",
        when=lambda e: not e.status,
        text=lambda e: (
            "The run has no summary: it was killed or is running. Its log ends after "
            f"{e.steps}.{e.rest}"
        ),
    ),
    Rule(
        check="verdict",
        level="fault",
        when=lambda e: e.status == "failed",
        text=lambda e: f"The run failed after {e.steps}.{e.rest}",
    ),
    Rule(
        check="verdict",
        level="unknown",
        text=lambda e: f"The run was {e.status} after {e.steps}. Resume it with --resume.{e.rest}",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a run that finished."""

    top1: float
    samples: int
    most_frequent: float
    """Part of the validation images that the most frequent class has; 0 if not recorded."""

    best: float
    """Best top-1 of the run."""

    best_step: int
    best_stage: str
    is_below_best: bool
    """True if the end is below the best beyond noise."""

    first_loss: float
    last_loss: float
    has_steps: bool
    """False for a run that only polishes."""

    not_recorded: tuple[str, ...]
    """What was not examined because it was not recorded."""

    causes: tuple[Finding, ...]

    @property
    def error_of_guess(self) -> float:
        """Standard error of the accuracy of always predicting the most frequent class."""
        return math.sqrt(self.most_frequent * (1 - self.most_frequent) / self.samples)

    @property
    def likely(self) -> str:
        """The first cause, as a sentence."""
        return f" Likely cause: {self.causes[0].text}." if self.causes else ""

    @property
    def course(self) -> str:
        """Loss and accuracy, in sentences."""
        words = "the best of the run"
        if self.best > self.top1:
            words = f"within the noise of its best, {percent(self.best)} %"
        words = f"the final top-1 is {percent(self.top1)} %, {words}."
        if self.last_loss < self.first_loss:
            fall = f"from {self.first_loss:.3g} to {self.last_loss:.3g}"
            words = f"the training loss fell {fall} and {words}"
        if self.not_recorded:
            not_recorded = ", ".join(self.not_recorded)
            words += f" Not checked, because it was not recorded: {not_recorded}."
        return words


def _no_fault(e: Finished) -> str:
    begin = "The run finished and no fault was found" if e.has_steps else "Polishing finished"
    return f"{begin}: {e.course}"


FINISHED: tuple[Rule[Finished], ...] = (
    Rule(
        check="verdict",
        level="fault",
        when=lambda e: e.top1 < e.most_frequent + 2 * e.error_of_guess,
        text=lambda e: (
            f"The run finished, but the final top-1 is {percent(e.top1)} %; always predicting the "
            f"most frequent class gives {percent(e.most_frequent)} %.{e.likely}"
        ),
    ),
    Rule(
        check="verdict",
        level="fault",
        when=lambda e: e.is_below_best,
        text=lambda e: (
            f"The run finished, but the final top-1 is {percent(e.top1)} %, below the "
            f"{percent(e.best)} % after {plural(e.best_step, 'step')} ({e.best_stage}).{e.likely}"
        ),
    ),
    Rule(
        check="verdict",
        level="fault",
        when=lambda e: bool(e.causes),
        text=lambda e: (
            f"The run finished: {e.course} Faults: {'; '.join(it.text for it in e.causes)}."
        ),
    ),
    Rule(
        check="verdict",
        level="unknown",
        when=lambda e: bool(e.not_recorded),
        text=_no_fault,
    ),
    Rule(check="verdict", level="fine", text=_no_fault),
)

_EXAMINED = frozenset({"losses against guessing", "accuracy by class"})
"""Checks without which a run is not called good."""


def verdict(run: Run) -> Verdict:
    """Describe how a run ended, and for one that finished its likely causes of a worse model."""
    last = run.last_stage
    if not run.finished or last is None:
        (finding,) = decide(_measure_ending(run), ENDING)
        return Verdict(finding.text, good=False)
    evidence = _measure_finished(run, last)
    (finding,) = decide(evidence, FINISHED)
    return Verdict(finding.text, good=finding.level == "fine", causes=evidence.causes)


def _measure_ending(run: Run) -> Ending:
    summary = run.summary
    last = run.steps[-1] if run.steps else None
    is_lost = last is not None and not last.skipped and not math.isfinite(last.loss)
    return Ending(
        done=run.num_steps,
        updates=run.plan.updates,
        status=summary.status if summary else "",
        reason=(summary.reason or "") if summary else "",
        lost_at=last.step if last is not None and is_lost else None,
        is_measured=bool(run.evaluations),
    )


def _measure_finished(run: Run, last: EvaluatedStage) -> Finished:
    # Only runs that finished are diagnosed, so that a run that pauses does not load the rules.
    from largebatch.report.diagnosis import find_causes
    from largebatch.report.record import record_of

    record = record_of(run)
    sizes = last.mistakes.sizes if last.mistakes else ()
    best = max(run.kept_evaluations, key=lambda evaluation: evaluation.top1)
    unknown_mistakes = replace(last, after=best, mistakes=None)
    best_stage = next((stage for stage in run.stages if stage.after == best), unknown_mistakes)
    losses = values_of(run.steps, "loss")
    few = max(1, len(losses) // 20)
    return Finished(
        top1=last.after.top1,
        samples=last.after.samples,
        most_frequent=max(sizes, default=0) / last.after.samples,
        best=best.top1,
        best_step=best.step,
        best_stage=best.stage,
        is_below_best=change_from(best_stage, last).beyond_noise,
        first_loss=median(losses[:few]),
        last_loss=median(losses[-few:]),
        has_steps=bool(run.steps),
        not_recorded=tuple(name for name in record.unchecked if name in _EXAMINED),
        causes=tuple(cause for cause in find_causes(record) if cause.level == "fault"),
    )

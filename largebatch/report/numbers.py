"""The numbers a report begins with, and in plain words how the run ended."""

import math
from dataclasses import dataclass

from largebatch.recipe.plan import Plan
from largebatch.report.run import Run, images_per_second

UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class Headline:
    """One big number."""

    label: str
    value: str
    unit: str
    note: str
    good: bool | None = None
    """False for a loss, None where there is nothing to judge."""


def headlines(run: Run) -> tuple[Headline, ...]:
    """Return the six numbers that sum up a run."""
    plan = run.plan
    rate = images_per_second(run)
    seconds = run.summary.seconds if run.summary else None
    time, unit = duration(seconds).split(" ") if seconds is not None else (UNKNOWN, "")
    polishing = sum(stage.result.seconds for stage in run.stages[1:] if stage.result)
    return (
        _accuracy(run),
        _gain(run),
        Headline(
            "Training speed",
            UNKNOWN if rate is None else f"{rate:,.0f}",
            "" if rate is None else "images/s",
            "no step was timed"
            if rate is None
            else _plural(plan.workers, "worker") + ("" if plan.workers == 1 else " together"),
        ),
        Headline(
            "Global batch",
            f"{plan.global_batch:,}",
            "images",
            _division(plan),
        ),
        Headline(
            "Updates",
            f"{run.num_steps:,}",
            "step" if run.num_steps == 1 else "steps",
            f"{run.num_steps / plan.steps_per_epoch:,.1f} epochs{_skipped(run)}",
        ),
        Headline(
            "Wall time", time, unit, f"{duration(polishing)} of it polishing" if polishing else ""
        ),
    )


def _skipped(run: Run) -> str:
    """Say how many updates fp16 lost."""
    skipped = run.summary.skipped_steps if run.summary else 0
    return f", {skipped:,} skipped: fp16 overflow" if skipped else ""


def _accuracy(run: Run) -> Headline:
    last = run.result
    if last is None:
        return Headline("Top-1 accuracy", UNKNOWN, "", "never measured")
    polished = any(stage.kept for stage in run.stages[1:]) and verdict(run) is None
    when = "after polishing" if polished else f"after {last.step:,} steps"
    return Headline("Top-1 accuracy", percent(last.top1), "%", when)


def _gain(run: Run) -> Headline:
    """Say what came after stage train, which is not only polishing's: updates are part of it."""
    label = "Gain during polishing"
    if len(run.stages) < 2:
        return Headline(label, UNKNOWN, "", "not polished")
    first, last = run.stages[0].after, run.result
    assert last is not None
    made = sum(stage.result.steps for stage in run.stages[1:] if stage.result and stage.kept)
    epochs = made / run.plan.steps_per_epoch
    images = abs(round((last.top1 - first.top1) * last.samples))
    good = None if last.top1 == first.top1 else last.top1 > first.top1
    return Headline(
        label,
        points(first.top1, last.top1),
        "points",
        f"{images:,} of {last.samples:,} images"
        + (f", in {epochs:,.1f} more epochs" if epochs else ""),
        good,
    )


def verdict(run: Run) -> str | None:
    """Say how a run ended that did not finish; None for one that did."""
    summary = run.summary
    if summary is not None and summary.status == "finished":
        return None
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


def subtitle(run: Run) -> str:
    """Say in one line how the run ended, when it began and on what it ran."""
    summary = run.summary
    began = run.starts[0].time
    words = [summary.status if summary else "killed", f"{began.day} {began:%B %Y}"]
    words.append(_plural(run.plan.workers, "worker"))
    if len(run.starts) > 1:
        steps = ", ".join(f"{start.resume_step:,}" for start in run.starts[1:])
        words.append(f"resumed at step {steps}")
    return " · ".join(words)


def percent(part: float) -> str:
    """Return a part of 1 in percent, as accuracies are written.

    >>> percent(0.98333)
    '98.33'
    """
    return f"{100 * part:.2f}"


def points(before: float, after: float) -> str:
    """Return the change of a part of 1 in percentage points, with its sign.

    >>> points(0.5, 0.4825)
    '−1.75'
    """
    change = f"{100 * (after - before):+.2f}"
    return "±0.00" if float(change) == 0 else change.replace("-", "−")


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> [duration(s) for s in (0.25, 74.7, 754, 9_000)]
    ['0.25 s', '74.7 s', '12.6 min', '2.50 h']
    """
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds)} s"


def _three_digits(value: float) -> str:
    decimals = 2 - min(2, max(0, math.floor(math.log10(value)))) if value > 0 else 0
    return f"{value:.{decimals}f}"


def _division(plan: Plan) -> str:
    """Say how a global batch is divided, leaving out what is 1."""
    micro = f" × {plan.accumulation:,} micro-batches" if plan.accumulation > 1 else ""
    return f"{_plural(plan.workers, 'worker')}{micro} × {plan.device_batch:,}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"

"""The first numbers of a report, and its sentences about speed and waits."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from largebatch.formatting import MISSING, duration, percent, plural, points, signed
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.report.mistakes import compare
from largebatch.report.run import Run, Stage, images_per_second
from largebatch.tracking.events import Profile

INPUT_BOUND = 0.1
"""Fraction of the time spent waiting for samples from which a run is called input bound."""


@dataclass(frozen=True, slots=True)
class Headline:
    """One big number."""

    label: str
    value: str
    unit: str
    note: str
    colour: Literal["", "good", "bad", "grey"] = ""
    """Colour of a value that is compared; grey: the change may be chance."""


def headlines(run: Run) -> tuple[Headline, ...]:
    """Return the six numbers that sum up a run."""
    plan = run.plan
    seconds = run.summary.seconds if run.summary else None
    time, unit = duration(seconds).split(" ") if seconds is not None else (MISSING, "")
    return (
        _score(run),
        _gain(run),
        _speed(run),
        Headline(
            "Global batch",
            f"{plan.global_batch:,}",
            "images",
            _division(plan) + _later_batches(plan),
        ),
        Headline(
            "Updates",
            f"{run.num_steps:,}",
            "step" if run.num_steps == 1 else "steps",
            f"{plan.epoch(run.num_steps):,.1f} epochs{_skipped(run)}",
        ),
        Headline("Wall time", time, unit, _stage_times(run)),
    )


def _stage_times(run: Run) -> str:
    """Describe how much of the wall time the clean epochs and the polishing after them took."""
    stages = {
        "clean epochs": [stage for stage in run.stages[1:] if stage.name == "clean"],
        "polishing": run.polishing,
    }
    parts: list[str] = []
    for name, of in stages.items():
        seconds = sum(stage.result.seconds for stage in of if stage.result)
        if seconds:
            parts.append(f"{duration(seconds)}{' of it' * (not parts)} {name}")
    return ", ".join(parts)


def _speed(run: Run) -> Headline:
    rate = images_per_second(run)
    if rate is None:
        return Headline("Training speed", MISSING, "", "no step was timed")
    together = plural(run.plan.workers, "worker") + " together" * (run.plan.workers > 1)
    bound = bool(run.timed) and shares(run).data >= INPUT_BOUND
    note = f"{together}, input bound" if bound else together
    return Headline("Training speed", f"{rate:,.0f}", "images/s", note)


def _skipped(run: Run) -> str:
    """Format the number of skipped updates."""
    skipped = run.summary.skipped_steps if run.summary else 0
    return f", {skipped:,} skipped: gradients not finite" if skipped else ""


def _score(run: Run) -> Headline:
    last = run.result
    if last is None:
        return Headline("Top-1 accuracy", MISSING, "", "never measured")
    polished = any(stage.kept for stage in run.polishing) and run.finished
    when = "after polishing" if polished else f"after {last.step:,} steps"
    return Headline("Top-1 accuracy", percent(last.top1), "%", when)


def _gain(run: Run) -> Headline:
    """Describe what polishing gained after the schedule.

    Clean epochs are part of the schedule, which would train them anyway on augmented images.
    """
    base, last = run.end_of_schedule, run.last_stage
    if base is None or last is None or len(run.stages) < 2:
        return Headline("Gain by polishing", MISSING, "", "not polished")
    first = run.stages[0]
    if not run.polishing:
        return _gain_between(run, "Gain in the clean epochs", first, base, also="", judged=False)
    clean = f"; clean epochs before: {points(first.after.top1, base.after.top1)}"
    also = clean if base is not first else ""
    return _gain_between(run, "Gain by polishing", base, last, also=also, judged=True)


def _gain_between(
    run: Run, label: str, before: Stage, after: Stage, *, also: str, judged: bool
) -> Headline:
    """Describe a change of top-1; one that is `judged` is good if chance does not explain it."""
    change = compare(before.after, after.after, before.mistakes, after.mistakes)
    evaluated = f"{change.samples:,} validation images"
    images = f"{abs(change.images):,} of {evaluated}"
    if not change.beyond_noise:
        images = f"within the noise of {evaluated}"
    place = run.stages.index(before)
    made = sum(s.result.steps for s in run.stages[place + 1 :] if s.result and s.kept)
    end = after.after.step
    passes = run.plan.epoch(end) - run.plan.epoch(max(0, end - made))
    epochs = f", in {passes:,.1f} epochs" if made else ""
    colour: Literal["", "good", "bad", "grey"] = "grey"
    if change.beyond_noise:
        colour = "bad" if change.images < 0 else "good" if judged else ""
    return Headline(
        label,
        points(before.after.top1, after.after.top1),
        "points",
        f"{images}{epochs}{also}",
        colour,
    )


def subtitle(run: Run) -> str:
    """Describe in one line the end, the start and the machine of the run."""
    summary = run.summary
    began = run.starts[0].time
    words = [summary.status if summary else "killed", f"{began.day} {began:%B %Y}"]
    words.append(plural(run.plan.workers, "worker"))
    if len(run.starts) > 1:
        steps = ", ".join(f"{start.resume_step:,}" for start in run.starts[1:])
        words.append(f"resumed at step {steps}")
    return " · ".join(words)


def short_commit(commit: str | None) -> str:
    """Return the first digits of a commit, and the mark of changed files.

    >>> short_commit("4f2a9c1d5e6b7a8091827364554637281900abcd+"), short_commit(None)
    ('4f2a9c1d5e6b+', '–')
    """
    return MISSING if commit is None else commit[:12] + "+" * commit.endswith("+")


def _division(plan: Plan) -> str:
    """Format the division of a global batch, without factors of 1."""
    micro = f" × {plan.accumulation:,} micro-batches" if plan.accumulation > 1 else ""
    return f"{plural(plan.workers, 'worker')}{micro} × {plan.device_batch:,}"


def _later_batches(plan: Plan) -> str:
    """Format the sizes of the global batch in a batch schedule, with their times."""
    return "".join(
        f"; {piece.global_batch:,} from step {piece.step:,}" for piece in plan.batch_changes
    )


class Shares(NamedTuple):
    """Parts of the time of updates: these two, and computing the rest."""

    data: float
    reduction: float


def shares(run: Run) -> Shares:
    """Return the shares over all timed updates without the first, which warms up.

    The run has a timed update.
    """
    steps = run.timed[1:] or run.timed
    whole = sum(step.step_seconds for step in steps)
    return Shares(
        sum(step.data_seconds for step in steps) / whole,
        sum(step.reduction_seconds for step in steps) / whole,
    )


def describe_waits(run: Run) -> str:
    """Return a sentence on whether the run was input bound."""
    data, reduction = shares(run)
    parts = f"{_percent(data)} of the time waiting for images"
    if run.plan.workers > 1:
        parts += f" and {_percent(reduction)} waiting for the sums of gradients"
    if data < INPUT_BOUND:
        return f"Not input bound: updates spent {parts}."
    return (
        f"Input bound: updates spent {parts}. Without waiting for images, training "
        f"would be {1 / max(1 - data, 0.01):.2g} times as fast (see execution.cache "
        "and execution.decoder, or give each worker more cores)."
    )


def describe_gap(run: Run) -> str | None:
    """Return a sentence on the losses after the last stage; None without the monitor."""
    last, found = run.result, run.last_gap
    if last is None or found is None or not math.isfinite(found.gap):
        return None
    gap = signed(found.gap, ".4f")
    return (
        f"The generalization gap is {gap}: the validation loss, {last.loss:.4f}, minus the "
        f"training loss, {found.loss:.4f}, on {found.samples:,} images without "
        f"augmentation. Top-1 on these is {percent(found.top1)} %."
    )


def _percent(part: float) -> str:
    """Return a share in percent.

    >>> [_percent(part) for part in (0.0004, 0.034, 0.417)]
    ['less than 0.1 %', '3.4 %', '42 %']
    """
    if part < 0.001:
        return "less than 0.1 %"
    return f"{100 * part:.0f} %" if part >= 0.1 else f"{100 * part:.1f} %"


class Share(NamedTuple):
    """A row of the table of a profile: shares of the time, 0 .. 1."""

    name: str
    calls: float | None
    """Calls an update; None for what is no operation."""

    host: float
    device: float


def profile_shares(found: Profile) -> list[Share]:
    """Return the shares of the profiled time, the largest operations first.

    The last share is Python and waiting for the device: host time outside of operations.
    """
    updates, named = found.step - found.first + 1, found.operations
    rows = [
        Share(
            each.name,
            each.calls / updates,
            each.host_seconds / found.seconds,
            each.device_seconds / found.seconds,
        )
        for each in named
    ]
    host = found.host_seconds - sum(each.host_seconds for each in named)
    device = found.device_seconds - sum(each.device_seconds for each in named)
    rest = max(0.0, found.seconds - found.host_seconds)
    return [
        *sorted(rows, key=lambda row: max(row.host, row.device), reverse=True),
        Share("all other operations", None, host / found.seconds, device / found.seconds),
        Share("Python, and waiting", None, rest / found.seconds, 0.0),
    ]

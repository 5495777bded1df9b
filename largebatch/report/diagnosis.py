"""The judgement of a run: likely causes of what went wrong, the most likely one first.

The verdict of a page and the command `diagnose` use the same rules. A run is compared with itself,
with guessing (a loss of ln K for K classes) and, where there is one, with a run in smaller batches.
Each threshold has its reason below. A cause that explains others comes before them: what diverged
has no statistics worth a look, and with wrong statistics whole classes are wrong.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from largebatch.formatting import percent, plural
from largebatch.recipe.installed import FEWEST_UPDATES
from largebatch.report.mistakes import by_class
from largebatch.report.noise import has_course, latest, samples
from largebatch.report.numbers import INPUT_BOUND, shares
from largebatch.report.pair import compare_pair
from largebatch.report.record import RISE, RISEN, Record, Rise

Kind = Literal[
    "diverged",
    "rate beyond the edge",
    "spiked in warm-up",
    "statistics off",
    "class lost",
    "generalisation gap",
    "noise scale below the batch",
    "fewer updates",
    "underfit",
    "weak classes",
    "input bound",
]
"""The causes, the most likely first where several are found."""

WILD_LOSS = 10
"""Multiple of the loss of guessing from which a validation loss stands out.

A few times that loss is usual in the first epochs of large batches, because the running averages of
BatchNorm lag behind the weights; ten times is not.
"""

RECOVERED = 0.9
"""Part of the loss of guessing below which a run recovered: it has learned something since."""

WEAK_CLASS = 1 / 3
"""Fraction of the run's top-1 below which a class is weak."""

FIT = 0.5
"""Share of the loss of guessing below which the training loss of a good run ends: above what label
smoothing alone leaves; random crops leave more."""

WEAK_IMAGES = 0.05
"""Fraction of the validation images that weak classes must hold together to stand out, because of
many classes a few are always hard."""

SURE = 3
"""Standard errors by which a weak class lies below the rest: more than the two of one comparison,
because it is the lowest of many."""

GAP = 0.25
"""Difference of validation and training loss that is a gap, as a part of the loss of guessing."""

GAINED = 0.01
"""Least gain of top-1 by exact statistics that is worth a remark, beyond its noise."""

LARGE = 1_000_000
"""Number of training images from which updates are compared with ImageNet's."""

FEWEST_TIMED = 20
"""Fewest updates whose waits are judged: the first ones fill queues."""

_COMPARED = {"fewer updates", "generalisation gap", "underfit", "weak classes"}
"""Kinds of which a run in smaller batches shows more, or that follow from them."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A likely cause."""

    kind: Kind
    figure: str
    """The measurement that shows it, as part of a sentence."""

    remedy: str
    harms: bool = True
    """False if the final model is not worse for it: it costs time, or was corrected."""


def find_causes(run: Record, small: Record | None = None) -> list[Cause]:
    """Return the likely causes; `small` is a run of the same data in smaller batches."""
    causes = list(_diverged(run))
    if not causes:
        causes = [*_rises(run), *_statistics(run)]
        if not _is_underfit(run):
            causes += _weak_classes(run)
        explained = {cause.kind for cause in causes if cause.harms}
        if not explained & {"statistics off", "class lost"}:
            causes += _gap(run)
        if "rate beyond the edge" not in explained and run.is_complete:
            causes += _underfit(run)
    if small is not None:
        causes = _against(small, run, causes)
    causes += [*_noise_scale(run), *_waits(run)]
    return sorted(causes, key=lambda cause: get_args(Kind).index(cause.kind))


def _against(small: Record, run: Record, causes: list[Cause]) -> list[Cause]:
    """Return the causes with what a comparison shows, unless another one explains the run."""
    if any(cause.harms and cause.kind not in _COMPARED for cause in causes):
        return causes
    pair = [Cause(*found) for found in compare_pair(run, small)]
    return [*pair, *(cause for cause in causes if not pair or cause.kind not in _COMPARED)]


def _guess(run: Record) -> str:
    return f"(equal probabilities for all {run.classes:,} classes give {run.chance:.3g})"


def _diverged(run: Record) -> Iterator[Cause]:
    """Yield a training loss that is no number at the end, or never came back from a rise."""
    lower = (
        "lower schedule.peak_lr or lengthen schedule.warmup; `largebatch lr range` finds the edge, "
        "and half of a rate is often not enough"
    )
    if run.run is None:
        lower = "lower the peak learning rate, by more than half if it helps, or warm up longer"
    lost = np.flatnonzero(~np.isfinite(run.loss))
    failed = run.run is not None and run.run.diverged
    if lost.size and (failed or not math.isfinite(run.loss[-1])):
        row, begin = int(lost[0]), run.onset()
        rose = ""
        filtered = "; its log has numbers in place of NaN from there on" if run.is_filtered else ""
        if begin is not None and begin < row:
            rose = f"rose from {run.lows[begin]:.3g}{_begin(run)} and "
        yield Cause(
            "diverged",
            f"the training loss {rose}was not finite {_place(run, row)}{_rate(run, row)}{filtered}",
            lower,
        )
        return
    if failed:
        yield Cause("diverged", "a loss or gradient was not finite, which ended the run", lower)
        return
    peak = run.rise(slice(0, None))
    if peak and _is_rise(run, peak) and run.end > RECOVERED * run.unit:
        yield Cause(
            "diverged",
            f"the training loss rose from {peak.low:.3g}{_begin(run)} to {peak.high:.3g} "
            f"{_place(run, peak.row)}{_rate(run, peak.row)} and ended at {run.end:.3g}",
            lower,
        )


def _is_rise(run: Record, rise: Rise) -> bool:
    """Return True if a rise of the smoothed loss is a spike."""
    spike = rise.high - rise.low > RISE * run.unit and rise.high > RISEN * rise.low
    return spike and rise.exceeds_noise


def _place(run: Record, row: int) -> str:
    """Return where a row is: its update, or its epoch in logs without updates."""
    if math.isfinite(run.step[row]):
        return f"at step {run.step[row] - 1 + run.first_step:,.0f}"
    return _epoch(run, run.epoch[row]) if math.isfinite(run.epoch[row]) else f"in row {row + 1:,}"


def _begin(run: Record) -> str:
    """Return where the training loss began to rise; nothing if it did not."""
    begin = run.onset()
    return "" if begin is None else f" {_place(run, begin)}{_rate(run, begin)}"


def _epoch(run: Record, epochs: float) -> str:
    """Return the epoch that ends after a number of epochs, as the log counts them."""
    if not math.isfinite(epochs):
        return "in one evaluation"
    return f"at epoch {epochs - 1 + run.first_epoch:.3g}"


def _rate(run: Record, row: int) -> str:
    return f" (learning rate {run.lr[row]:.3g})" if math.isfinite(run.lr[row]) else ""


def _statistics(run: Record) -> Iterator[Cause]:
    """Yield signs that BatchNorm's running statistics are not those of the weights."""
    remedy = (
        "measure exact statistics before an evaluation: polish.statistics, or `largebatch polish`"
    )
    yield from _gained(run)
    finite = np.isfinite(run.val_loss)
    lost = np.flatnonzero(np.isinf(run.val_loss))
    if lost.size:
        where = _epoch(run, run.val_epoch[lost[0]])
        yield Cause("statistics off", f"the validation loss was not finite {where}", remedy)
        return
    if not finite.any() or not run.classes:
        return
    kind: Kind = "statistics off" if run.normalised else "rate beyond the edge"
    row = int(np.nanargmax(np.where(finite, run.val_loss, -math.inf)))
    highest, end = float(run.val_loss[row]), float(run.val_loss[-1])
    if highest > WILD_LOSS * run.chance:
        where = _epoch(run, run.val_epoch[row])
        yield Cause(kind, f"the validation loss was {highest:.3g} {where} {_guess(run)}", remedy)
    elif end > run.chance and not _rose(run) and not _is_underfit(run):
        yield Cause(kind, f"the final validation loss is {end:.3g} {_guess(run)}", remedy)
    elif run.normalised and _never_fits(run) and not _rose(run):
        yield Cause(
            kind,
            f"the validation loss is never below {np.nanmin(run.val_loss):.3g}, while the training "
            f"loss ends at {run.end:.3g} {_guess(run)}",
            remedy,
        )


def _never_fits(run: Record) -> bool:
    """Return True if the model fits its training data, and validation data at no evaluation."""
    limit = FIT * run.chance
    return run.end - run.floor < limit / 2 and bool(np.nanmin(run.val_loss) > limit)


def _gained(run: Record) -> Iterator[Cause]:
    """Yield a gain by exact statistics, which corrected what the running averages had wrong."""
    stages = run.run.stages if run.run else ()
    stage = next((one for one in stages if one.name == "statistics" and one.kept), None)
    if stage is None or stage.before is None or not run.run:
        return
    before, after = stage.before.top1, stage.after.top1
    noise = 2 * math.sqrt(max(before * (1 - before), 1e-9) / stage.after.samples)
    if after - before <= max(noise, GAINED):
        return
    drift, most = run.run.drift, ""
    if drift is not None and drift.layers:
        layer = max(drift.layers, key=lambda one: one.log_variance_ratio)
        factor = math.exp(layer.log_variance_ratio)
        most = f"; the variance of {layer.name} was off by a factor of {factor:.3g}"
    yield Cause(
        "statistics off",
        f"top-1 was {percent(before)} % with BatchNorm's running statistics and is "
        f"{percent(after)} % with exact ones{most}",
        "keep polish.statistics: it corrected this; evaluations before it judge the averages",
        harms=False,
    )


def _rises(run: Record) -> Iterator[Cause]:
    """Yield rises of the training loss: after the start, then at the start."""
    lower = "lower schedule.peak_lr; `largebatch lr range` finds the edge"
    if run.edge is not None and run.peak > run.edge:
        yield Cause(
            "rate beyond the edge",
            f"the peak rate, {run.peak:.3g}, is above the range test's upper bound, {run.edge:.3g}",
            f"lower schedule.peak_lr to at most {run.edge:.3g}",
        )
    late, early = run.rise(slice(run.early, None)), run.rise(slice(0, run.early))
    if late and _is_rise(run, late):
        yield Cause(
            "rate beyond the edge",
            f"after the warm-up the training loss rose from {late.low:.3g} to {late.high:.3g} "
            f"{_place(run, late.row)}{_rate(run, late.row)}",
            lower,
        )
    if early and _is_rise(run, early):
        yield Cause(
            "spiked in warm-up",
            f"the training loss rose from {early.low:.3g} to {early.high:.3g} "
            f"{_place(run, early.row)}{_rate(run, early.row)}",
            "lengthen schedule.warmup, then lower schedule.peak_lr",
        )


def _weak_classes(run: Record) -> Iterator[Cause]:
    """Yield the classes whose accuracy is far below that of all images.

    A class is lost if it is right no more often than by guessing.
    """
    found = run.run.final_mistakes if run.run else None
    if found is None or run.run is None:
        return
    classes, total = by_class(found), sum(found.sizes)
    top1 = 1 - len(found.samples) / total
    weak = [
        one
        for one in classes
        if one.correct < WEAK_CLASS * top1 * one.size
        and one.correct < top1 * one.size - SURE * math.sqrt(one.size * top1 * (1 - top1))
    ]
    if sum(one.size for one in weak) < WEAK_IMAGES * total:
        return
    lowest, *others = weak
    share = f"{lowest.correct:,} of {lowest.size:,} images right"
    yield Cause(
        "class lost" if lowest.correct * len(classes) <= lowest.size else "weak classes",
        f"{len(weak)} of {len(classes):,} classes have less than a third of this top-1, the lowest "
        f"{lowest.name} with {share}"
        if others
        else f"class {lowest.name} has only {share}",
        "look at its training images: their number and labels (`largebatch data show`), and the "
        "order of the classes",
    )


def _rose(run: Record) -> bool:
    """Return True if the validation loss rose from its lowest while the training loss fell."""
    if len(run.val_loss) < 3 or not np.isfinite(run.val_loss).all():
        return False
    row = int(np.argmin(run.val_loss))
    low, end = float(run.val_loss[row]), float(run.val_loss[-1])
    rose = end > RISEN * low and end - low > RISE / 2 * run.unit
    return rose and not run.end >= run.training_at(float(run.val_epoch[row]))


def _gap(run: Record) -> Iterator[Cause]:
    """Yield a validation loss that rose, or ends, far above the training loss."""
    remedy = "more augmentation or label smoothing, more weight decay, or fewer epochs"
    if run.normalised:
        remedy += "; `largebatch polish` shows whether BatchNorm's statistics are part of it"
    if _rose(run):
        row = int(np.argmin(run.val_loss))
        yield Cause(
            "generalisation gap",
            f"the validation loss rose from {run.val_loss[row]:.3g} "
            f"{_epoch(run, run.val_epoch[row])} to {run.val_loss[-1]:.3g}, and the training loss "
            f"fell to {run.end:.3g}",
            remedy,
        )
        return
    if not run.val_loss.size or not math.isfinite(run.val_loss[-1]):
        return
    recorded = run.run.last_gap if run.run else None
    end = float(run.val_loss[-1])
    gap = recorded.gap if recorded else end - max(0.0, run.end - run.floor)
    if run.end - run.floor < FIT * run.chance and gap > GAP * run.chance:
        training = recorded.loss if recorded else run.end
        yield Cause(
            "generalisation gap",
            f"the validation loss ends at {end:.3g}, the training loss at {training:.3g} "
            f"{_guess(run)}",
            remedy,
        )


def _is_underfit(run: Record) -> bool:
    return run.end - run.floor > FIT * run.chance


def _underfit(run: Record) -> Iterator[Cause]:
    """Yield a training loss that ends close to guessing, with the number of updates."""
    if not _is_underfit(run):
        return
    smoothing = f", {run.floor:.3g} of it from label smoothing" if run.floor else ""
    words = f"the final training loss is {run.end:.3g}{smoothing} {_guess(run)}"
    few = run.updates is not None and run.updates < FEWEST_UPDATES
    if few:
        words += f" after {plural(run.updates or 0, 'update')}"
        if run.recipe is None or run.recipe.train_samples >= LARGE:
            words += f"; the fewest published for ImageNet are {FEWEST_UPDATES:,}"
    yield Cause(
        "fewer updates" if few else "underfit",
        words,
        "train for more epochs or in smaller batches; if the loss hardly falls, the rate is wrong: "
        "`largebatch lr range`",
    )


def _noise_scale(run: Record) -> Iterator[Cause]:
    """Yield a recorded noise scale that is surely below the batch at the end."""
    if run.run is None or not has_course(run.run):
        return
    part = latest(run.run)
    found, batch = part.found, run.run.plan.batch_at(part.last)
    if not (found.value > 0 and found.high < batch):
        return
    yield Cause(
        "noise scale below the batch",
        f"the noise scale is {samples(found.value)} at the end (95 %: up to "
        f"{samples(found.high)}), below the batch of {batch:,}, which needs "
        f"{batch / found.value:.0%} more steps than linear scaling",
        "use a smaller batch.global_batch: a larger one saves few updates",
        harms=False,
    )


def _waits(run: Record) -> Iterator[Cause]:
    """Yield the share of the time that updates waited for samples."""
    if run.run is None or len(run.run.timed) < FEWEST_TIMED:
        return
    data = shares(run.run).data
    if data >= INPUT_BOUND:
        yield Cause(
            "input bound",
            f"updates spent {100 * data:.0f} % of the time waiting for images",
            "execution.cache and execution.decoder, or more cores for each worker",
            harms=False,
        )

"""The likely causes of a bad run: one table of rules.

A run is compared with itself, with guessing (a loss of ln K for K classes) and, if there is one,
with a run of the same data in smaller batches. A cause that explains others is checked before them:
a run that diverged is not judged by its statistics, and with wrong statistics whole classes are
wrong. Each threshold has its reason below.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from largebatch.errors import LargebatchError
from largebatch.formatting import percent, plural, three_digits
from largebatch.recipe.data import Data
from largebatch.report.noise import has_course, latest
from largebatch.report.record import RISE, RISEN, Record
from largebatch.report.run import INPUT_BOUND, shares

WILD_LOSS = 10
"""Multiple of the loss of guessing from which a validation loss is suspicious.

A few times that loss is usual in the first epochs of large batches, because the running averages of
BatchNorm lag behind the weights; ten times is not.
"""

RECOVERED = 0.9  # part of the loss of guessing below which a run has learned something since
WEAK_CLASS = 1 / 3  # part of the run's top-1 below which a class is weak

FIT = 0.5
"""Share of the loss of guessing below which the training loss of a good run ends: above what label
smoothing alone leaves; random crops leave more."""

WEAK_IMAGES = 0.05
"""Fraction of the validation images that weak classes must hold together, because of many classes
a few are always hard."""

SURE = 3
"""Standard errors by which a weak class is below the rest: more than the two of one comparison,
because it is the lowest of many."""

FEW_IMAGES = 250
"""Training images of a class up to which weights from other images are worth more than any setting;
`init` recommends them up to this number."""

PHOTOGRAPH = 64  # least side in pixels of images that weights trained on photographs suit
GOOD = 0.9  # top-1 from which a run with few images lacks nothing

FALLS = 0.05
"""Fall of the smoothed training loss over the last quarter of the updates, as a part of the loss of
guessing, from which more epochs promise more: about twice the spread over seeds in short runs."""

GAP = 0.25  # difference of validation and training loss that is a gap, in losses of guessing
GAINED = 0.01  # least gain of top-1 by exact statistics that is reported, beyond its noise
FEWEST_TIMED = 20  # fewest updates whose waits are judged: the first ones fill queues

EQUAL = 0.05
"""Difference of two training losses that counts as none, as a part of the loss of guessing: about
twice the spread over seeds in short runs."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A run to judge, and one of the same data in smaller batches."""

    run: Record
    small: Record | None = None


Numbers = Mapping[str, Any]
"""Numbers, and names or places, by the fields of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A row of the table."""

    kind: str
    holds: Callable[[Judged], Numbers | None]
    """Return the numbers of the text; None if the rule does not hold."""

    text: str
    """What was found, with fields such as `{loss:.3g}` for the numbers."""

    remedy: str = ""
    """What changes it; may have fields, too."""

    link: str = ""
    """Name of the chart that shows it."""

    unless: frozenset[str] = frozenset()
    """Kinds and groups of harmful findings that explain this one, which is then not reported."""

    group: str = ""
    harms: bool = True
    """False if the result is not worse for it: it costs time, or was corrected."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A rule that holds, with its numbers."""

    rule: Rule
    numbers: Numbers

    @property
    def kind(self) -> str:
        """The kind of its rule."""
        return self.rule.kind

    @property
    def harms(self) -> bool:
        """True if the result is worse for it."""
        return self.rule.harms

    @property
    def figure(self) -> str:
        """The measurement that shows it, as part of a sentence."""
        return self.rule.text.format_map(self.numbers)

    @property
    def remedy(self) -> str:
        """What changes it."""
        return self.rule.remedy.format_map(self.numbers)


def find_causes(run: Record, small: Record | None = None) -> list[Cause]:
    """Return the likely causes, the most likely first; `small` has the same data.

    A rule that an earlier one explains is left out.
    """
    judged, found, explained = Judged(run, small), list[Cause](), set[str]()
    for rule in RULES:
        if rule.unless.isdisjoint(explained):
            numbers = rule.holds(judged)
            if numbers is not None:
                found.append(Cause(rule, numbers))
                explained |= {rule.kind, rule.group} if rule.harms else set()
    return found


# Where and by how much: parts of the texts.


def _guess(run: Record) -> str:
    return f"(equal probabilities for all {run.classes:,} classes give {run.chance:.3g})"


def _place(run: Record, row: int) -> str:
    rate = f" (learning rate {run.lr[row]:.3g})" if math.isfinite(run.lr[row]) else ""
    if math.isfinite(run.step[row]):
        return f"at step {run.step[row]:,.0f}{rate}"
    if math.isfinite(run.epoch[row]):
        return f"{_epoch(run.epoch[row])}{rate}"
    return f"in row {row + 1:,}{rate}"


def _begin(run: Record) -> str:
    begin = run.onset()
    return "" if begin is None else f" {_place(run, begin)}"


def _epoch(number: float) -> str:
    return f"at epoch {number:.3g}" if math.isfinite(number) else "in one evaluation"


# Conditions: each returns the numbers of its text, or None.


def _lost(it: Judged) -> Numbers | None:
    run, lost = it.run, np.flatnonzero(~np.isfinite(it.run.loss))
    failed = run.run is not None and run.run.diverged
    if not failed and (not lost.size or math.isfinite(run.loss[-1])):
        return None
    words, begin = "a loss or gradient was not finite, which ended the run", run.onset()
    if lost.size:
        row, rose = int(lost[0]), ""
        if begin is not None and begin < row:
            rose = f"rose from {run.lows[begin]:.3g}{_begin(run)} and "
        words = f"the training loss {rose}was not finite {_place(run, row)}"
    return {"words": words}


def _stayed_up(it: Judged) -> Numbers | None:
    run, peak = it.run, it.run.spike(slice(0, None))
    if not peak or run.end <= RECOVERED * run.unit:
        return None
    return {
        "low": peak.low, "begin": _begin(run), "high": peak.high, "place": _place(run, peak.row),
        "end": run.end,
    }  # fmt: skip


def _spike(run: Record, rows: slice) -> Numbers | None:
    rise = run.spike(rows)
    return rise and {"low": rise.low, "high": rise.high, "place": _place(run, rise.row)}


def _gained(it: Judged) -> Numbers | None:
    run = it.run.run
    stage = (
        next((s for s in run.stages if s.name == "statistics" and s.kept), None) if run else None
    )
    if run is None or stage is None or stage.before is None:
        return None
    before, after, most = stage.before.after.top1, stage.after.top1, ""
    noise = 2 * math.sqrt(max(before * (1 - before), 1e-9) / stage.after.samples)
    if after - before <= max(noise, GAINED):
        return None
    if run.drift is not None and run.drift.layers:
        layer = max(run.drift.layers, key=lambda one: one.log_variance_ratio)
        factor = math.exp(layer.log_variance_ratio)
        most = f"; the variance of {layer.name} was off by a factor of {factor:.3g}"
    return {"before": percent(before), "after": percent(after), "most": most}


def _wild(it: Judged) -> Numbers | None:
    """Return the highest validation loss, or the last one, that is worse than guessing."""
    run = it.run
    losses = run.val_loss
    if not run.normalised or not losses.size:
        return None
    if np.isinf(losses).any():
        row = int(np.argmax(losses == math.inf))
        return {"words": f"validation loss was not finite {_epoch(run.val_epoch[row])}"}
    if not run.classes or np.isnan(losses).all():
        return None
    row, end = int(np.nanargmax(losses)), float(losses[-1])
    guess = _guess(run)
    last_stage = run.run.last_stage if run.run else None
    is_exact = last_stage is not None and last_stage.name == "statistics"
    if losses[row] > WILD_LOSS * run.chance:
        place = _epoch(run.val_epoch[row])
        return {"words": f"validation loss was {losses[row]:.3g} {place} {guess}"}
    # The loss at the end is not due to running averages if it was measured with exact statistics.
    if end > run.chance and not is_exact and not _rose(run) and not _is_underfit(run):
        return {"words": f"final validation loss is {end:.3g} {guess}"}
    return None


def _few_images(it: Judged) -> Numbers | None:
    """Return the number of images of a class if few of them, without weights, explain the result.

    The loss of such a run may end high or low, and its classes are weak; longer training and other
    rates change little. With a smaller batch beside it, both have as many images.
    """
    run = it.run.run
    recipe = run.parsed if run else None
    if run is None or recipe is None or it.small is not None or not it.run.classes:
        return None
    images = run.plan.train_samples / it.run.classes
    data = recipe.data
    if not isinstance(data, Data) or data.source != "folder" or data.image_size < PHOTOGRAPH:
        return None
    if images > FEW_IMAGES or recipe.model.weights is not None:
        return None
    top1 = run.result.top1 if run.finished and run.result else math.nan
    if not top1 < GOOD:
        return None
    return {
        "samples": run.plan.train_samples, "classes": it.run.classes, "images": images,
        "top1": percent(top1),
    }  # fmt: skip


def _class_lost(it: Judged) -> Numbers | None:
    run = it.run.run
    found = run.final_mistakes if run else None
    if found is None or _is_underfit(it.run):
        return None
    sizes, labels = np.array(found.sizes), np.array(found.labels, dtype=np.int64)
    correct, classes = sizes - np.bincount(labels, minlength=sizes.size), np.count_nonzero(sizes)
    top1 = 1 - len(found.samples) / sizes.sum()
    usual = np.sqrt(sizes * top1 * (1 - top1))
    weak = (correct < WEAK_CLASS * top1 * sizes) & (correct < top1 * sizes - SURE * usual)
    if sizes[weak].sum() < WEAK_IMAGES * sizes.sum():
        return None
    lowest = min(np.flatnonzero(weak), key=lambda label: correct[label] / sizes[label])
    if correct[lowest] * classes > sizes[lowest]:
        return None
    return {
        "name": found.classes[lowest], "correct": correct[lowest], "size": sizes[lowest],
        "weak": np.count_nonzero(weak), "classes": classes,
    }  # fmt: skip


def _rose(run: Record) -> bool:
    if len(run.val_loss) < 3 or not np.isfinite(run.val_loss).all():
        return False
    row = int(np.argmin(run.val_loss))
    low, end = float(run.val_loss[row]), float(run.val_loss[-1])
    if end <= RISEN * low or end - low <= RISE / 2 * run.unit:
        return False
    known = np.isfinite(run.epoch)
    if not known.any() or not math.isfinite(run.val_epoch[row]):
        return True
    then = int(np.searchsorted(run.epoch[known], run.val_epoch[row], side="right")) - 1
    return not run.end >= run.trend[known][max(0, then)]


def _validation_rose(it: Judged) -> Numbers | None:
    run = it.run
    if not _rose(run):
        return None
    row = int(np.argmin(run.val_loss))
    return {
        "low": run.val_loss[row], "place": _epoch(run.val_epoch[row]),
        "high": run.val_loss[-1], "end": run.end,
    }  # fmt: skip


def _gap(it: Judged) -> Numbers | None:
    run = it.run
    if _rose(run) or not run.val_loss.size or not math.isfinite(run.val_loss[-1]):
        return None
    recorded, end = run.run.last_gap if run.run else None, float(run.val_loss[-1])
    gap = recorded.gap if recorded else end - max(0.0, run.end - run.floor)
    if not (run.end - run.floor < FIT * run.chance and gap > GAP * run.chance):
        return None
    training = recorded.loss if recorded else run.end
    return {"end": end, "training": training, "guess": _guess(run)}


def _is_underfit(run: Record) -> bool:
    return run.end - run.floor > FIT * run.chance


def _fall(run: Record) -> float:
    """Return how far the smoothed training loss fell over the last quarter; NaN for few rows.

    Clean epochs do not count: their images are easier, whatever the model has learned.
    """
    trend = run.trend
    if run.run is not None:
        trend = trend[: sum(step.stage == "train" for step in run.run.steps)]
    rows = len(trend)
    return float(trend[-1 - rows // 4] - trend[-1]) if rows >= 4 else math.nan


def _still_improves(run: Record) -> bool:
    """Return True if the curves of the last quarter show that more epochs would help.

    The training loss still falls, and so does the validation loss, or top-1 rises beyond noise,
    where they were measured in the last quarter and before it.
    """
    if not _fall(run) > FALLS * run.unit:
        return False
    is_early = run.val_epoch <= 0.8 * run.epochs
    before = np.flatnonzero(is_early & (run.val_epoch >= 0.5 * run.epochs))
    if not before.size or is_early[-1]:
        return True
    top1s, losses = (values[[before[-1], -1]] for values in (run.top1, run.val_loss))
    rises = top1s[1] - top1s[0] > run.noise
    falls = losses[0] - losses[1] > FALLS * run.unit
    return bool(rises or falls)


def _more_epochs(run: Record) -> str:
    """Return what lowers a training loss that ends high, by its course at the end."""
    fall = _fall(run)
    if _still_improves(run):
        return (
            f"train for more epochs: the training loss still fell by {fall:.2g} in the last "
            "quarter; or in smaller batches"
        )
    level = "; the curves do not show that more epochs would help" if math.isfinite(fall) else ""
    return f"find the rate of this batch (`largebatch lab range`), or use a smaller one{level}"


def _underfit(it: Judged) -> Numbers | None:
    run = it.run
    if (run.run and not run.run.finished) or not _is_underfit(run):
        return None
    smoothing = f", {run.floor:.3g} of it from label smoothing" if run.floor else ""
    after = "" if run.updates is None else f" after {plural(run.updates, 'update')}"
    change = _more_epochs(run)
    return {
        "end": run.end, "smoothing": smoothing, "guess": _guess(run), "after": after,
        "change": change,
    }  # fmt: skip


def _noise_scale(it: Judged) -> Numbers | None:
    run = it.run.run
    if run is None or not has_course(run):
        return None
    part = latest(run)
    found, batch = part.found, run.plan.batch_at(part.last)
    if not (found.value > 0 and found.high < batch):
        return None
    return {
        "value": three_digits(found.value), "high": three_digits(found.high), "batch": batch,
        "more": batch / found.value,
    }  # fmt: skip


def _waits(it: Judged) -> Numbers | None:
    run = it.run.run
    if run is None or len(run.timed) < FEWEST_TIMED:
        return None
    data, _ = shares(run)
    return {"percent": 100 * data} if data >= INPUT_BOUND else None


# Conditions on two runs.


def _ends_worse(it: Judged) -> Numbers | None:
    run, small = it.run, it.small
    if small is None or not (run.loss.size and small.loss.size):
        return None
    has_top1 = bool(run.top1.size and small.top1.size)
    if has_top1 and np.isfinite([run.top1[-1], small.top1[-1]]).all():
        is_worse = small.top1[-1] - run.top1[-1] > math.hypot(run.noise, small.noise)
    else:
        is_worse = run.end > small.end + EQUAL * run.unit
    if not is_worse:
        return None
    ends = f"the training loss ends at {run.end:.3g} against {small.end:.3g}"
    if has_top1:
        ends = f"top-1 ends at {percent(run.top1[-1])} % against {percent(small.top1[-1])} %"
    return {"end": run.end, "small_end": small.end, "ends": ends}


def _equal_loss(it: Judged) -> Numbers | None:
    found = _ends_worse(it)
    return found if found and found["end"] <= found["small_end"] + EQUAL * it.run.unit else None


def _fewer_updates(it: Judged) -> Numbers | None:
    """Return the loss after as many updates of the small run, and how to reach its end.

    If the loss was as high there, an update does as much as one of the small run, and more of them
    are needed; else an update does less, by its rate.
    """
    run, small, found = it.run, it.small, _ends_worse(it)
    if not (found and small and run.updates and small.updates and run.updates < small.updates):
        return None
    row = int(np.searchsorted(small.step - small.first_step, run.updates)) - 1
    then = float(small.trend[max(0, row)])
    factor = epochs_factor(run, small)
    if run.end > then + EQUAL * run.unit:
        change = f"an update does less than one of the small run: {_more_epochs(run)}"
    elif factor:
        change = f"train for {factor:.2g} times the epochs, by the epoch law, or in smaller batches"
    else:
        change = "train in smaller batches"
    updates = {"updates": run.updates, "small_updates": small.updates, "then": then}
    return {**found, **updates, "change": change}


def _higher_loss(it: Judged) -> Numbers | None:
    small, found, rates = it.small, _ends_worse(it), ""
    if found and small and math.isfinite(it.run.peak + small.peak):
        rates = f" (peak learning rates {it.run.peak:.3g} and {small.peak:.3g})"
    return found and {**found, "rates": rates, "change": _more_epochs(it.run)}


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
    made = float(small.step[reached[0]] - small.first_step) + 1
    factor = small.updates / max(made, run.updates)
    return factor if factor > 1 else None


_LOWER_BY = (
    "lower schedule.peak_lr or lengthen schedule.warmup; `largebatch lab range` finds the edge, "
    "and half of a rate is often not enough"
)
_LOWER = "lower schedule.peak_lr; `largebatch lab range` finds the edge"
_EXACT = "measure exact statistics before an evaluation: polish.statistics, or `largebatch polish`"
_REGULARISE = (
    "more augmentation or label smoothing, more weight decay, or fewer epochs; `largebatch polish` "
    "shows whether BatchNorm's statistics are part of it"
)
_DIVERGED = frozenset({"diverged"})
_EXPLAINED = frozenset({"diverged", "statistics off", "few images", "class lost", "pair"})
_PAIR = frozenset(
    {"diverged", "rate beyond the edge", "spiked in warm-up", "statistics off", "class lost"}
)
_OTHER = _PAIR | {"pair"}

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule(kind="diverged", holds=_lost, link="loss", text="{words}", remedy=_LOWER_BY),
    Rule(kind="diverged", holds=_stayed_up, link="loss", unless=_DIVERGED, remedy=_LOWER_BY,
         text="the training loss rose from {low:.3g}{begin} to {high:.3g} {place} and ended at "
         "{end:.3g}"),
    Rule(kind="rate beyond the edge", holds=lambda it: _spike(it.run, slice(it.run.early, None)),
         link="loss", unless=_DIVERGED, remedy=_LOWER,
         text="after the warm-up the training loss rose from {low:.3g} to {high:.3g} {place}"),
    Rule(kind="spiked in warm-up", holds=lambda it: _spike(it.run, slice(0, it.run.early)),
         link="loss", unless=_DIVERGED,
         remedy="lengthen schedule.warmup, then lower schedule.peak_lr",
         text="the training loss rose from {low:.3g} to {high:.3g} {place}"),
    Rule(kind="statistics off", holds=_gained, link="drift", unless=_DIVERGED, harms=False,
         remedy="keep polish.statistics: it corrected this; evaluations before it judge the "
         "averages",
         text="top-1 was {before} % with BatchNorm's running statistics and is {after} % with "
         "exact ones{most}"),
    Rule(kind="statistics off", holds=_wild, link="loss", unless=_DIVERGED, remedy=_EXACT,
         text="the {words}"),
    Rule(kind="few images", holds=_few_images, link="accuracy", unless=_DIVERGED,
         remedy="begin with weights that were trained on more images (`largebatch init FOLDER` "
         "takes ImageNet's where it can get them; else model.weights), or add images; other rates "
         "and longer training change little",
         text="{samples:,} training images in {classes:,} classes, {images:.0f} of a class, and "
         "random weights: top-1 is {top1} %"),
    Rule(kind="class lost", holds=_class_lost, unless=_DIVERGED | {"few images"},
         remedy="look at its training images: their number and labels (`largebatch data show`), "
         "and the order of the classes",
         text="class {name} has only {correct:,} of {size:,} images right; {weak:,} of {classes:,} "
         "classes have less than a third of this top-1"),
    Rule(kind="generalisation gap", holds=_equal_loss, link="accuracy", unless=_PAIR, group="pair",
         remedy="more augmentation or label smoothing, a longer warm-up, or exact statistics "
         "(polish); compare weight decay and rate with the small run",
         text="the training losses end alike, at {end:.3g} and {small_end:.3g} in small batches, "
         "and {ends}"),
    Rule(kind="fewer updates", holds=_fewer_updates, link="loss", unless=_OTHER, group="pair",
         remedy="{change}",
         text="{updates:,} updates against {small_updates:,}: the training loss ends at "
         "{end:.3g}, and in small batches was {then:.3g} after as many updates and "
         "{small_end:.3g} at the end; {ends}"),
    Rule(kind="underfit", holds=_higher_loss, link="loss", unless=_OTHER, group="pair",
         remedy="{change}",
         text="the training loss ends at {end:.3g} against {small_end:.3g}{rates}; {ends}"),
    Rule(kind="generalisation gap", holds=_validation_rose, link="loss", unless=_EXPLAINED,
         remedy=_REGULARISE,
         text="the validation loss rose from {low:.3g} {place} to {high:.3g}, and the training "
         "loss fell to {end:.3g}"),
    Rule(kind="generalisation gap", holds=_gap, link="loss", unless=_EXPLAINED,
         remedy=_REGULARISE,
         text="the validation loss ends at {end:.3g}, the training loss at {training:.3g} "
         "{guess}"),
    Rule(kind="noise scale below the batch", holds=_noise_scale, link="noise", harms=False,
         remedy="use a smaller batch.global_batch: a larger one saves few updates",
         text="the noise scale is {value} at the end (95 %: up to {high}), below the batch of "
         "{batch:,}, which needs {more:.0%} more steps than linear scaling"),
    Rule(kind="underfit", holds=_underfit, link="loss",
         unless=frozenset({"diverged", "rate beyond the edge", "few images", "pair"}),
         remedy="{change}",
         text="the final training loss is {end:.3g}{smoothing} {guess}{after}"),
    Rule(kind="input bound", holds=_waits, link="throughput", harms=False,
         remedy="execution.cache and execution.decoder, or more cores for each worker",
         text="updates spent {percent:.0f} % of the time waiting for images"),
)
"""What is checked, the likeliest first; what an earlier harmful finding explains is left out."""
# fmt: on


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

"""The judgement of a run: one table of rules for its verdict, its likely causes and its repair.

A run is compared with itself, with guessing (a loss of ln K for K classes) and, if there is one,
with a run of the same data in smaller batches. A cause that explains others is checked before them:
a run that diverged is not judged by its statistics, and with wrong statistics whole classes are
wrong. Each threshold has its reason below.
"""

import math
import textwrap
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from largebatch.errors import LargebatchError, printable
from largebatch.formatting import percent, plural, three_digits
from largebatch.recipe.data import Data
from largebatch.recipe.installed import FEWEST_UPDATES
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import WIDTH, dump_commented, recipe_name
from largebatch.report.mistakes import by_class, compare
from largebatch.report.noise import has_course, latest, samples
from largebatch.report.record import RISE, RISEN, Record, Rise, record_of
from largebatch.report.run import INPUT_BOUND, FloatArray, Run, median, shares
from largebatch.rules import Finding, Numbers, Rule, find

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
"""The causes, the most likely first if several are found."""

WILD_LOSS = 10
"""Multiple of the loss of guessing from which a validation loss is suspicious.

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
"""Fraction of the validation images that weak classes must hold together, because of many classes
a few are always hard."""

SURE = 3
"""Standard errors by which a weak class is below the rest: more than the two of one comparison,
because it is the lowest of many."""

GAP = 0.25
"""Difference of validation and training loss that is a gap, as a part of the loss of guessing."""

GAINED = 0.01
"""Least gain of top-1 by exact statistics that is reported, beyond its noise."""

LARGE = 1_000_000
"""Number of training images from which updates are compared with ImageNet's."""

FEWEST_TIMED = 20
"""Fewest updates whose waits are judged: the first ones fill queues."""

EQUAL = 0.05
"""Difference of two training losses that counts as none, as a part of the loss of guessing: about
twice the spread over seeds in short runs."""

WARMUP_SHARE = 1 / 8
"""Share of the run of a warm-up if there was none, at most WARMUP_EPOCHS."""

WARMUP_EPOCHS = 5.0
"""Epochs of the gradual warm-up of Goyal et al. (arXiv:1706.02677, section 2.2)."""

LONGEST_WARMUP = 0.4
"""Largest share of the run that a lengthened warm-up may take; MLPerf's points have up to 0.28."""

CACHED_BYTES = 2**32
"""Largest size of decoded images that are cached without a question."""

Changes = dict[str, tuple[Any, str]]
"""New value and reason by dotted key."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A run to judge, and one of the same data in smaller batches."""

    run: Record
    small: Record | None = None


Cause = Finding[Judged]


def find_causes(run: Record, small: Record | None = None) -> list[Cause]:
    """Return the likely causes; `small` is a run of the same data in smaller batches."""
    kinds = get_args(Kind)
    return sorted(find(RULES, Judged(run, small)), key=lambda cause: kinds.index(cause.kind))


# Where and by how much: parts of the texts.


def _guess(run: Record) -> str:
    return f"(equal probabilities for all {run.classes:,} classes give {run.chance:.3g})"


def _place(run: Record, row: int) -> str:
    rate = f" (learning rate {run.lr[row]:.3g})" if math.isfinite(run.lr[row]) else ""
    if math.isfinite(run.step[row]):
        return f"at step {run.step[row] - 1 + run.first_step:,.0f}{rate}"
    if math.isfinite(run.epoch[row]):
        return f"{_epoch(run, run.epoch[row])}{rate}"
    return f"in row {row + 1:,}{rate}"


def _begin(run: Record) -> str:
    begin = run.onset()
    return "" if begin is None else f" {_place(run, begin)}"


def _epoch(run: Record, epochs: float) -> str:
    if not math.isfinite(epochs):
        return "in one evaluation"
    return f"at epoch {epochs - 1 + run.first_epoch:.3g}"


# Conditions: each returns the numbers of its text, or None.


def _is_spike(run: Record, rise: Rise | None) -> bool:
    return (
        rise is not None
        and rise.high - rise.low > RISE * run.unit
        and rise.high > RISEN * rise.low
        and rise.exceeds_noise
    )


def _lower_by(run: Record) -> str:
    if run.run is None:
        return "lower the peak learning rate, by more than half if it helps, or warm up longer"
    return (
        "lower schedule.peak_lr or lengthen schedule.warmup; `largebatch lab range` finds the "
        "edge, and half of a rate is often not enough"
    )


def _failed(run: Record) -> bool:
    return run.run is not None and run.run.diverged


def _loss_lost(it: Judged) -> Numbers | None:
    run, lost = it.run, np.flatnonzero(~np.isfinite(it.run.loss))
    if not lost.size or not (_failed(run) or not math.isfinite(run.loss[-1])):
        return None
    row, begin, rose = int(lost[0]), run.onset(), ""
    if begin is not None and begin < row:
        rose = f"rose from {run.lows[begin]:.3g}{_begin(run)} and "
    filtered = "; its log has numbers in place of NaN from there on" if run.is_filtered else ""
    return {"rose": rose, "place": _place(run, row) + filtered, "lower": _lower_by(run)}


def _ended(it: Judged) -> Numbers | None:
    return {"lower": _lower_by(it.run)} if _failed(it.run) else None


def _stayed_up(it: Judged) -> Numbers | None:
    run, peak = it.run, it.run.rise(slice(0, None))
    if not peak or not _is_spike(run, peak) or run.end <= RECOVERED * run.unit:
        return None
    return {
        "low": peak.low, "begin": _begin(run), "high": peak.high, "place": _place(run, peak.row),
        "end": run.end, "lower": _lower_by(run),
    }  # fmt: skip


def _above_edge(it: Judged) -> Numbers | None:
    edge = it.run.edge
    return {"peak": it.run.peak, "edge": edge} if edge is not None and it.run.peak > edge else None


def _spike(run: Record, rows: slice) -> Numbers | None:
    rise = run.rise(rows)
    if not rise or not _is_spike(run, rise):
        return None
    return {"low": rise.low, "high": rise.high, "place": _place(run, rise.row)}


def _gained(it: Judged) -> Numbers | None:
    run = it.run.run
    stage = (
        next((s for s in run.stages if s.name == "statistics" and s.kept), None) if run else None
    )
    if run is None or stage is None or stage.before is None:
        return None
    before, after, most = stage.before.top1, stage.after.top1, ""
    noise = 2 * math.sqrt(max(before * (1 - before), 1e-9) / stage.after.samples)
    if after - before <= max(noise, GAINED):
        return None
    if run.drift is not None and run.drift.layers:
        layer = max(run.drift.layers, key=lambda one: one.log_variance_ratio)
        factor = math.exp(layer.log_variance_ratio)
        most = f"; the variance of {layer.name} was off by a factor of {factor:.3g}"
    return {"before": percent(before), "after": percent(after), "most": most}


def _validation_lost(it: Judged) -> Numbers | None:
    lost = np.flatnonzero(np.isinf(it.run.val_loss))
    return {"place": _epoch(it.run, it.run.val_epoch[lost[0]])} if lost.size else None


def _wild(it: Judged, *, normalised: bool) -> Numbers | None:
    """Return the highest validation loss, or the last one, that is worse than guessing."""
    run = it.run
    if run.normalised != normalised or not run.classes or not np.isfinite(run.val_loss).any():
        return None
    row = int(np.nanargmax(np.where(np.isfinite(run.val_loss), run.val_loss, -math.inf)))
    highest, end = float(run.val_loss[row]), float(run.val_loss[-1])
    if highest > WILD_LOSS * run.chance:
        place = _epoch(run, run.val_epoch[row])
        return {"loss": f"validation loss was {highest:.3g} {place}", "guess": _guess(run)}
    if end > run.chance and not _rose(run) and not _is_underfit(run):
        return {"loss": f"final validation loss is {end:.3g}", "guess": _guess(run)}
    return None


def _never_fits(it: Judged) -> Numbers | None:
    """Return the losses if a model fits its training data, and validation data at no evaluation."""
    run = it.run
    if not run.normalised or not run.classes or not np.isfinite(run.val_loss).any() or _rose(run):
        return None
    limit, lowest = FIT * run.chance, float(np.nanmin(run.val_loss))
    if not (run.end - run.floor < limit / 2 and lowest > limit):
        return None
    return {"lowest": lowest, "end": run.end, "guess": _guess(run)}


def _weak_classes(it: Judged, *, lost: bool) -> Numbers | None:
    run = it.run.run
    found = run.final_mistakes if run else None
    if found is None or _is_underfit(it.run):
        return None
    classes, total = by_class(found), sum(found.sizes)
    top1 = 1 - len(found.samples) / total
    weak = [
        one
        for one in classes
        if one.correct < WEAK_CLASS * top1 * one.size
        and one.correct < top1 * one.size - SURE * math.sqrt(one.size * top1 * (1 - top1))
    ]
    if sum(one.size for one in weak) < WEAK_IMAGES * total:
        return None
    lowest, *others = weak
    if (lowest.correct * len(classes) <= lowest.size) != lost:
        return None
    share = f"{lowest.correct:,} of {lowest.size:,} images right"
    words = f"class {lowest.name} has only {share}"
    if others:
        words = (
            f"{len(weak)} of {len(classes):,} classes have less than a third of this top-1, the "
            f"lowest {lowest.name} with {share}"
        )
    return {"words": words, "weak": len(weak), "correct": lowest.correct, "size": lowest.size}


def _rose(run: Record) -> bool:
    """Return True if the validation loss rose from its lowest while the training loss fell."""
    if len(run.val_loss) < 3 or not np.isfinite(run.val_loss).all():
        return False
    row = int(np.argmin(run.val_loss))
    low, end = float(run.val_loss[row]), float(run.val_loss[-1])
    rose = end > RISEN * low and end - low > RISE / 2 * run.unit
    return rose and not run.end >= run.training_at(float(run.val_epoch[row]))


def _regularise(run: Record) -> str:
    more = "; `largebatch polish` shows whether BatchNorm's statistics are part of it"
    return (
        "more augmentation or label smoothing, more weight decay, or fewer epochs"
        f"{more if run.normalised else ''}"
    )


def _validation_rose(it: Judged) -> Numbers | None:
    run = it.run
    if not _rose(run):
        return None
    row = int(np.argmin(run.val_loss))
    return {
        "low": run.val_loss[row], "place": _epoch(run, run.val_epoch[row]),
        "high": run.val_loss[-1], "end": run.end, "regularise": _regularise(run),
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
    return {"end": end, "training": training, "guess": _guess(run), "regularise": _regularise(run)}


def _is_underfit(run: Record) -> bool:
    return run.end - run.floor > FIT * run.chance


def _underfit(it: Judged, *, few: bool) -> Numbers | None:
    run = it.run
    if not run.is_complete or not _is_underfit(run):
        return None
    if (run.updates is not None and run.updates < FEWEST_UPDATES) != few:
        return None
    smoothing = f", {run.floor:.3g} of it from label smoothing" if run.floor else ""
    published = ""
    if few and (run.recipe is None or run.recipe.train_samples >= LARGE):
        published = f"; the fewest published for ImageNet are {FEWEST_UPDATES:,}"
    return {
        "end": run.end, "smoothing": smoothing, "guess": _guess(run),
        "updates": plural(run.updates or 0, "update"), "published": published,
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
        "value": samples(found.value), "high": samples(found.high), "batch": batch,
        "more": batch / found.value,
    }  # fmt: skip


def _waits(it: Judged) -> Numbers | None:
    run = it.run.run
    if run is None or len(run.timed) < FEWEST_TIMED:
        return None
    data = shares(run).data
    return {"percent": 100 * data} if data >= INPUT_BOUND else None


# Conditions on two runs.


def _ends_worse(it: Judged) -> Numbers | None:
    run, small = it.run, it.small
    if small is None or not (run.loss.size and small.loss.size):
        return None
    has_top1 = bool(run.top1.size and small.top1.size)
    if has_top1 and np.isfinite([run.top1[-1], small.top1[-1]]).all():
        is_worse = small.top1[-1] - run.top1[-1] > math.hypot(run.noise(), small.noise())
    else:
        is_worse = run.end > small.end + EQUAL * run.unit
    if not is_worse:
        return None
    ends = f"the training loss ends at {run.end:.3g} against {small.end:.3g}"
    if has_top1:
        ends = f"top-1 ends at {percent(run.top1[-1])} % against {percent(small.top1[-1])} %"
    return {"end": run.end, "small_end": small.end, "ends": ends}


def _loss_is_equal(it: Judged) -> bool:
    return it.small is not None and it.run.end <= it.small.end + EQUAL * it.run.unit


def _has_fewer_updates(it: Judged) -> bool:
    updates = it.run.updates, it.small.updates if it.small else None
    return bool(updates[0] and updates[1] and updates[0] < updates[1])


def _equal_loss(it: Judged) -> Numbers | None:
    return _ends_worse(it) if _loss_is_equal(it) else None


def _fewer_updates(it: Judged, *, same_progress: bool) -> Numbers | None:
    """Return the loss after as many updates of the small run, and how many more epochs to train.

    `same_progress`: the loss was as high there, so that an update does as much as one of it.
    """
    run, small, found = it.run, it.small, _ends_worse(it)
    if found is None or _loss_is_equal(it) or not _has_fewer_updates(it):
        return None
    assert small is not None
    assert run.updates
    then = loss_after(small, run.updates)
    if (run.end <= then + EQUAL * run.unit) != same_progress:
        return None
    factor = epochs_factor(run, small)
    more = f"{factor:.2g} times the epochs, by the epoch law" if factor else "more epochs"
    updates = {"updates": run.updates, "small_updates": small.updates, "then": then, "more": more}
    return {**found, **updates}


def _higher_loss(it: Judged) -> Numbers | None:
    run, small, found = it.run, it.small, _ends_worse(it)
    if found is None or _loss_is_equal(it) or _has_fewer_updates(it):
        return None
    assert small is not None
    same = "after as many updates " if run.updates and run.updates == small.updates else ""
    rates = ""
    if math.isfinite(run.peak + small.peak):
        rates = f" (peak learning rates {run.peak:.3g} and {small.peak:.3g})"
    return {**found, "same": same, "rates": rates}


def loss_after(run: Record, updates: int) -> float:
    """Return the smoothed training loss after a number of updates."""
    row = int(np.searchsorted(run.step, updates, side="right")) - 1
    return float(run.trend[max(0, row)])


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
    factor = small.updates / max(float(small.step[reached[0]]), run.updates)
    return factor if factor > 1 else None


# Changes of the recipe.


def _lower(it: Judged, recipe: Recipe, rows: slice) -> Changes:
    run, was = it.run, f"was {recipe.schedule.peak_lr:g}"
    if run.edge is not None and run.edge < recipe.schedule.peak_lr:
        return {"schedule.peak_lr": (run.edge, f"{was}; the range test's upper bound")}
    row, lost = run.onset(rows), np.flatnonzero(~np.isfinite(run.loss))
    if row is None and lost.size:  # without a rise before
        row = int(lost[0])
    if row is None or not run.lr[row] > 0 or recipe.schedule.decay.kind == "piecewise":
        return {}
    rate = float(np.nanmax(run.lr[: row + 1]))
    value = float(f"{min(rate, recipe.schedule.peak_lr) / 2:.2g}")
    return {"schedule.peak_lr": (value, f"{was}; half of the rate at which the loss rose")}


def _warm_up(it: Judged, recipe: Recipe) -> Changes:
    run, warmup = it.run, recipe.schedule.warmup
    planned = run.run.plan.steps if run.run else run.updates or 0
    if warmup is None:
        epochs = min(WARMUP_EPOCHS, WARMUP_SHARE * run.run.plan.epoch(planned) if run.run else 0)
        reason = "there was none; Goyal et al. have 5 epochs, at most an eighth of the run"
        return {"schedule.warmup": ({"epochs": round(epochs, 2)}, reason)} if epochs else {}
    longer = 2 * (run.warmup or 0)
    if not 0 < longer <= LONGEST_WARMUP * planned:
        return {}
    return {"schedule.warmup": ({"steps": longer}, f"was {run.warmup:,} updates, in which it rose")}


def _lower_and_warm_up(it: Judged, recipe: Recipe) -> Changes:
    return _lower(it, recipe, slice(0, None)) | _warm_up(it, recipe)


def _lower_late(it: Judged, recipe: Recipe) -> Changes:
    return _lower(it, recipe, slice(it.run.early, None))


def _warm_up_or_lower(it: Judged, recipe: Recipe) -> Changes:
    return _warm_up(it, recipe) or _lower(it, recipe, slice(0, it.run.early))


def _measure_statistics(_: Judged, recipe: Recipe) -> Changes:
    if recipe.batch.bn_span is None or (recipe.polish and recipe.polish.statistics):
        return {}
    samples = min(50_000, recipe.train_samples)
    return {"polish.statistics": ({"samples": samples}, "running averages were off; exact moments")}


def _train_longer(it: Judged, recipe: Recipe) -> Changes:
    factor = epochs_factor(it.run, it.small) if it.small else None
    if factor is None:
        return {}
    reason = f"{three_digits(factor)} times as long: the ratio of epochs to the same training loss"
    if recipe.duration.epochs is not None:
        return {"duration": ({"epochs": math.ceil(factor * recipe.duration.epochs)}, reason)}
    return {"duration": ({"steps": math.ceil(factor * (recipe.duration.steps or 1))}, reason)}


def _cache(_: Judged, recipe: Recipe) -> Changes:
    data = recipe.data
    if not isinstance(data, Data) or recipe.execution.cache is not None:
        return {}
    size = data.train_samples * data.image_size**2 * 3
    if size > CACHED_BYTES:
        return {}
    reason = f"updates waited for images; decoded ones take about {size / 1e6:,.0f} MB"
    return {"execution.cache": ("memory", reason)}


_LOWER = "lower schedule.peak_lr; `largebatch lab range` finds the edge"
_EXACT = "measure exact statistics before an evaluation: polish.statistics, or `largebatch polish`"
_IMAGES = (
    "look at its training images: their number and labels (`largebatch data show`), and the order "
    "of the classes"
)
_TRAIN = (
    "train for more epochs or in smaller batches; if the loss hardly falls, the rate is wrong: "
    "`largebatch lab range`"
)
_SLOWER = (
    "{updates:,} updates against {small_updates:,}: the training loss ends at {end:.3g}, and in "
    "small batches was {then:.3g} after as many updates and {small_end:.3g} at the end; {ends}"
)

_DIVERGED = frozenset({"diverged"})
_EXPLAINED = frozenset({"diverged", "statistics off", "class lost", "pair"})
_PAIR = frozenset(
    {"diverged", "rate beyond the edge", "spiked in warm-up", "statistics off", "class lost"}
)
_UNDERFIT = frozenset({"diverged", "rate beyond the edge", "pair"})

# fmt: off
RULES: tuple[Rule[Judged], ...] = (
    Rule(kind="diverged", holds=_loss_lost, link="loss", repair=_lower_and_warm_up,
         text="the training loss {rose}was not finite {place}", remedy="{lower}"),
    Rule(kind="diverged", holds=_ended, link="loss", unless=_DIVERGED, repair=_lower_and_warm_up,
         text="a loss or gradient was not finite, which ended the run", remedy="{lower}"),
    Rule(kind="diverged", holds=_stayed_up, link="loss", unless=_DIVERGED,
         repair=_lower_and_warm_up, remedy="{lower}",
         text="the training loss rose from {low:.3g}{begin} to {high:.3g} {place} and ended at "
         "{end:.3g}"),
    Rule(kind="rate beyond the edge", holds=_above_edge, link="loss", unless=_DIVERGED,
         repair=_lower_late, remedy="lower schedule.peak_lr to at most {edge:.3g}",
         text="the peak rate, {peak:.3g}, is above the range test's upper bound, {edge:.3g}"),
    Rule(kind="rate beyond the edge", holds=lambda it: _spike(it.run, slice(it.run.early, None)),
         link="loss", unless=_DIVERGED, repair=_lower_late, remedy=_LOWER,
         text="after the warm-up the training loss rose from {low:.3g} to {high:.3g} {place}"),
    Rule(kind="spiked in warm-up", holds=lambda it: _spike(it.run, slice(0, it.run.early)),
         link="loss", unless=_DIVERGED, repair=_warm_up_or_lower,
         remedy="lengthen schedule.warmup, then lower schedule.peak_lr",
         text="the training loss rose from {low:.3g} to {high:.3g} {place}"),
    Rule(kind="statistics off", holds=_gained, link="drift", unless=_DIVERGED, harms=False,
         remedy="keep polish.statistics: it corrected this; evaluations before it judge the "
         "averages",
         text="top-1 was {before} % with BatchNorm's running statistics and is {after} % with "
         "exact ones{most}"),
    Rule(kind="statistics off", holds=_validation_lost, link="loss", unless=_DIVERGED,
         repair=_measure_statistics, remedy=_EXACT,
         text="the validation loss was not finite {place}"),
    Rule(kind="statistics off", holds=lambda it: _wild(it, normalised=True), link="loss",
         unless=_DIVERGED | {"statistics off"}, repair=_measure_statistics, remedy=_EXACT,
         text="the {loss} {guess}"),
    Rule(kind="rate beyond the edge", holds=lambda it: _wild(it, normalised=False), link="loss",
         unless=_DIVERGED | {"statistics off"}, repair=_lower_late, remedy=_LOWER,
         text="the {loss} {guess}"),
    Rule(kind="statistics off", holds=_never_fits, link="loss",
         unless=_DIVERGED | {"statistics off"}, repair=_measure_statistics, remedy=_EXACT,
         text="the validation loss is never below {lowest:.3g}, while the training loss ends at "
         "{end:.3g} {guess}"),
    Rule(kind="class lost", holds=lambda it: _weak_classes(it, lost=True), link="confusion",
         unless=_DIVERGED, remedy=_IMAGES, text="{words}"),
    Rule(kind="generalisation gap", holds=_equal_loss, link="accuracy", unless=_PAIR, group="pair",
         remedy="more augmentation or label smoothing, a longer warm-up, or exact statistics "
         "(polish); compare weight decay and rate with the small run",
         text="the training losses end alike, at {end:.3g} and {small_end:.3g} in small batches, "
         "and {ends}"),
    Rule(kind="fewer updates", holds=lambda it: _fewer_updates(it, same_progress=True),
         link="loss", unless=_PAIR, group="pair", repair=_train_longer,
         remedy="train for {more}, or in smaller batches", text=_SLOWER),
    Rule(kind="fewer updates", holds=lambda it: _fewer_updates(it, same_progress=False),
         link="loss", unless=_PAIR, group="pair", repair=_train_longer,
         remedy="an update does less than one of the small run: find the rate of this batch "
         "(`largebatch lab range`), then train for more epochs", text=_SLOWER),
    Rule(kind="underfit", holds=_higher_loss, link="loss", unless=_PAIR, group="pair",
         remedy="find the rate of this batch (`largebatch lab range`), then train for more epochs",
         text="{same}the training loss ends at {end:.3g} against {small_end:.3g}{rates}; {ends}"),
    Rule(kind="generalisation gap", holds=_validation_rose, link="loss", unless=_EXPLAINED,
         remedy="{regularise}",
         text="the validation loss rose from {low:.3g} {place} to {high:.3g}, and the training "
         "loss fell to {end:.3g}"),
    Rule(kind="generalisation gap", holds=_gap, link="loss", unless=_EXPLAINED,
         remedy="{regularise}",
         text="the validation loss ends at {end:.3g}, the training loss at {training:.3g} "
         "{guess}"),
    Rule(kind="noise scale below the batch", holds=_noise_scale, link="noise", harms=False,
         remedy="use a smaller batch.global_batch: a larger one saves few updates",
         text="the noise scale is {value} at the end (95 %: up to {high}), below the batch of "
         "{batch:,}, which needs {more:.0%} more steps than linear scaling"),
    Rule(kind="fewer updates", holds=lambda it: _underfit(it, few=True), link="loss",
         unless=_UNDERFIT, repair=_train_longer, remedy=_TRAIN,
         text="the final training loss is {end:.3g}{smoothing} {guess} after {updates}{published}"),
    Rule(kind="underfit", holds=lambda it: _underfit(it, few=False), link="loss",
         unless=_UNDERFIT, remedy=_TRAIN,
         text="the final training loss is {end:.3g}{smoothing} {guess}"),
    Rule(kind="weak classes", holds=lambda it: _weak_classes(it, lost=False), link="confusion",
         unless=_DIVERGED | {"pair"}, remedy=_IMAGES, text="{words}"),
    Rule(kind="input bound", holds=_waits, link="waits", harms=False, repair=_cache,
         remedy="execution.cache and execution.decoder, or more cores for each worker",
         text="updates spent {percent:.0f} % of the time waiting for images"),
)
"""What is checked, in this order; what an earlier harmful finding explains is not reported."""
# fmt: on


@dataclass(frozen=True, slots=True)
class Repair:
    """A repaired recipe."""

    text: str
    changes: Changes


def repair(run: Record, causes: list[Cause], small: Record | None = None) -> Repair:
    """Return the recipe with the keys changed for which the causes give a reason, and no others.

    Raises LargebatchError if there is no recipe, or no cause changes a key for a measured or
    published reason.
    """
    if run.recipe is None:
        raise LargebatchError(
            f"{run.name}: has no recipe that can be read; --out repairs the recipe of a run folder"
        )
    changes: Changes = {}
    for cause in causes:
        if cause.rule.repair is not None:
            found = cause.rule.repair(Judged(run, small), run.recipe)
            changes |= {key: change for key, change in found.items() if key not in changes}
    if not changes:
        raise LargebatchError(
            "no cause found changes a key of the recipe for a measured reason, so --out is not "
            "written"
        )
    name = f"{recipe_name(run.recipe.name, otherwise='run')[:91]}-repaired"
    tree = run.recipe.model_dump(mode="json", exclude_defaults=True)
    for key, (value, _) in changes.items():
        *sections, last = key.split(".")
        section = tree
        for each in sections:
            section[each] = section.get(each) or {}
            section = section[each]
        section[last] = value
    tree["name"] = name
    repaired = validate_tree(Recipe, tree, source=name)
    reasons = [f"Found: {cause.figure}." for cause in causes if cause.harms]
    header = [
        f"{name}: the recipe of {run.name}, repaired by `largebatch report diagnose`.",
        *(line for reason in reasons for line in textwrap.wrap(printable(reason), WIDTH - 2)),
        "Each change has its reason on its line. Measured: not yet.",
    ]
    comments = {key: reason for key, (_, reason) in changes.items()}
    return Repair(dump_commented(repaired, comments, header=header), changes)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Description of how a run went: the first sentences of its page."""

    words: str
    good: bool
    causes: tuple[Cause, ...] = ()
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
    record = record_of(run)
    causes = tuple(cause for cause in find_causes(record) if cause.harms)
    likely = f" Likely cause: {causes[0].figure}." if causes else ""
    end, sizes = last.after, last.mistakes.sizes if last.mistakes else ()
    one = max(sizes, default=0) / end.samples
    if end.top1 < one + 2 * math.sqrt(one * (1 - one) / end.samples):
        return Verdict(
            f"The run finished, but the final top-1 is {percent(end.top1)} %; always predicting "
            f"the most frequent class gives {percent(one)} %.{likely}",
            good=False,
            causes=causes,
        )
    best = max(run.kept_evaluations, key=lambda found: found.top1)
    of_best = next((stage.mistakes for stage in run.stages if stage.after == best), None)
    if compare(best, end, of_best, last.mistakes).beyond_noise:
        return Verdict(
            f"The run finished, but the final top-1, {percent(end.top1)} %, is below the "
            f"{percent(best.top1)} % after {best.step:,} steps ({best.stage}).{likely}",
            good=False,
            causes=causes,
        )
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
    losses: FloatArray = np.array([step.loss for step in run.steps])
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
    if not run.evaluations:
        return words + " Accuracy was not measured."
    return words + " The figures are from that point."


def order(one: Record, other: Record) -> tuple[Record, Record]:
    """Return the run to judge and the one in smaller batches to compare it with.

    If batches are equal or not known, the run with fewer updates, then the first. Raises
    LargebatchError if the runs are known to have other data.
    """
    _require_same_data(one, other)
    sizes = [(run.batch or 0, -(run.updates or 0)) for run in (one, other)]
    place = 0 if one.batch and other.batch else 1
    if place and not (one.updates and other.updates):
        return one, other
    smaller = sizes[0][place] < sizes[1][place] if sizes[0][place] != sizes[1][place] else False
    return (other, one) if smaller else (one, other)


def _require_same_data(one: Record, other: Record) -> None:
    found = [
        f"{record.classes:,} classes" if record.classes else "unknown classes"
        for record in (one, other)
    ]
    differ = bool(one.classes and other.classes and one.classes != other.classes)
    if one.run and other.run and not differ:
        from largebatch.report.comparison import Compared

        data = [Compared(record.run, record.name).data(named=True) for record in (one, other)]  # type: ignore[arg-type]
        differ = len(data[0]) == len(data[1]) and data[0] != data[1]
        found = [words[0] for words in data]
    if differ:
        raise LargebatchError(
            f"{one.name} and {other.name} have other data ({found[0]}; {found[1]}); diagnose "
            "compares two runs of the same data: give one of them alone"
        )

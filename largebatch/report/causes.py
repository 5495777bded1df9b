"""The likely causes of a bad run, in tables of rules.

A run is compared with itself, with guessing (a loss of ln K for K classes) and, if there is one,
with a run of the same data in smaller batches. A fault is a cause of a worse result; a note costs
time, or was corrected. What explains a rule is in `unless`: a run that diverged is not judged by
its statistics, and with wrong statistics whole classes are wrong. Each threshold has its reason.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from largebatch.formatting import percent, plural, three_digits
from largebatch.report.run import INPUT_BOUND
from largebatch.rules import Rule

WILD_LOSS = 10
"""Multiple of the loss of guessing from which a validation loss is suspicious.

A few times that loss is usual in the first epochs of large batches, because the running averages of
BatchNorm lag behind the weights; ten times is not.
"""

RECOVERED = 0.9  # part of the loss of guessing below which a run has learned something since

FIT = 0.5
"""Share of the loss of guessing below which the training loss of a good run ends: above what label
smoothing alone leaves; random crops leave more."""

WEAK_IMAGES = 0.05
"""Fraction of the validation images that weak classes must hold together, because of many classes
a few are always hard."""

FEW_IMAGES = 250
"""Training images of a class up to which weights from other images are worth more than any setting;
`init` recommends them up to this number."""

PHOTOGRAPH = 64  # least side in pixels of images that weights trained on photographs suit
GOOD = 0.9  # top-1 from which a run with few images lacks nothing
GAP = 0.25  # difference of validation and training loss that is a gap, in losses of guessing
GAINED = 0.01  # least gain of top-1 by exact statistics that is reported, beyond its noise

EQUAL = 0.05
"""Difference of two training losses that counts as none, as a part of the loss of guessing: about
twice the spread over seeds in short runs."""


class Guess(NamedTuple):
    """Equal probabilities for all classes."""

    classes: int
    loss: float
    """NaN if the number of classes is not known."""

    def __str__(self) -> str:
        return f"(equal probabilities for all {self.classes:,} classes give {self.loss:.3g})"


class Place(NamedTuple):
    """Row of the record of a run; what it does not have is NaN."""

    step: float
    epoch: float
    row: int
    rate: float

    def __str__(self) -> str:
        if math.isfinite(self.step):
            place = f"at step {self.step:,.0f}"
        elif math.isfinite(self.epoch):
            place = f"at epoch {self.epoch:.3g}"
        else:
            place = f"in row {self.row + 1:,}"
        return place + (f" (learning rate {self.rate:.3g})" if math.isfinite(self.rate) else "")


class EvaluationEpoch(NamedTuple):
    """Epoch of an evaluation; NaN if it is not known."""

    number: float

    def __str__(self) -> str:
        known = math.isfinite(self.number)
        return f"at epoch {self.number:.3g}" if known else "in one evaluation"


class LossProgress(NamedTuple):
    """Course of the training loss at the end of a run."""

    fall: float
    """How far it fell over the last quarter; NaN for few rows."""

    improves: bool
    """True if the curves show that more epochs would help."""


def _more_epochs(progress: LossProgress) -> str:
    if progress.improves:
        return (
            f"train for more epochs: the training loss still fell by {progress.fall:.2g} in the "
            "last quarter; or in smaller batches"
        )
    is_level = math.isfinite(progress.fall)
    level = "; the curves do not show that more epochs would help" * is_level
    return f"find the rate of this batch (`largebatch lab range`), or use a smaller one{level}"


_DIVERGED = frozenset({"diverged"})

# The training loss was not finite, or rose.

_LOWER_BY = (
    "lower schedule.peak_lr or lengthen schedule.warmup; `largebatch lab range` finds the edge, "
    "and half of a rate is often not enough"
)


class Lost(NamedTuple):
    """A training loss that was not finite at the end."""

    place: Place | None
    """First row in which it was not; None if only a gradient was not finite."""

    low: float
    onset: Place | None
    """Row before that in which the loss had risen from `low`; None if it had not."""


LOST: tuple[Rule[Lost], ...] = (
    Rule(
        check="diverged",
        level="fault",
        when=lambda e: e.place is None,
        text="a loss or gradient was not finite, which ended the run",
        remedy=_LOWER_BY,
        chart="loss",
    ),
    Rule(
        check="diverged",
        level="fault",
        when=lambda e: e.onset is not None,
        text=lambda e: (
            f"the training loss rose from {e.low:.3g} {e.onset} and was not finite {e.place}"
        ),
        remedy=_LOWER_BY,
        chart="loss",
    ),
    Rule(
        check="diverged",
        level="fault",
        text=lambda e: f"the training loss was not finite {e.place}",
        remedy=_LOWER_BY,
        chart="loss",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """The largest rise of the smoothed training loss in some rows, which is beyond its noise."""

    low: float
    high: float
    place: Place
    """Where it was highest."""

    onset: Place | None
    """Where the loss of the whole run had first risen."""

    end: float
    """Training loss at the end."""

    unit: float
    """Loss of guessing; the first training loss where the classes are not known."""


STAYED_UP: tuple[Rule[Rise], ...] = (
    Rule(
        check="diverged",
        level="fault",
        when=lambda e: e.end > RECOVERED * e.unit,
        text=lambda e: (
            f"the training loss rose from {e.low:.3g}{_after_space(e.onset)} to {e.high:.3g} "
            f"{e.place} and ended at {e.end:.3g}"
        ),
        remedy=_LOWER_BY,
        chart="loss",
        unless=_DIVERGED,
    ),
)
"""Rules on the largest rise of the whole run."""

AFTER_WARM_UP: tuple[Rule[Rise], ...] = (
    Rule(
        check="rate beyond the edge",
        level="fault",
        text=lambda e: (
            f"after the warm-up the training loss rose from {e.low:.3g} to {e.high:.3g} {e.place}"
        ),
        remedy="lower schedule.peak_lr; `largebatch lab range` finds the edge",
        chart="loss",
        unless=_DIVERGED,
    ),
)

IN_WARM_UP: tuple[Rule[Rise], ...] = (
    Rule(
        check="spiked in warm-up",
        level="fault",
        text=lambda e: f"the training loss rose from {e.low:.3g} to {e.high:.3g} {e.place}",
        remedy="lengthen schedule.warmup, then lower schedule.peak_lr",
        chart="loss",
        unless=_DIVERGED,
    ),
)


def _after_space(place: Place | None) -> str:
    return "" if place is None else f" {place}"


# BatchNorm's statistics.


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """Top-1 with running statistics, and with exact ones."""

    before: float
    after: float
    samples: int
    layer: str
    """The layer whose variance was off most; empty if that was not recorded."""

    factor: float
    """Factor by which it was off."""

    @property
    def noise(self) -> float:
        """Two standard errors of top-1."""
        return 2 * math.sqrt(max(self.before * (1 - self.before), 1e-9) / self.samples)


def _corrected_text(e: Corrected) -> str:
    text = f"top-1 was {percent(e.before)} % with BatchNorm's running statistics and is "
    text += f"{percent(e.after)} % with exact ones"
    if e.layer:
        text += f"; the variance of {e.layer} was off by a factor of {e.factor:.3g}"
    return text


CORRECTED: tuple[Rule[Corrected], ...] = (
    Rule(
        check="statistics off",
        level="note",
        when=lambda e: e.after - e.before > max(e.noise, GAINED),
        text=_corrected_text,
        remedy="keep polish.statistics: it corrected this; evaluations before it judge the "
        "averages",
        chart="drift",
        unless=_DIVERGED,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationLosses:
    """Validation losses of a model with BatchNorm beside that of guessing."""

    infinite: EvaluationEpoch | None
    """The first that was not finite; None if all are."""

    highest: float
    highest_at: EvaluationEpoch
    end: float
    guess: Guess
    is_explained: bool
    """True if the last one was measured with exact statistics, or comes from overfitting or
    underfitting."""


_EXACT = "measure exact statistics before an evaluation: polish.statistics, or `largebatch polish`"

VALIDATION_LOSSES: tuple[Rule[ValidationLosses], ...] = (
    Rule(
        check="statistics off",
        level="fault",
        when=lambda e: e.infinite is not None,
        text=lambda e: f"the validation loss was not finite {e.infinite}",
        remedy=_EXACT,
        chart="loss",
        unless=_DIVERGED,
    ),
    Rule(
        check="statistics off",
        level="fault",
        when=lambda e: e.highest > WILD_LOSS * e.guess.loss,
        text=lambda e: f"the validation loss was {e.highest:.3g} {e.highest_at} {e.guess}",
        remedy=_EXACT,
        chart="loss",
        unless=_DIVERGED,
    ),
    Rule(
        check="statistics off",
        level="fault",
        when=lambda e: e.end > e.guess.loss and not e.is_explained,
        text=lambda e: f"the final validation loss is {e.end:.3g} {e.guess}",
        remedy=_EXACT,
        chart="loss",
        unless=_DIVERGED,
    ),
)

# The data.


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderImages:
    """Training images of a folder, from which a network with random weights was trained."""

    samples: int
    classes: int
    image_size: int
    top1: float
    """NaN if the run did not finish."""

    @property
    def of_class(self) -> float:
        """Mean number of images of a class."""
        return self.samples / self.classes


IMAGES: tuple[Rule[FolderImages], ...] = (
    Rule(
        check="few images",
        level="fault",
        # The loss of such a run may end high or low, and its classes are weak; longer training and
        # other rates change little.
        when=lambda e: e.of_class <= FEW_IMAGES and e.image_size >= PHOTOGRAPH and e.top1 < GOOD,
        text=lambda e: (
            f"{e.samples:,} training images in {e.classes:,} classes, {e.of_class:.0f} of a class, "
            f"and random weights: top-1 is {percent(e.top1)} %"
        ),
        remedy="begin with weights that were trained on more images (`largebatch init FOLDER` "
        "takes ImageNet's where it can get them; else model.weights), or add images; other rates "
        "and longer training change little",
        chart="accuracy",
        unless=_DIVERGED,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeakClasses:
    """Classes far below the others, of a run that fits its training images."""

    lowest: str
    """Name of the lowest one."""

    correct: int
    size: int
    """Number of its images, of which `correct` are right."""

    number: int
    classes: int
    share: float
    """Part of the validation images that weak classes hold."""


WEAK_CLASSES: tuple[Rule[WeakClasses], ...] = (
    Rule(
        check="class lost",
        level="fault",
        when=lambda e: e.share >= WEAK_IMAGES and e.correct * e.classes <= e.size,
        text=lambda e: (
            f"class {e.lowest} has only {e.correct:,} of {e.size:,} images right; {e.number:,} of "
            f"{e.classes:,} classes have less than a third of this top-1"
        ),
        remedy="look at its training images: their number and labels (`largebatch data show`), "
        "and the order of the classes",
        unless=_DIVERGED | {"few images"},
    ),
)

# Two runs of the same data.


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A run, and one of the same data in smaller batches."""

    end: float
    """Training loss at the end."""

    small_end: float
    unit: float
    top1: float
    """NaN if one of the runs has none."""

    small_top1: float
    noise: float
    """Two standard errors of the difference of both top-1."""

    updates: int
    """0 if their number is not known."""

    small_updates: int
    small_then: float
    """Training loss of the small run after as many updates as the run has."""

    peak: float
    small_peak: float
    factor: float
    """Factor to the epochs that the run needs; NaN if the small run does not show it."""

    progress: LossProgress

    @property
    def is_worse(self) -> bool:
        """True if the run ends below the small one: by top-1, if both have it."""
        if math.isnan(self.small_top1 - self.top1):
            return self.end > self.small_end + EQUAL * self.unit
        return self.small_top1 - self.top1 > self.noise

    @property
    def ends(self) -> str:
        """Both ends in words."""
        if math.isnan(self.small_top1 - self.top1):
            return f"the training loss ends at {self.end:.3g} against {self.small_end:.3g}"
        return f"top-1 ends at {percent(self.top1)} % against {percent(self.small_top1)} %"


def _more_updates(e: Pair) -> str:
    if e.end > e.small_then + EQUAL * e.unit:
        return f"an update does less than one of the small run: {_more_epochs(e.progress)}"
    if not math.isnan(e.factor):
        return f"train for {e.factor:.2g} times the epochs, by the epoch law, or in smaller batches"
    return "train in smaller batches"


def _higher_loss(e: Pair) -> str:
    rates = ""
    if math.isfinite(e.peak + e.small_peak):
        rates = f" (peak learning rates {e.peak:.3g} and {e.small_peak:.3g})"
    return f"the training loss ends at {e.end:.3g} against {e.small_end:.3g}{rates}; {e.ends}"


_BEFORE_PAIR = frozenset(
    {"diverged", "rate beyond the edge", "spiked in warm-up", "statistics off", "class lost"}
)

PAIR: tuple[Rule[Pair], ...] = (
    Rule(
        check="generalisation gap",
        level="fault",
        when=lambda e: e.is_worse and e.end <= e.small_end + EQUAL * e.unit,
        text=lambda e: (
            f"the training losses end alike, at {e.end:.3g} and {e.small_end:.3g} in small "
            f"batches, and {e.ends}"
        ),
        remedy="more augmentation or label smoothing, a longer warm-up, or exact statistics "
        "(polish); compare weight decay and rate with the small run",
        chart="accuracy",
        unless=_BEFORE_PAIR,
    ),
    Rule(
        check="fewer updates",
        level="fault",
        when=lambda e: e.is_worse and 0 < e.updates < e.small_updates,
        text=lambda e: (
            f"{e.updates:,} updates against {e.small_updates:,}: the training loss ends at "
            f"{e.end:.3g}, and in small batches was {e.small_then:.3g} after as many updates and "
            f"{e.small_end:.3g} at the end; {e.ends}"
        ),
        remedy=_more_updates,
        chart="loss",
        unless=_BEFORE_PAIR,
    ),
    Rule(
        check="underfit",
        level="fault",
        when=lambda e: e.is_worse,
        text=_higher_loss,
        remedy=lambda e: _more_epochs(e.progress),
        chart="loss",
        unless=_BEFORE_PAIR,
    ),
)

# The end of a single run.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Validation and training loss at the end."""

    has_risen: bool
    """True if the validation loss rose while the training loss fell."""

    low: float
    """Lowest validation loss."""

    low_at: EvaluationEpoch
    end: float
    """Last validation loss."""

    training_end: float
    training: float
    """Training loss without augmentation if it was recorded; else `training_end`."""

    excess: float
    """Training loss above what the labels alone leave; NaN if it is another function than the
    validation loss and was not measured as that."""

    gap: float
    guess: Guess


_REGULARISE = (
    "more augmentation or label smoothing, more weight decay, or fewer epochs; `largebatch polish` "
    "shows whether BatchNorm's statistics are part of it"
)
_BEFORE_GAP = frozenset({"diverged", "statistics off", "few images", "class lost"})

GAP_AT_END: tuple[Rule[Gap], ...] = (
    Rule(
        check="generalisation gap",
        level="fault",
        when=lambda e: e.has_risen,
        text=lambda e: (
            f"the validation loss rose from {e.low:.3g} {e.low_at} to {e.end:.3g}, and the "
            f"training loss fell to {e.training_end:.3g}"
        ),
        remedy=_REGULARISE,
        chart="loss",
        unless=_BEFORE_GAP,
    ),
    Rule(
        check="generalisation gap",
        level="fault",
        when=lambda e: e.excess < FIT * e.guess.loss and e.gap > GAP * e.guess.loss,
        text=lambda e: (
            f"the validation loss ends at {e.end:.3g}, the training loss at {e.training:.3g} "
            f"{e.guess}"
        ),
        remedy=_REGULARISE,
        chart="loss",
        unless=_BEFORE_GAP,
    ),
)


class NoiseAtEnd(NamedTuple):
    """The gradient noise scale at the end of a run, with the upper end of its interval."""

    value: float
    high: float
    batch: int


NOISE: tuple[Rule[NoiseAtEnd], ...] = (
    Rule(
        check="noise scale below the batch",
        level="note",
        when=lambda e: e.value > 0 and e.high < e.batch,
        text=lambda e: (
            f"the noise scale is {three_digits(e.value)} at the end (95 %: up to "
            f"{three_digits(e.high)}), below the batch of {e.batch:,}, which needs "
            f"{e.batch / e.value:.0%} more steps than linear scaling"
        ),
        remedy="use a smaller batch.global_batch: a larger one saves few updates",
        chart="noise",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnd:
    """The training loss at the end of a run that was not interrupted."""

    loss: float
    floor: float
    mixed: bool
    """True if that is the loss of mixed images."""

    guess: Guess
    updates: int | None
    progress: LossProgress

    @property
    def is_underfit(self) -> bool:
        """True if the training data are not fitted, without what the labels leave."""
        return self.loss - self.floor > FIT * self.guess.loss


def _training_end_text(e: TrainingEnd) -> str:
    cause = "mixed labels" if e.mixed else "label smoothing"
    smoothing = f", {e.floor:.3g} of it from {cause}" if e.floor else ""
    after = "" if e.updates is None else f" after {plural(e.updates, 'update')}"
    return f"the final training loss is {e.loss:.3g}{smoothing} {e.guess}{after}"


TRAINING_END: tuple[Rule[TrainingEnd], ...] = (
    Rule(
        check="underfit",
        level="fault",
        when=lambda e: e.is_underfit,
        text=_training_end_text,
        remedy=lambda e: _more_epochs(e.progress),
        chart="loss",
        unless=frozenset({"diverged", "rate beyond the edge", "few images"}),
    ),
)


class Waits(NamedTuple):
    """Part of the time of the updates that they waited for images."""

    share: float


WAITS: tuple[Rule[Waits], ...] = (
    Rule(
        check="input bound",
        level="note",
        when=lambda e: e.share >= INPUT_BOUND,
        text=lambda e: f"updates spent {100 * e.share:.0f} % of the time waiting for images",
        remedy="execution.cache and execution.decoder, or more cores for each worker",
        chart="throughput",
    ),
)

"""The course of a run in the columns that a diagnosis reads."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from largebatch.recipe.keys import BinaryCrossEntropy, CrossEntropy, Loss
from largebatch.recipe.recipe import Recipe
from largebatch.report.noise import has_course
from largebatch.report.run import SCHEDULE, FloatArray, Run, median, values_of

EARLY = 0.15  # smallest share of the rows that is the start of a run, unless the warm-up is longer
SHORT = 5  # updates of the shortest running median, which ignores a spike of two

RISE = 0.25
"""Smallest rise of the smoothed training loss that counts as a spike, as a fraction of the loss of
a uniform guess: a quarter of all that can be learned is lost again."""

RISEN = 1.25  # smallest factor of such a rise, and of a rise of the validation loss
NEAR = 20  # smallest number of rows from which the scatter of losses is estimated

SCATTER = 4
"""Standard deviations of single updates' losses that a rise must exceed. Without any spike the
highest and lowest running median of five are 2.5 (150 updates) to 4.0 (10,000) of them apart."""

OUTLIER = 8  # standard deviations above the low with which a rise of one update is not noise
LEAST_ROWS = 6  # smallest number of rows before a rise that alone give its scatter

PAIRS = 10_000  # pairs whose labels' mean entropy is the floor of the loss: known to 1 %

DEVIATION = 1.4826  # standard deviation of a normal distribution over its median absolute value


class Spike(NamedTuple):
    """A rise of the smoothed training loss above its lowest value before."""

    low: float
    high: float
    row: int
    """Row of the high."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run as columns; what is not known is None, NaN or an empty column."""

    name: str
    step: FloatArray
    """Number of each row's update, as the log has it."""

    first_step: int = 0
    """Number of the first update: 0, or 1 in logs that count from 1."""

    epoch: FloatArray
    """As the log has it, too, which may count from 0."""

    loss: FloatArray
    """Training loss in nats."""

    lr: FloatArray
    by_update: bool
    """True if a row is an update, or several; False if it is the mean of an epoch."""

    updates: int | None = None
    epochs: float = math.nan
    """Passes over the training data."""

    val_epoch: FloatArray
    val_loss: FloatArray
    """NaN where an evaluation has none, infinite where it was not finite."""

    top1: FloatArray
    """Parts of 1, by evaluation; NaN where one has only a loss."""

    val_samples: int | None = None
    classes: int | None = None
    batch: int | None = None
    warmup: int | None = None
    """Updates of the warm-up; None: until the highest rate."""

    floor: float = 0.0
    """The training loss that smoothed and mixed labels alone leave at the end, in nats."""

    mixed: bool = False
    """True if the training loss at the end is of mixed images."""

    labels_per_image: float = 1.0
    """Mean sum of the targets of an image at the end; more than 1 where target_threshold makes both
    labels of mixed images 1."""

    objective: Loss | None = None
    """The training loss; None if it is not known, and taken for a cross-entropy. The validation
    loss is the cross-entropy without weights of classes."""

    normalised: bool = True
    """False if the recipe states that the model has no BatchNorm."""

    run: Run | None = None
    """None for the log of another program."""

    notes: tuple[str, ...] = ()
    """How the log of another program was read."""

    @property
    def chance(self) -> float:
        """Loss of equal probabilities for all classes, ln K; NaN if their number is not known."""
        return math.log(self.classes) if self.classes else math.nan

    @property
    def training_chance(self) -> float:
        """Training loss of the same guess for every image, if all classes are equally frequent."""
        if not self.classes or not isinstance(self.objective, BinaryCrossEntropy):
            return self.chance
        loss = float(_entropy(self.objective, np.array(self.labels_per_image / self.classes)))
        return loss if self.objective.classes == "mean" else loss * self.classes

    @property
    def has_comparable_losses(self) -> bool:
        """True if the difference of validation and training loss means something."""
        loss = self.objective
        return loss is None or (isinstance(loss, CrossEntropy) and loss.class_weights is None)

    @property
    def unchecked(self) -> list[str]:
        """What cannot be checked for lack of a record."""
        folder = self.run
        missing = {
            "losses against guessing": self.classes is None,
            "validation loss": np.isnan(self.val_loss).all(),
            "exact BatchNorm statistics": folder is None or folder.drift is None,
            "accuracy by class": folder is None or folder.final_mistakes is None,
            "noise scale": folder is None or not has_course(folder),
            "waits for samples": folder is None or not folder.timed,
        }
        return [name for name, absent in missing.items() if absent]

    @property
    def peak(self) -> float:
        """The highest learning rate."""
        return float(np.nanmax(self.lr)) if np.isfinite(self.lr).any() else math.nan

    @property
    def early(self) -> int:
        """Number of rows that count as the start of the run."""
        warmup = self.warmup
        if warmup is None and math.isfinite(self.peak):
            warmup = int(np.nanargmax(self.lr))
        rows = len(self.loss)
        return min(rows, max(math.ceil(EARLY * rows), math.ceil(1.5 * (warmup or 0))))

    @cached_property
    def trend(self) -> FloatArray:
        """The training loss without spikes of a few updates: a running median, NaN as infinity.

        It is over a fortieth of the rows, and over five updates at the start, where a spike that
        lasts longer moves the weights far.
        """
        if not self.by_update or not self.loss.size:
            return self._finite
        # At the start a short median: while the rate is high a few bad updates decide a run.
        early = self.early
        size = max(SHORT, len(self.loss) // 40)
        start, rest = (running_median(self._finite, length) for length in (SHORT, size))
        return np.concatenate((start[:early], rest[early:]))

    @property
    def lows(self) -> FloatArray:
        """The lowest smoothed loss before each row."""
        return np.minimum.accumulate(np.concatenate(([self.start], self.trend)))[:-1]

    @property
    def _rises(self) -> FloatArray:
        """Rises of the smoothed loss above its lowest value before; 0 where both are infinite."""
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(self.trend - self.lows, nan=0.0, posinf=math.inf, neginf=-math.inf)

    @property
    def _finite(self) -> FloatArray:
        return bounded(self.loss)

    @property
    def start(self) -> float:
        """The training loss of the first row."""
        return float(self.loss[0]) if self.loss.size else math.nan

    @property
    def end(self) -> float:
        """The training loss at the end: the median of the last twentieth of the rows."""
        return median(self.loss[-max(1, len(self.loss) // 20) :])

    @property
    def unit(self) -> float:
        """The loss of guessing; the first training loss where the classes are not known."""
        return self.training_chance if self.classes else self.start

    @property
    def validation_unit(self) -> float:
        """The validation loss of guessing; the first training loss as for `unit`."""
        return self.chance if self.classes else self.start

    def spike(self, rows: slice) -> Spike | None:
        """Return the largest rise of the smoothed loss whose high is in these rows.

        None unless it exceeds RISE, RISEN and the scatter of single updates' losses.
        """
        rises = self._rises[rows]
        if len(self.trend) < 2 or not rises.size:
            return None
        row = int(np.argmax(rises)) + (rows.start or 0)
        low, high = float(self.lows[row]), float(self.trend[row])
        # A fraction of the loss of guessing alone would miss a loss of 0.02 that rises tenfold, and
        # a factor alone would count the rise from 0.001 to 0.002.
        has_risen = high - low > RISE * self.unit and high > RISEN * low
        # The median of five that made the trend is low beside a single very high loss.
        around = self._finite[max(0, row - SHORT // 2) : row + SHORT // 2 + 1]
        outlier = float(around.max()) - low
        row_of_low = int(np.argmin(self.trend[: max(1, row)]))
        scatter = self._scatter(row_of_low, (low + high) / 2)
        exceeds_noise = max((high - low) / SCATTER, outlier / OUTLIER) > scatter
        return Spike(low, high, row) if has_risen and exceeds_noise else None

    def onset(self) -> int | None:
        """Return the first row at which the smoothed loss has risen; None without."""
        lows = self.lows
        risen = (self._rises > RISE * self.unit) & (self.trend > RISEN * lows)
        begin = np.flatnonzero(risen & np.isfinite(self.trend))
        return int(begin[0]) if begin.size else None

    def _scatter(self, start: int, middle: float) -> float:
        """Return the standard deviation of losses before a rise from a row; 0 for means of epochs.

        It is that of the difference to the mean of both neighbours, which a falling loss hardly
        changes. At the start of a run, rows after it with a trend below the middle count too.
        """
        neighbours = self._finite[:-2] / 2 + self._finite[2:] / 2
        with np.errstate(invalid="ignore"):  # an infinite loss beside another
            differences = np.abs(self._finite[1:-1] - neighbours)
        near = max(NEAR, len(self.loss) // 20)
        if start < LEAST_ROWS:
            # Infinity takes the rows of the rise itself out of the estimate.
            differences = np.where(self.trend[1:-1] <= middle, differences, math.inf)
            start += near
        differences = differences[max(0, start - near) : start + 1]
        differences = differences[differences < math.inf]
        if not self.by_update or not differences.size:
            return 0.0
        # A median, which one outlier does not move. The difference of a loss to the mean of two
        # others has 1 + 1/4 + 1/4 times the variance of a loss.
        return float(np.median(differences) * DEVIATION / math.sqrt(1.5))

    @property
    def noise(self) -> float:
        """Two standard errors of the last top-1; a point if not known."""
        top1 = float(self.top1[-1])
        # Other programs do not log how many images were evaluated.
        if not self.val_samples:
            return 0.01
        return 2 * math.sqrt(max(top1 * (1 - top1), 1e-9) / self.val_samples)


def record_of(run: Run) -> Record:
    """Return the record of a run folder, without skipped updates."""
    steps = [step for step in run.steps if step.stage in SCHEDULE and not step.skipped]
    evaluations = run.kept_evaluations
    recipe = run.parsed
    mistakes = run.final_mistakes
    classes = len(mistakes.classes) if mistakes else recipe.data.classes if recipe else None
    mixed = bool(steps) and steps[-1].mixed
    floor = 0.0
    labels = 1.0
    if recipe and mixed:
        floor = mixing_floor(recipe)
        labels = labels_per_image(recipe)
    elif recipe and classes:
        floor = float(smoothing_floor(recipe.loss, classes))
    return Record(
        name=run.folder,
        step=values_of(steps, "step"),
        epoch=np.array([run.plan.epoch(step.step + 1) for step in steps], dtype=np.float64),
        loss=values_of(steps, "loss"),
        lr=values_of(steps, "lr"),
        by_update=True,
        updates=run.num_steps,
        epochs=run.plan.epoch(run.num_steps),
        val_epoch=values_of(evaluations, "epoch"),
        val_loss=bounded(values_of(evaluations, "loss")),
        top1=values_of(evaluations, "top1"),
        val_samples=evaluations[-1].samples if evaluations else None,
        classes=classes,
        floor=floor,
        mixed=mixed,
        labels_per_image=labels,
        objective=recipe.loss if recipe else None,
        batch=run.plan.global_batch,
        warmup=run.plan.warmup_steps,
        normalised=recipe is None or recipe.batch.bn_span is not None,
        run=run,
    )


def bounded(losses: FloatArray) -> FloatArray:
    """Return recorded losses with infinity for those that are no number."""
    return np.where(np.isfinite(losses), losses, math.inf)


def running_median(values: FloatArray, size: int) -> FloatArray:
    """Return the median of `size` values around each one; the ends are repeated.

    >>> running_median(np.array([1.0, 9.0, 2.0, 3.0]), 3).tolist()
    [1.0, 2.0, 3.0, 3.0]
    """
    before = size // 2
    padded = np.pad(values, (before, size - 1 - before), mode="edge")
    # A loop over windows: np.median of a matrix would sort copies of all of them at once.
    windows = np.lib.stride_tricks.sliding_window_view(padded, size)
    return np.array([np.partition(window, before)[before] for window in windows])


def smoothing_floor(loss: Loss, num_classes: int, shares: float | FloatArray = 1.0) -> FloatArray:
    """Return the lowest loss that smoothed labels leave, in nats: the entropy of their targets.

    `shares` are those of the images' own labels; the rest is of another class.

    >>> round(float(smoothing_floor(CrossEntropy(label_smoothing=0.1), 2)), 3)
    0.199
    """
    if isinstance(loss, BinaryCrossEntropy) and loss.target_threshold is not None:
        return np.zeros_like(np.asarray(shares))  # targets are 0 and 1
    own, partners, rest = _targets(loss, num_classes, np.asarray(shares))
    floor = _entropy(loss, own) + _entropy(loss, partners)
    floor += (num_classes - 2) * _entropy(loss, rest)
    if isinstance(loss, BinaryCrossEntropy) and loss.classes == "mean":
        floor /= num_classes
    return floor


def mixing_floor(recipe: Recipe) -> float:
    """Return the lowest loss that mixed and smoothed labels leave, in nats: their mean entropy."""
    return float(smoothing_floor(recipe.loss, recipe.data.classes, _drawn_shares(recipe)).mean())


def labels_per_image(recipe: Recipe) -> float:
    """Return the mean sum of the targets of a mixed image, which target_threshold makes 0 or 1."""
    loss = recipe.loss
    if not isinstance(loss, BinaryCrossEntropy) or loss.target_threshold is None:
        return 1.0
    own, partners, _ = _targets(loss, recipe.data.classes, _drawn_shares(recipe))
    return float((own > loss.target_threshold).mean() + (partners > loss.target_threshold).mean())


def _drawn_shares(recipe: Recipe) -> FloatArray:
    """Return the shares of the own labels of PAIRS pairs, as the recipe mixes them."""
    # Needs torch, and most reports need no drawing.
    from largebatch.data.mixing import draw_pairs, shares_of

    data = recipe.data
    assert data.mix is not None
    pairs = draw_pairs(data.mix, range(2 * PAIRS), seed=0, classes=data.classes)
    shares = shares_of(pairs, height=data.image_size, width=data.image_size)
    # Both images of a pair have one class as often as in classes of equal sizes.
    shares[:: data.classes] = 1.0
    return shares


def _targets(
    loss: Loss, num_classes: int, shares: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the targets of the own label, of the partner's, and of each other class."""
    others = num_classes
    if isinstance(loss, CrossEntropy) and loss.off_target == "others":
        others = num_classes - 1
    rest = np.asarray(loss.label_smoothing / others)
    of_labels = 1 - num_classes * rest
    return rest + of_labels * shares, rest + of_labels * (1 - shares), rest


def _entropy(loss: Loss, target: FloatArray) -> FloatArray:
    """Return the part of a class in the lowest loss of an image, in nats."""
    if isinstance(loss, CrossEntropy):
        return _surprise(target)
    return _surprise(target) + _surprise(1 - target)


def _surprise(probability: FloatArray) -> FloatArray:
    """Return -p ln p, the share of an entropy in nats that an outcome has."""
    return -probability * np.log(np.where(probability > 0, probability, 1.0))

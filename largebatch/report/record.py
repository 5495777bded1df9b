"""The course of a run in the columns that a diagnosis reads, whoever wrote its log.

Rows of training are updates in the log of a run folder; in the logs of other programs they may be
means over epochs, and columns may be missing.
"""

import bisect
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from largebatch.errors import CheckpointError, RecipeError
from largebatch.recipe.keys import Loss
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.report.noise import has_course
from largebatch.report.run import FloatArray, Run, median

_SCHEDULE = {"train", "clean"}

EARLY = 0.15
"""Least share of the rows that count as the start of a run; a longer warm-up counts whole."""

SHORT = 5
"""Updates of the shortest running median: a spike of two of them does not count."""

RISE = 0.25
"""Rise of the smoothed training loss that is a spike, as a part of the loss of guessing: a quarter
of all that can be learned is lost again."""

RISEN = 1.25
"""Least factor of such a rise, and of a rise of the validation loss."""

NEAR = 20
"""Least number of rows in which the scatter of losses is estimated."""

SCATTER = 4
"""Standard deviations of single updates' losses that a rise must exceed. Without any spike the
highest and lowest running median of five are 2.5 (150 updates) to 4.0 (10,000) of them apart."""

OUTLIER = 8
"""Standard deviations by which a single update of a rise is no noise, however short the rise."""

LEAST_ROWS = 6
"""Fewest rows before a rise for an estimate from these alone."""


DEVIATION = 1.4826
"""Standard deviation of a normal distribution, over the median of its absolute values."""


def _empty() -> FloatArray:
    return np.empty(0)


class Rise(NamedTuple):
    """A rise of the smoothed training loss above its lowest value before."""

    low: float
    high: float
    row: int
    """Row of the high."""

    peak: float
    """Highest loss of a single update there."""

    scatter: float
    """Standard deviation of the losses of single updates before it, without their trend."""

    @property
    def exceeds_noise(self) -> bool:
        """True if losses that scatter as much do not rise so far by chance."""
        height, outlier = self.high - self.low, self.peak - self.low
        return max(height / SCATTER, outlier / OUTLIER) > self.scatter


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run as columns; what is not known is None, NaN or an empty column."""

    name: str
    step: FloatArray
    """Updates made after each row of training."""

    epoch: FloatArray
    loss: FloatArray
    """Training loss in nats."""

    lr: FloatArray
    by_update: bool
    """True if a row is an update, or several; False if it is the mean of an epoch."""

    first_step: int = 0
    """Number that the log gives to its first update."""

    first_epoch: int = 1
    """Number that the log gives to its first epoch, at its end."""

    val_epoch: FloatArray = field(default_factory=_empty)
    val_loss: FloatArray = field(default_factory=_empty)
    """NaN where an evaluation has none, infinite where it was not finite."""

    top1: FloatArray = field(default_factory=_empty)
    """Parts of 1, by evaluation; NaN where one has only a loss."""

    val_samples: int | None = None
    classes: int | None = None
    floor: float = 0.0
    """The training loss that label smoothing alone leaves, in nats."""

    batch: int | None = None
    warmup: int | None = None
    """Updates of the warm-up; None: until the highest rate."""

    is_filtered: bool = False
    """True if the log has other numbers in place of losses that were not finite."""

    source: str = ""
    """Columns of another program's log that were read, in words."""

    edge: float | None = None
    """Upper bound of the learning rate by a range test of this recipe."""

    run: Run | None = None
    """None for the log of another program."""

    recipe: Recipe | None = None

    @property
    def is_complete(self) -> bool:
        """False if a run folder's run did not end by itself; True for logs of other programs."""
        return self.run is None or self.run.finished

    @property
    def normalised(self) -> bool:
        """False if the recipe states that the model has no BatchNorm."""
        return self.recipe is None or self.recipe.batch.bn_span is not None

    @property
    def chance(self) -> float:
        """Loss of equal probabilities for all classes, ln K; NaN if their number is not known."""
        return math.log(self.classes) if self.classes else math.nan

    @property
    def unchecked(self) -> list[str]:
        """What cannot be checked for lack of a record."""
        folder = self.run
        missing = {
            "learning rate": not np.isfinite(self.lr).any(),
            "losses against guessing": self.classes is None,
            "validation loss": np.isnan(self.val_loss).all(),
            "exact BatchNorm statistics": folder is None or folder.drift is None,
            "accuracy by class": folder is None or folder.final_mistakes is None,
            "noise scale": folder is None or not has_course(folder),
            "waits for samples": folder is None or not folder.timed,
        }
        return [name for name, absent in missing.items() if absent]

    @property
    def updates(self) -> int | None:
        """Number of updates; None if it is not known."""
        if self.run is not None:
            return self.run.num_steps
        last = _last(self.step)
        return None if math.isnan(last) else round(last)

    @property
    def epochs(self) -> float:
        """Passes over the training data."""
        return max(_last(self.epoch), _last(self.val_epoch), key=lambda x: math.isfinite(x) * x)

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
        early, size = self.early, max(SHORT, len(self.loss) // 40)
        start, rest = (running_median(self._finite, each) for each in (SHORT, size))
        return np.concatenate((start[:early], rest[early:]))

    @property
    def lows(self) -> FloatArray:
        """The lowest smoothed loss before each row."""
        return np.minimum.accumulate(np.concatenate(([self.start], self.trend)))[:-1]

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
        return self.chance if self.classes else self.start

    def rise(self, rows: slice) -> Rise | None:
        """Return the largest rise of the smoothed loss whose high lies in these rows."""
        if len(self.trend) < 2:
            return None
        rises = (self.trend - self.lows)[rows]
        if not rises.size:
            return None
        row = int(np.argmax(rises)) + (rows.start or 0)
        low, high = float(self.lows[row]), float(self.trend[row])
        peak = float(self._finite[max(0, row - SHORT // 2) : row + SHORT // 2 + 1].max())
        start = int(np.argmin(self.trend[: max(1, row)]))
        return Rise(low, high, row, peak, self._scatter(start, (low + high) / 2))

    def onset(self, rows: slice = slice(0, None)) -> int | None:
        """Return the first of these rows at which the smoothed loss has risen; None without."""
        lows = self.lows
        risen = (self.trend - lows > RISE * self.unit) & (self.trend > RISEN * lows)
        begin = np.flatnonzero((risen & np.isfinite(self.trend))[rows])
        return int(begin[0]) + (rows.start or 0) if begin.size else None

    def _scatter(self, start: int, middle: float) -> float:
        """Return the standard deviation of losses before a rise from a row; 0 for means of epochs.

        It is that of the difference to the mean of both neighbours, which a falling loss hardly
        changes. At the start of a run, rows after it with a trend below the middle count too.
        """
        sides = (self._finite[:-2] + self._finite[2:]) / 2
        with np.errstate(invalid="ignore"):  # an infinite loss beside another
            off = np.abs(self._finite[1:-1] - sides)
        near = max(NEAR, len(self.loss) // 20)
        if start < LEAST_ROWS:
            off = np.where(self.trend[1:-1] <= middle, off, math.inf)
            start += near
        off = off[max(0, start - near) : start + 1]
        off = off[off < math.inf]
        if not self.by_update or not off.size:
            return 0.0
        return float(np.median(off) * DEVIATION / math.sqrt(1.5))

    def training_at(self, epoch: float) -> float:
        """Return the smoothed training loss at an epoch; NaN without epochs."""
        known = np.isfinite(self.epoch)
        if not known.any() or not math.isfinite(epoch):
            return math.nan
        row = int(np.searchsorted(self.epoch[known], epoch, side="right")) - 1
        return float(self.trend[known][max(0, row)])

    def noise(self, row: int = -1) -> float:
        """Return two standard errors of the top-1 of an evaluation; a point if not known."""
        top1 = float(self.top1[row])
        if not self.val_samples:
            return 0.01
        return 2 * math.sqrt(max(top1 * (1 - top1), 1e-9) / self.val_samples)


def _last(column: FloatArray) -> float:
    finite = column[np.isfinite(column)]
    return float(finite[-1]) if finite.size else math.nan


def record_of(run: Run) -> Record:
    """Return the record of a run folder, without skipped updates."""
    steps = [step for step in run.steps if step.stage in _SCHEDULE and not step.skipped]
    kept = run.kept_evaluations
    recipe = read_recipe(run)
    mistakes = run.final_mistakes
    classes = len(mistakes.classes) if mistakes else recipe.data.classes if recipe else None
    return Record(
        name=run.folder,
        step=np.array([step.step + 1 for step in steps], dtype=np.float64),
        epoch=np.array([run.plan.epoch(step.step + 1) for step in steps], dtype=np.float64),
        loss=np.array([step.loss for step in steps], dtype=np.float64),
        lr=np.array([step.lr for step in steps], dtype=np.float64),
        by_update=True,
        val_epoch=np.array([found.epoch for found in kept], dtype=np.float64),
        val_loss=bounded(np.array([found.loss for found in kept], dtype=np.float64)),
        top1=np.array([found.top1 for found in kept], dtype=np.float64),
        val_samples=kept[-1].samples if kept else None,
        classes=classes,
        floor=smoothing_floor(recipe.loss if recipe else Loss(), classes) if classes else 0.0,
        batch=run.plan.global_batch,
        warmup=run.plan.warmup_steps,
        run=run,
        recipe=recipe,
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
    padded = np.pad(values, (before, size - 1 - before), mode="edge").tolist()
    window = sorted(padded[:size])
    found = [window[before]]
    for gone, new in zip(padded, padded[size:], strict=False):
        del window[bisect.bisect_left(window, gone)]
        bisect.insort(window, new)
        found.append(window[before])
    return np.array(found)


def read_edge(path: Path) -> float:
    """Return the upper bound of the rate in the range.json of `lab range`, or of its folder.

    Raises CheckpointError if it cannot be read or has no upper bound.
    """
    file = path / "range.json" if path.is_dir() else path
    if not file.exists():
        raise CheckpointError(
            f"{file}: not found; `largebatch lab range RECIPE --out DIR` writes it"
        )
    try:
        upper = json.loads(file.read_text(encoding="utf-8"))["upper"]
        if upper is None:
            raise CheckpointError(f"{file}: the range test found no upper bound of the rate")
        return float(upper["value"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file}: has no upper bound of the rate ({type(error).__name__}: {error}); "
            "expected the range.json of `largebatch lab range`"
        ) from None


def read_recipe(run: Run) -> Recipe | None:
    """Return the recipe of a run; None if it is missing or today's types do not take it."""
    try:
        return None if run.recipe is None else parse_recipe(run.recipe)
    except RecipeError:
        return None


def smoothing_floor(loss: Loss, num_classes: int) -> float:
    """Return the lowest loss that label smoothing leaves: the entropy of its targets, in nats.

    >>> round(smoothing_floor(Loss(label_smoothing=0.1), 2), 3)
    0.199
    """
    others = num_classes if loss.off_target == "all" else num_classes - 1
    each = loss.label_smoothing / others
    labelled = 1 - each * (num_classes - 1)
    return -sum(p * math.log(p) * n for p, n in ((labelled, 1), (each, num_classes - 1)) if p)

"""A recipe for a batch between those that MLPerf's reference convergence points give.

The points are the recipes `resnet50_<batch>_mlperf`: ten ways to 75.9 % top-1 with LARS. Between
two neighbours every setting follows a power law of the batch; its error is estimated by leaving out
each point that has two neighbours. The length of the training follows from all points: epochs(B) =
shortest (1 + B / critical), the form of arXiv:1812.06162.

Another data set is compared with ImageNet by the updates in an epoch. With as many of them, a run
makes the same number of updates, so the settings that act in an update are the same: the learning
rate (the trust ratio makes it a relative step), momentum, weight decay, and the warm-up as a share.
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from largebatch.errors import RecipeError
from largebatch.recipe.installed import installed, read_installed
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.optimizers import LARS

LARGEST = 86_016
"""The largest batch with a run to 75.9 % that is known here: Fujitsu's, MLPerf v0.6."""

SPANS = range(32, 513)
"""Sizes of BatchNorm spans; the points have 64 to 424."""

_POINT = re.compile(r"resnet50_\d+_mlperf")
_MEAN = re.compile(r"after ([\d.]+) epochs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A reference point."""

    name: str
    batch: int
    peak_lr: float
    warmup: float
    """Warm-up as a share of the run."""

    momentum: float
    weight_decay: float
    bn_span: int
    schedule_epochs: float
    mean_epochs: float
    """Epochs until 75.9 % top-1."""


SETTINGS: dict[str, Callable[[Point], float]] = {
    "learning rate": lambda point: point.peak_lr,
    "warm-up, share of the run": lambda point: point.warmup,
    "1 - momentum": lambda point: 1 - point.momentum,
    "weight decay": lambda point: point.weight_decay,
    "BatchNorm span": lambda point: point.bn_span,
}
"""Settings that are interpolated, on logarithmic scales of batch and value."""


@cache
def reference_points() -> tuple[Point, ...]:
    """Read the points from the installed recipes, smallest batch first."""
    texts = {name: text for name, text in installed().items() if _POINT.fullmatch(name)}
    return tuple(sorted((_point(*item) for item in texts.items()), key=lambda point: point.batch))


def _point(name: str, text: str) -> Point:
    recipe = parse_recipe(text, source=name)
    mean = _MEAN.search(" ".join(text.replace("#", " ").split()))
    epochs, warmup, span = recipe.duration.epochs, recipe.schedule.warmup, recipe.batch.bn_span
    assert isinstance(recipe.optimizer, LARS)
    assert mean is not None
    assert epochs is not None
    assert warmup is not None
    assert warmup.epochs is not None
    assert span is not None
    return Point(
        name=name,
        batch=recipe.batch.global_batch,
        peak_lr=recipe.schedule.peak_lr,
        warmup=warmup.epochs / epochs,
        momentum=recipe.optimizer.momentum,
        weight_decay=recipe.optimizer.weight_decay,
        bn_span=span,
        schedule_epochs=epochs,
        mean_epochs=float(mean[1]),
    )


def neighbours(batch: float, points: Sequence[Point]) -> tuple[Point, Point]:
    """Return the points around a batch; the same one twice outside of all points."""
    below = [point for point in points if point.batch <= batch]
    above = [point for point in points if point.batch >= batch]
    return (below or above)[-1 if below else 0], (above or below)[0 if above else -1]


def place(batch: float, lower: Point, upper: Point) -> float:
    """Return the place of a batch between two points on a logarithmic scale, from 0 to 1."""
    if lower.batch == upper.batch:
        return 0.0
    return math.log(batch / lower.batch) / math.log(upper.batch / lower.batch)


def interpolate(batch: float, points: Sequence[Point], value: Callable[[Point], float]) -> float:
    """Return the value of a power law through the two points around the batch."""
    lower, upper = neighbours(batch, points)
    share = place(batch, lower, upper)
    return math.exp((1 - share) * math.log(value(lower)) + share * math.log(value(upper)))


def left_out(points: Sequence[Point], value: Callable[[Point], float]) -> list[float]:
    """Return the relative error of each point with two neighbours, from all other points."""
    return [
        interpolate(point.batch, [one for one in points if one is not point], value) / value(point)
        - 1
        for point in points[1:-1]
    ]


@dataclass(frozen=True, slots=True)
class EpochLaw:
    """epochs(B) = shortest (1 + B / critical)."""

    shortest: float
    critical: float

    def __call__(self, batch: float) -> float:
        """Return the epochs that a batch needs."""
        return self.shortest * (1 + batch / self.critical)


def fit_epochs(points: Sequence[Point]) -> EpochLaw:
    """Fit the law to the mean epochs by least squares of the relative errors.

    With a = shortest and s = shortest / critical the errors a / E + s B / E - 1 are linear.
    """
    pairs = [(1 / point.mean_epochs, point.batch / point.mean_epochs) for point in points]
    xx, xy, yy = (sum(one[i] * one[j] for one in pairs) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(one[i] for one in pairs) for i in (0, 1))
    determinant = xx * yy - xy * xy
    shortest, slope = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
    return EpochLaw(shortest, shortest / slope)


def epoch_errors(points: Sequence[Point]) -> list[float]:
    """Return the relative error of each point, from a fit to the nine others."""
    return [
        fit_epochs([one for one in points if one is not point])(point.batch) / point.mean_epochs - 1
        for point in points
    ]


def margin(points: Sequence[Point]) -> float:
    """Return the length of the points' schedules over their epochs to 75.9 %."""
    return median(point.schedule_epochs / point.mean_epochs for point in points)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Number and size of the images of a data set."""

    samples: int
    val_samples: int
    classes: int
    image_size: int


IMAGENET = DataSet(samples=1_281_167, val_samples=50_000, classes=1_000, image_size=224)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Settings for a batch, and their sources."""

    batch: int
    data: DataSet
    model: str
    equivalent: float
    """The batch with as many updates in an epoch of ImageNet; `batch` itself on ImageNet."""

    lower: Point
    upper: Point
    peak_lr: float
    momentum: float
    weight_decay: float
    bn_span: int
    law_epochs: float
    """Epochs until 75.9 %, by the law at `equivalent`."""

    epochs: float
    """Epochs of the schedule."""

    warmup_epochs: float
    clean_epochs: float
    given_epochs: bool
    """True if `epochs` was given and does not follow from the law."""

    @property
    def extrapolated(self) -> bool:
        """True if the batch is larger than that of all points."""
        return self.equivalent > self.upper.batch

    @property
    def elsewhere(self) -> bool:
        """True if the images are not ImageNet's."""
        return self.data != IMAGENET

    @property
    def a_point(self) -> bool:
        """True if the batch is that of a reference point."""
        return self.lower.batch == self.equivalent


def suggest(
    batch: int, *, data: DataSet = IMAGENET, model: str = "resnet50", epochs: float | None = None
) -> Suggestion:
    """Choose settings for a batch.

    Raises RecipeError where no published run has such a batch, and where it cannot be divided into
    BatchNorm spans.
    """
    points = reference_points()
    equivalent = batch * IMAGENET.samples / data.samples
    _require_in_range(batch, equivalent, points, data)
    lower, upper = neighbours(equivalent, points)
    alone = lower is upper
    values = {name: interpolate(equivalent, points, value) for name, value in SETTINGS.items()}
    law_epochs = fit_epochs(points)(equivalent)
    own = (
        lower.schedule_epochs
        if lower.batch == equivalent
        else math.ceil(law_epochs * margin(points))
    )
    total = own if epochs is None else epochs
    return Suggestion(
        batch=batch,
        data=data,
        model=model,
        equivalent=equivalent,
        lower=lower,
        upper=upper,
        peak_lr=lower.peak_lr if alone else _digits(values["learning rate"], 4),
        momentum=lower.momentum if alone else round(1 - values["1 - momentum"], 4),
        weight_decay=lower.weight_decay if alone else _digits(values["weight decay"], 3),
        bn_span=_span(batch, values["BatchNorm span"]),
        law_epochs=law_epochs,
        epochs=total,
        warmup_epochs=_digits(values["warm-up, share of the run"] * total, 3),
        clean_epochs=_digits(clean_share() * total, 3),
        given_epochs=epochs is not None,
    )


def _require_in_range(
    batch: int, equivalent: float, points: Sequence[Point], data: DataSet
) -> None:
    smallest, share = points[0].batch, data.samples / IMAGENET.samples
    like = "" if data == IMAGENET else f", as {equivalent:,.0f} on ImageNet by updates in an epoch"
    if equivalent > LARGEST:
        most = math.floor(LARGEST * share)
        advice = f"give at most {most:,}"
        if most < SPANS[0]:
            advice = "these images are too few for any; `largebatch init` writes a recipe with SGD"
        raise RecipeError(
            f"a batch of {batch:,}{like}: the largest batch with a run to 75.9 % that is known "
            f"here is {LARGEST:,} (Fujitsu's, MLPerf v0.6), {IMAGENET.samples / LARGEST:.1f} "
            f"updates an epoch, so settings for more would be made up; {advice}"
        )
    if equivalent < smallest:
        raise RecipeError(
            f"a batch of {batch:,}{like}: the smallest reference point is {smallest:,}; give at "
            f"least {math.ceil(smallest * share):,}. Smaller ones do without LARS: SGD with a "
            "learning rate of 0.1 for every 256 (arXiv:1706.02677), as in resnet50_8192_goyal"
        )


def _span(batch: int, wanted: float) -> int:
    possible = _spans(batch)
    if not possible:
        below = next(filter(_spans, range(batch, 0, -1)), None)
        above = next(filter(_spans, itertools.count(batch)))
        near = " and ".join(f"{size:,}" for size in (below, above) if size)
        raise RecipeError(
            f"a batch of {batch:,} cannot be divided into BatchNorm spans of {SPANS[0]} to "
            f"{SPANS[-1]} samples; the nearest batches that can: {near}"
        )
    return min(possible, key=lambda span: abs(math.log(span / wanted)))


def _spans(batch: int) -> list[int]:
    return [span for span in SPANS if batch % span == 0]


@cache
def clean_share() -> float:
    """Return the share of its run that Fujitsu's entry trained on clean images."""
    recipe = parse_recipe(read_installed("resnet50_86016_fujitsu"))
    clean, total = recipe.polish.clean if recipe.polish else None, recipe.duration.steps
    assert clean is not None
    assert clean.steps is not None
    assert total is not None
    return clean.steps / total


def _digits(value: float, number: int) -> float:
    """Round to this number of significant digits; more would claim a precision that is not there.

    >>> _digits(13.1677, 4), _digits(0.00012345, 3)
    (13.17, 0.000123)
    """
    return float(f"{value:.{number}g}")

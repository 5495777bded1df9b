"""A recipe for a batch between those that MLPerf's reference convergence points give.

The points are the recipes `resnet50_<batch>_mlperf`: ten ways to 75.9 % top-1 with LARS. Between
two neighbours every setting follows a power law of the batch. The length of the training follows
from all points: epochs(B) = shortest (1 + B / critical), the form of arXiv:1812.06162.

Another data set is compared with ImageNet by the updates in an epoch. With as many of them, a run
makes the same number of updates, so the settings that act in an update are the same: the learning
rate (the trust ratio makes it a relative step), momentum, weight decay, and the warm-up as a share.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from largebatch.errors import RecipeError
from largebatch.recipe.installed import installed, read_installed
from largebatch.recipe.loading import parse_recipe, validate_tree
from largebatch.recipe.optimizers import LARS
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_commented

IMAGES = 1_281_167
"""Training images of ImageNet."""

VALIDATION = 50_000

LARGEST = 86_016
"""The largest batch with a run to 75.9 % that is known here: Fujitsu's, MLPerf v0.6."""

SPANS = range(32, 513)
"""Sizes of BatchNorm spans; the points have 64 to 424."""

ETA = 1e-3  # trust coefficient of MLPerf's reference points

LONGER = 1.5  # times the length of a step of the recipe that is kept: it is warned of

KEPT = ("seed", "data", "model", "loss", "precision", "reduction", "execution", "evaluation")
"""Sections that a suggestion keeps: what a batch does not decide."""

_POINT = re.compile(r"resnet50_\d+_mlperf")
_MEAN = re.compile(r"after ([\d.]+) epochs")


class Point(NamedTuple):
    """A reference point."""

    name: str
    recipe: Any
    """A Recipe with LARS, BatchNorm spans, and lengths in epochs."""

    mean_epochs: float
    """Epochs until 75.9 % top-1."""

    @property
    def batch(self) -> int:
        """Its global batch."""
        size: int = self.recipe.batch.global_batch
        return size


Setting = Callable[[Any], float]
"""Maps the recipe of a point to one of its settings."""

SETTINGS: dict[str, Setting] = {
    "learning rate": lambda of: of.schedule.peak_lr,
    "warm-up, share of the run": lambda of: of.schedule.warmup.epochs / of.duration.epochs,
    "1 - momentum": lambda of: 1 - of.optimizer.momentum,
    "weight decay": lambda of: of.optimizer.weight_decay,
    "BatchNorm span": lambda of: of.batch.bn_span,
}
"""Settings that are interpolated, on logarithmic scales of batch and value."""


@cache
def reference_points() -> tuple[Point, ...]:
    """Read the points from the installed recipes, smallest batch first."""
    points = []
    for name, text in installed().items():  # sorted by the numbers in their names
        if _POINT.fullmatch(name):
            (mean,) = _MEAN.findall(" ".join(text.replace("#", " ").split()))
            points.append(Point(name, parse_recipe(text, source=name), float(mean)))
    return tuple(points)


def interpolate(batch: float, points: Sequence[Point], value: Setting) -> float:
    """Return the value of a power law through the two points around the batch."""
    batches = np.log([point.batch for point in points])
    values = np.log([value(point.recipe) for point in points])
    # A straight line between logarithms is a power law; beyond the ends np.interp keeps the last
    # value.
    return math.exp(np.interp(math.log(batch), batches, values))


class EpochLaw(NamedTuple):
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
    shortest, slope = map(float, np.linalg.lstsq(np.array(pairs), np.ones(len(pairs)))[0])
    return EpochLaw(shortest, shortest / slope)


class Suggestion(NamedTuple):
    """A recipe for a batch, and the sources of its numbers."""

    recipe: Recipe
    source: str
    comments: Mapping[str, str]

    @property
    def text(self) -> str:
        """The recipe as YAML, with the rule of each number."""
        header = (
            f"{self.recipe.name}: written by `largebatch lab suggest`.",
            f"After: {self.source}.",
            "Where to begin, not a result. Measured here: not yet.",
        )
        return dump_commented(self.recipe, self.comments, header=header)


def suggest(batch: int, *, base: Recipe | None = None, epochs: float | None = None) -> Suggestion:
    """Choose settings for a batch, with the images and the network of a recipe or of ImageNet.

    `epochs` is the length of the run; None: by the law, and the points' schedules over it.

    Raises RecipeError where no published run has such a batch, and where it cannot be divided into
    BatchNorm spans.
    """
    points = reference_points()
    samples = IMAGES if base is None else base.data.train_split
    # What matters of a batch is the number of updates in an epoch.
    equivalent = batch * IMAGES / samples  # with as many updates in an epoch of ImageNet
    if not points[0].batch <= equivalent <= LARGEST:
        least, most = (math.ceil(points[0].batch * samples / IMAGES), LARGEST * samples // IMAGES)
        raise RecipeError(
            f"--batch {batch:,}: runs with LARS are known from {least:,} to {most:,} (by updates "
            f"in an epoch {points[0].batch:,} to {LARGEST:,} of ImageNet); for less keep SGD, with "
            "a learning rate of 0.1 for every 256 images (arXiv:1706.02677)"
        )
    lower = [point for point in points if point.batch <= equivalent][-1]
    is_point = lower.batch == equivalent
    is_alone = is_point or lower is points[-1]
    values = {name: interpolate(equivalent, points, value) for name, value in SETTINGS.items()}
    law_epochs = fit_epochs(points)(equivalent)
    if epochs is None:
        # A schedule ends some epochs after the mean run has reached the target.
        longer = median(point.recipe.duration.epochs / point.mean_epochs for point in points)
        epochs = lower.recipe.duration.epochs if is_point else math.ceil(law_epochs * longer)
    if is_point:
        source = f"it is a reference point: {lower.name}"
    elif is_alone:
        source = (
            f"extrapolates: {equivalent:,.0f} is {equivalent / lower.batch:.2f} times the "
            f"largest point, {lower.name}, whose settings it keeps"
        )
    else:
        upper = points[points.index(lower) + 1]
        source = f"settings between {lower.name} and {upper.name}, as power laws of the batch"
    momentum = round(1 - values["1 - momentum"], 4)
    rate = _digits(values["learning rate"], 4)
    if is_alone:
        momentum = lower.recipe.optimizer.momentum
        rate = lower.recipe.schedule.peak_lr
    base_recipe: Recipe = base or lower.recipe
    name = (
        f"{(base_recipe.model.name if base is None else base_recipe.name)[:60]}-{batch}-suggested"
    )
    warmup = _digits(values["warm-up, share of the run"] * epochs, 3)
    has_spans = base_recipe.batch.bn_span is not None
    tree_of_base = base_recipe.model_dump(mode="json", exclude_unset=True)
    sections = {key: tree_of_base[key] for key in KEPT if key in tree_of_base}
    # It was for another batch, which it need not divide.
    sections.get("execution", {}).pop("device_batch", None)
    tree: dict[str, Any] = {
        "name": name,
        "duration": {"epochs": epochs},
        **sections,
        "batch": {
            "global_batch": batch,
            "bn_span": _span(batch, values["BatchNorm span"]) if has_spans else None,
        },
        "optimizer": {
            "kind": "lars",
            "convention": "reference",
            "momentum": momentum,
            "weight_decay": _digits(values["weight decay"], 3),
            "eta": ETA,
            "eps": 0.0,
        },
        "schedule": {
            "peak_lr": rate,
            "warmup": {"epochs": warmup},
            "decay": {"kind": "polynomial", "power": 2.0, "end_lr": 1e-4},
            "first_step": 1,
        },
        "polish": None,
    }
    comments = {
        "duration": f"{law_epochs:.1f} to 75.9 % on ImageNet, by the law",
        "data": f"as in {base_recipe.name}, with network, loss and execution",
        "optimizer.momentum": "for LARS",
        "optimizer.weight_decay": "for LARS",
        "optimizer.eta": "MLPerf's, as eps, power and end_lr",
        "schedule.peak_lr": "for LARS",
        "schedule.warmup": f"for LARS; {warmup / epochs:.0%} of the run",
    }
    if has_spans:
        fujitsu: Any = parse_recipe(read_installed("resnet50_86016_fujitsu"))
        clean = epochs * fujitsu.polish.clean.steps / fujitsu.duration.steps
        tree["polish"] = {
            "clean": {"epochs": _digits(clean, 3)},
            "statistics": {"samples": min(VALIDATION, samples)},
        }
        comments |= {
            "batch.bn_span": "the nearest divisor",
            "polish": "no reference point has it",
            "polish.clean": "the share of Fujitsu's entry",
        }
    if base is not None and isinstance(old := base.optimizer, LARS):
        # The length of a step of LARS in a steady direction, relative to the weights: it decides
        # whether the recipe's network diverges.
        length = rate * ETA / (1 - momentum)
        factor = length / (base.schedule.peak_lr * old.eta / (1 - old.momentum))
        if factor > LONGER:
            source += (
                f"; warning: rate x eta / (1 - momentum) is {factor:.2g} times that of "
                f"{base.name}, and training may diverge: see `largebatch lab range` first"
            )
    return Suggestion(validate_tree(Recipe, tree, source=name), source, comments)


def _span(batch: int, wanted: float) -> int:
    # The ratio counts, because spans act on a logarithmic scale.
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


def _digits(value: float, number: int) -> float:
    """Round to this number of significant digits; more would claim a precision that is not there.

    >>> _digits(13.1677, 4), _digits(0.00012345, 3)
    (13.17, 0.000123)
    """
    return float(f"{value:.{number}g}")

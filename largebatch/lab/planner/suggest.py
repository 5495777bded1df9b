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
from typing import Any

import numpy as np

from largebatch.errors import RecipeError
from largebatch.recipe.installed import installed, read_installed
from largebatch.recipe.loading import parse_recipe, validate_tree
from largebatch.recipe.optimizers import LARS
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_commented
from largebatch.rules import Numbers, Rule, find

IMAGES, VALIDATION = 1_281_167, 50_000
"""Images of ImageNet."""

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


def interpolate(batch: float, points: Sequence[Point], value: Callable[[Point], float]) -> float:
    """Return the value of a power law through the two points around the batch."""
    batches = np.log([point.batch for point in points])
    values = np.log([value(point) for point in points])
    return math.exp(np.interp(math.log(batch), batches, values))


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
    shortest, slope = map(float, np.linalg.lstsq(np.array(pairs), np.ones(len(pairs)))[0])
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


ETA = 1e-3
"""Trust coefficient of MLPerf's reference points."""

FEW = 0.5
"""Share of the fewest updates of a reference point below which a run is warned of."""

LONGER = 1.5
"""Factor to the length of a step of the recipe that is kept from which one is warned of."""

KEPT = ("seed", "data", "model", "loss", "precision", "reduction", "execution", "evaluation")
"""Sections that a suggestion keeps: what a batch does not decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Settings for a batch, and their sources."""

    batch: int
    base: Recipe
    """The recipe whose images and network are kept: the point below, if none is given."""

    equivalent: float
    """The batch with as many updates in an epoch of ImageNet; `batch` itself on ImageNet."""

    lower: Point
    upper: Point
    peak_lr: float
    momentum: float
    weight_decay: float
    bn_span: int | None
    """None if the recipe has no BatchNorm."""

    law_epochs: float
    """Epochs until 75.9 %, by the law at `equivalent`."""

    epochs: float
    """Epochs of the schedule."""

    warmup_epochs: float
    clean_epochs: float
    is_given: bool
    """True if the recipe is given, and is not a point."""

    @property
    def samples(self) -> int:
        """Number of training images."""
        return self.base.data.train_split

    @property
    def name(self) -> str:
        """Name of the suggested recipe, and of its file."""
        kept = self.base.name if self.is_given else self.base.model.name
        return f"{kept[:60]}-{self.batch}-suggested"


def suggest(batch: int, *, base: Recipe | None = None, epochs: float | None = None) -> Suggestion:
    """Choose settings for a batch, with the images and the network of a recipe or of ImageNet.

    Raises RecipeError where no published run has such a batch, and where it cannot be divided into
    BatchNorm spans.
    """
    points = reference_points()
    samples = IMAGES if base is None else base.data.train_split
    equivalent = batch * IMAGES / samples
    _require_in_range(batch, equivalent, smallest=points[0].batch, share=samples / IMAGES)
    lower, upper = neighbours(equivalent, points)
    alone = lower is upper
    values = {name: interpolate(equivalent, points, value) for name, value in SETTINGS.items()}
    law_epochs = fit_epochs(points)(equivalent)
    if epochs is None:
        by_law = math.ceil(law_epochs * margin(points))
        epochs = lower.schedule_epochs if lower.batch == equivalent else by_law
    has_spans = base is None or base.batch.bn_span is not None
    return Suggestion(
        batch=batch,
        base=base or parse_recipe(read_installed(lower.name)),
        equivalent=equivalent,
        lower=lower,
        upper=upper,
        peak_lr=lower.peak_lr if alone else _digits(values["learning rate"], 4),
        momentum=lower.momentum if alone else round(1 - values["1 - momentum"], 4),
        weight_decay=lower.weight_decay if alone else _digits(values["weight decay"], 3),
        bn_span=_span(batch, values["BatchNorm span"]) if has_spans else None,
        law_epochs=law_epochs,
        epochs=epochs,
        warmup_epochs=_digits(values["warm-up, share of the run"] * epochs, 3),
        clean_epochs=_digits(clean_share() * epochs, 3),
        is_given=base is not None,
    )


def _require_in_range(batch: int, equivalent: float, *, smallest: int, share: float) -> None:
    if smallest <= equivalent <= LARGEST:
        return
    least, most = math.ceil(smallest * share), math.floor(LARGEST * share)
    if equivalent < smallest:
        raise RecipeError(
            f"--batch {batch:,}: suggestions are made from {least:,} to {most:,}, where runs with "
            f"LARS are known. A batch below {least:,} does without LARS: keep SGD, with a learning "
            f"rate of 0.1 for every 256 images (arXiv:1706.02677), here {0.1 * batch / 256:.2g}"
        )
    advice = f"give at most {most:,}" if most >= SPANS[0] else "these images are too few for any"
    raise RecipeError(
        f"--batch {batch:,}: {equivalent:,.0f} on ImageNet by updates in an epoch; the largest "
        f"batch with a run to 75.9 % is {LARGEST:,} (Fujitsu's, MLPerf v0.6); {advice}"
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


def words(found: Suggestion) -> list[str]:
    """Return the sources of a suggestion, and what no point covers, line by line."""
    return [each.figure for each in find(RULES, found)]


def _few_updates(it: Suggestion) -> Numbers | None:
    updates = it.epochs * it.samples / it.batch
    fewest = min(point.schedule_epochs * IMAGES / point.batch for point in reference_points())
    if updates >= FEW * fewest:
        return None
    return {
        "updates": updates, "fewest": fewest, "batch": it.batch * updates / (FEW * fewest),
        "epochs": FEW * fewest * it.batch / it.samples,
    }  # fmt: skip


def _longer_steps(it: Suggestion) -> Numbers | None:
    optimizer = it.base.optimizer
    if not it.is_given or optimizer.kind != "lars":
        return None
    own = it.base.schedule.peak_lr * optimizer.eta / (1 - optimizer.momentum)
    factor = it.peak_lr * ETA / (1 - it.momentum) / own
    return {"factor": factor, "base": it.base.name} if factor > LONGER else None


def _source(it: Suggestion) -> Numbers:
    lower, upper = it.lower.name, it.upper.name
    text = f"settings between {lower} and {upper}, as power laws of the batch"
    if it.lower.batch == it.equivalent:
        text = f"it is a reference point: {lower}"
    elif it.equivalent > it.upper.batch:
        text = (
            f"extrapolates: {it.equivalent:,.0f} is {it.equivalent / it.upper.batch:.2f} times the "
            f"largest point, {upper}, whose settings it keeps"
        )
    return {"source": text}


def _law(it: Suggestion) -> Numbers:
    points = reference_points()
    worst = max(map(abs, epoch_errors(points)))
    return {
        "epochs": it.law_epochs, "low": it.law_epochs * (1 - worst),
        "high": it.law_epochs * (1 + worst), "law": fit_epochs(points),
        "schedule": it.epochs, "ratio": it.epochs / it.law_epochs, "points": margin(points),
    }  # fmt: skip


# fmt: off
RULES: tuple[Rule[Suggestion], ...] = (
    Rule(kind="warning", holds=_few_updates,
         text="warning: {updates:,.0f} updates in all, and the reference points make {fewest:,.0f} "
         "or more: expect the network not to be trained to its end; with these epochs a batch of "
         "{batch:,.0f} makes half as many as they do, with this batch {epochs:,.0f} epochs"),
    Rule(kind="warning", holds=_longer_steps,
         text="warning: rate x eta / (1 - momentum) is {factor:.2g} times that of {base}, and "
         "training may diverge: look for the edge with `largebatch lab range` first"),
    Rule(kind="batch", holds=lambda it: {"it": it} if it.is_given else None,
         text="{it.samples:,} images in batches of {it.batch:,} make as many updates an epoch as "
         "ImageNet in batches of {it.equivalent:,.0f}, which is looked up; learning rate, momentum "
         "and weight decay are from there, and for LARS on ResNet-50"),
    Rule(kind="points", holds=_source, text="{source}"),
    Rule(kind="epochs", holds=_law,
         text="epochs to 75.9 % top-1 on ImageNet: {epochs:.1f} ({low:.1f} to {high:.1f}), from "
         "epochs(B) = {law.shortest:.1f} (1 + B / {law.critical:,.0f}), fitted to the ten points; "
         "the schedule has {schedule:g}, {ratio:.2f} times as many (theirs {points:.2f})"),
)
"""The sources of a suggestion, in the order in which they are printed."""
# fmt: on


def draft(found: Suggestion) -> str:
    """Return the text of the suggested recipe, with the rule of each number."""
    own = found.base.model_dump(mode="json", exclude_unset=True)
    kept = {key: own[key] for key in KEPT if key in own}
    if "execution" in kept:
        kept["execution"] = {k: v for k, v in kept["execution"].items() if k != "device_batch"}
    statistics = {"samples": min(VALIDATION, found.samples)}
    polish = {"clean": {"epochs": found.clean_epochs}, "statistics": statistics}
    tree: dict[str, Any] = {
        "name": found.name,
        "duration": {"epochs": found.epochs},
        **kept,
        "batch": {"global_batch": found.batch, "bn_span": found.bn_span},
        "optimizer": {
            "kind": "lars",
            "convention": "reference",
            "momentum": found.momentum,
            "weight_decay": found.weight_decay,
            "eta": ETA,
            "eps": 0.0,
        },
        "schedule": {
            "peak_lr": found.peak_lr,
            "warmup": {"epochs": found.warmup_epochs},
            "decay": {"kind": "polynomial", "power": 2.0, "end_lr": 1e-4},
            "first_step": 1,
        },
        "polish": None if found.bn_span is None else polish,
    }
    share = found.warmup_epochs / found.epochs
    comments = {
        "duration": f"{found.law_epochs:.1f} to 75.9 % on ImageNet, by the law",
        "data": f"as in {found.base.name}, with network, loss and execution",
        "batch.bn_span": "the nearest divisor",
        "optimizer.momentum": "for LARS",
        "optimizer.weight_decay": "for LARS",
        "optimizer.eta": "MLPerf's, as eps, power and end_lr",
        "schedule.peak_lr": "for LARS",
        "schedule.warmup": f"for LARS; {share:.0%} of the run",
        "polish": "no reference point has it",
        "polish.clean": "the share of Fujitsu's entry",
    }
    if found.bn_span is None:
        comments = {key: comments[key] for key in comments if key[:6] not in {"batch.", "polish"}}
    header = (
        f"{found.name}: written by `largebatch lab suggest`.",
        f"After: {_source(found)['source']}.",
        "Where to begin, not a result. Measured here: not yet.",
    )
    return dump_commented(validate_tree(Recipe, tree, source=found.name), comments, header=header)

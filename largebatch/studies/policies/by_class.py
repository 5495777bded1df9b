"""How policies differ by class: a heat map of the accuracy, policies below each other."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from largebatch.report.interactive import (
    Series,
    add_cells,
    add_hover,
    new_heat_map,
    new_source,
)
from largebatch.report.run import FloatArray
from largebatch.report.table import MISSING
from largebatch.studies.policies.standings import Standing
from largebatch.studies.queue.results import Classes

if TYPE_CHECKING:
    from largebatch.report.interactive import Chart

MOST_CLASSES = 40
"""That are drawn; of more, those in which the policies differ most."""


class ByClass(NamedTuple):
    """The classes of a cell, over the seeds that recorded them."""

    names: tuple[str, ...]
    accuracy: FloatArray
    """Means over seeds, parts of 1; NaN of a class without images."""

    confidence: FloatArray
    """The probability of correct images, mean over them; NaN of a class that is never correct."""

    correct: FloatArray
    samples: FloatArray
    """Sums over seeds."""


def by_class(one: Standing) -> ByClass | None:
    """Return the classes of a cell; None where no seed recorded them."""
    found = [run.classes for run in one.found.seeds if run.classes is not None]
    found = [each for each in found if each.names == found[0].names]
    if not found:
        return None
    samples = np.sum([each.samples for each in found], axis=0).astype(float)
    correct = np.sum([each.correct for each in found], axis=0).astype(float)
    sums = np.sum([_sums(each) for each in found], axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return ByClass(found[0].names, correct / samples, sums / correct, correct, samples)


def _sums(found: Classes) -> FloatArray:
    """Return the confidence of correct images, summed up by class."""
    correct = np.array(found.correct, dtype=float)
    if not found.average_confidence:
        return np.full(len(correct), np.nan)
    means = np.array(found.average_confidence, dtype=float)
    return np.where(correct > 0, means * correct, 0.0)


def shown_classes(found: Sequence[ByClass]) -> list[str]:
    """Return the classes to draw: all, or those in which accuracies lie furthest apart."""
    (names,) = {each.names for each in found}
    if len(names) <= MOST_CLASSES:
        return list(names)
    accuracies = np.array([each.accuracy for each in found])
    spread = accuracies.max(axis=0) - accuracies.min(axis=0)
    widest = np.argsort(-np.nan_to_num(spread), kind="stable")[:MOST_CLASSES]
    return [names[place] for place in sorted(widest)]


def draw_classes(drawn: Sequence[tuple[Series, Standing, ByClass]]) -> "Chart":
    """Draw the cells of one configuration, a row each; one class or more."""
    names = shown_classes([each for _, _, each in drawn])
    lowest = min((_lowest(found) for _, _, found in drawn), default=0.0)
    policies = [look.label for look, _, _ in drawn]
    chart = new_heat_map(x="Class", columns=names, rows=policies, low=100 * min(lowest, 0.99))
    cells = []
    for look, _, found in drawn:
        places = [found.names.index(name) for name in names]
        source = new_source({
            "policy": [look.label] * len(names),
            "class": names,
            "percent": 100 * found.accuracy[places],
            "confidence": [_confidence(found.confidence[place]) for place in places],
            "images": [f"{found.correct[at]:,.0f} of {found.samples[at]:,.0f}" for at in places],
        })  # fmt: skip
        cells.append(add_cells(chart, look, source, "class", "policy", "percent"))
    rows = [("class", "@class"), ("accuracy", "@percent{0.00} %"), ("right", "@images")]
    add_hover(chart, cells, [*rows, ("average confidence", "@confidence")])
    return chart


def _lowest(found: ByClass) -> float:
    """Return the lowest accuracy of a class; 0 where none has images."""
    known = found.accuracy[np.isfinite(found.accuracy)]
    return float(known.min()) if known.size else 0.0


def _confidence(value: float) -> str:
    return MISSING if np.isnan(value) else f"{value:.4f}"

"""How policies differ by class: a heat map of the accuracy, policies below each other."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from largebatch.formatting import MISSING
from largebatch.lab.studies.policies.standings import Standing
from largebatch.lab.studies.queue.results import Classes
from largebatch.report.interactive import Column, Table
from largebatch.report.interactive_charts import Series
from largebatch.report.run import FloatArray

MOST_CLASSES = 40
"""Number of classes that are drawn; of more, those in which the policies differ most."""


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


def classes_table(drawn: Sequence[tuple[Series, ByClass]], *, name: str) -> Table:
    """Return the accuracy of the cells of one configuration, a row each, by class."""
    policies = [found for _, found in drawn]
    first = Column("Policy", [look.label for look, _ in drawn])
    columns = [first, *(_column(label, policies) for label in shown_classes(policies))]
    return Table(
        name=name,
        columns=columns,
        series=[look for look, _ in drawn],
        caption="Percentage of the validation images of each class that is right, over all seeds",
    )


def _column(label: str, policies: Sequence[ByClass]) -> Column:
    """Return one class; the more images a policy gets wrong, the stronger the colour."""
    worst = max(np.nanmax(1 - found.accuracy) for found in policies)
    percent, tooltips = [], []
    for found in policies:
        at = found.names.index(label)
        percent.append(100 * float(found.accuracy[at]))
        tooltips.append(
            f"{found.correct[at]:,.0f} of {found.samples[at]:,.0f} right, average confidence "
            + (MISSING if np.isnan(found.confidence[at]) else f"{found.confidence[at]:.4f}")
        )
    wrong = [0.0 if np.isnan(one) or not worst else (1 - one / 100) / worst for one in percent]
    return Column(label, percent, ".1f", strengths=wrong, tooltips=tooltips)

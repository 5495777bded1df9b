"""The validation images that a model classifies wrongly at the end of a stage."""

import math

import numpy as np

from largebatch.tracking.events import Mistakes, StageName
from largebatch.training.evaluation import Answer

WORST = 16
"""Number of images with the largest loss that are recorded."""


def find_mistakes(
    found: Answer, *, stage: StageName, step: int, classes: tuple[str, ...]
) -> Mistakes:
    """Return the mistakes; a loss that is NaN counts as the largest."""
    wrong = np.flatnonzero(found.label != found.predicted)
    sizes = np.where(np.isnan(found.loss[wrong]), math.inf, found.loss[wrong])
    worst = wrong[np.argsort(-sizes, kind="stable")[:WORST]]
    return Mistakes(
        stage=stage,
        step=step,
        classes=classes,
        sizes=tuple(np.bincount(found.label, minlength=len(classes)).tolist()),
        samples=tuple(found.sample[wrong].tolist()),
        labels=tuple(found.label[wrong].tolist()),
        predicted=tuple(found.predicted[wrong].tolist()),
        worst=tuple(found.sample[worst].tolist()),
        losses=tuple(found.loss[worst].tolist()),
    )

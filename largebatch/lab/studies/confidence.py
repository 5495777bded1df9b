"""How confident a trained model is of the images that it gets right, as in LRBench.

The confidence of an image is the highest probability that the model gives to a class. Its mean and
deviations over the correct images are defined as in LRBench's code (arXiv:1908.06477).
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from largebatch.runs.checkpoints import evaluate_checkpoint
from largebatch.runs.options import Options
from largebatch.training.evaluation import five_best


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """Means and deviations over the correct images; NaN where none is correct.

    Deviations divide by the number of images, which are the whole population.
    """

    average_confidence: float
    """AC: mean confidence."""

    confidence_deviation: float
    """CD: standard deviation of the confidence."""

    class_confidence_deviation: float
    """CDAC: standard deviation of the classes' averages, without classes that have none."""

    classes_never_correct: int
    """Number of classes that have images, none of them correct."""

    samples: tuple[int, ...]
    correct: tuple[int, ...]
    averages: tuple[float, ...]
    """Images, correct ones, and their mean confidence, by class."""


class Confidences:
    """Collects the confidence of every image that this worker evaluates."""

    def __init__(self) -> None:
        self._labels: list[Tensor] = []
        self._correct: list[Tensor] = []
        self._values: list[Tensor] = []
        self._num_classes = 0

    def add(self, scores: Tensor, labels: Tensor) -> None:
        """Add one batch; pass it to `evaluate` as `each`."""
        self._num_classes = scores.shape[1]
        self._labels.append(labels)
        self._correct.append(five_best(scores)[:, 0] == labels)
        self._values.append(scores.double().softmax(1).amax(1))

    def measure(self) -> Confidence:
        """Return the confidence over at least one image."""
        labels, correct, values = (
            torch.cat(parts).cpu().numpy() for parts in (self._labels, self._correct, self._values)
        )
        size = self._num_classes
        samples = np.bincount(labels, minlength=size)
        right = np.bincount(labels[correct], minlength=size)
        sums = np.bincount(labels[correct], weights=values[correct], minlength=size)
        averages = np.where(right > 0, sums / np.maximum(right, 1), np.nan)
        known = right.any()
        return Confidence(
            average_confidence=values[correct].mean().item() if known else math.nan,
            confidence_deviation=values[correct].std().item() if known else math.nan,
            class_confidence_deviation=averages[right > 0].std().item() if known else math.nan,
            classes_never_correct=int(np.count_nonzero((samples > 0) & (right == 0))),
            samples=tuple(samples.tolist()),
            correct=tuple(right.tolist()),
            averages=tuple(averages.tolist()),
        )


def measure_confidence(run: Path, options: Options) -> Confidence:
    """Evaluate the newest checkpoint of a run folder in this process; return its confidence."""
    found = Confidences()
    evaluate_checkpoint(run, options, each=found.add)
    return found.measure()

"""The confidence metrics of LRBench (arXiv:1908.06477) in float64 NumPy, sample by sample."""

import math

import numpy as np
from torch import Tensor

from largebatch.training.evaluation import Metrics


def assert_confident(metrics: Metrics, logits: Tensor, labels: Tensor) -> None:
    """Compare with NumPy's means and deviations of a list of all confidences."""
    scores, truth = logits.double().numpy(), labels.numpy()
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    confidence = 1 / powers.sum(axis=1)
    correct = scores.argmax(axis=1) == truth
    own = [confidence[correct & (truth == label)] for label in range(scores.shape[1])]
    means = [float(each.mean()) if len(each) else math.nan for each in own]
    classes = metrics.by_class
    assert classes.samples == tuple(np.bincount(truth, minlength=scores.shape[1]).tolist())
    assert classes.correct == tuple(map(len, own))
    np.testing.assert_allclose(classes.average_confidence, means, rtol=1e-13)
    found = (
        metrics.average_confidence,
        metrics.confidence_deviation,
        metrics.class_confidence_deviation,
    )
    expected = confidence[correct].mean(), confidence[correct].std(), np.nanstd(means)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    never = sum(not len(each) and (truth == label).any() for label, each in enumerate(own))
    assert metrics.classes_never_correct == never

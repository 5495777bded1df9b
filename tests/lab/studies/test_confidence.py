"""Average confidence and its deviations: values by hand, and NumPy's."""

import math

import numpy as np
import pytest
import torch
from largebatch.lab.studies.confidence import Confidence, Confidences
from torch import Tensor

SAMPLES, CLASSES, NONE, NEVER, LATE = 211, 11, 4, 7, 10

PROBABILITIES = [
    ([0.7, 0.1, 0.1, 0.1], 0),
    ([0.5, 0.2, 0.2, 0.1], 0),
    ([0.1, 0.6, 0.2, 0.1], 0),
    ([0.6, 0.2, 0.1, 0.1], 2),
    ([0.05, 0.02, 0.03, 0.9], 3),
]
"""Labels: class 1 has no sample, class 2 no correct one, and class 3 comes last."""


def measure(scores: Tensor, labels: Tensor, size: int) -> Confidence:
    found = Confidences()
    for part in zip(scores.split(size), labels.split(size), strict=True):
        found.add(*part)
    return found.measure()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_confidence_by_hand(size: int) -> None:
    rows, labels = zip(*PROBABILITIES, strict=True)
    found = measure(torch.tensor(rows, dtype=torch.float64).log(), torch.tensor(labels), size)
    # correct are the first, the second and the last: (0.7 + 0.5 + 0.9) / 3
    assert found.average_confidence == pytest.approx(0.7, rel=1e-14)
    # 0.7 is 0 from this mean, 0.5 and 0.9 are 0.2: the root of (0 + 0.04 + 0.04) / 3
    assert found.confidence_deviation == pytest.approx(math.sqrt(0.08 / 3), rel=1e-14)
    # class 0 has (0.7 + 0.5) / 2 and class 3 has 0.9: both 0.15 from their mean, 0.75
    assert found.class_confidence_deviation == pytest.approx(0.15, rel=1e-14)
    assert found.classes_never_correct == 1
    assert (found.samples, found.correct) == ((3, 0, 1, 1), (2, 0, 0, 1))
    expected = (0.6, math.nan, math.nan, 0.9)
    assert found.averages == pytest.approx(expected, rel=1e-14, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_confidence_is_numpys(dtype: torch.dtype) -> None:
    """Most samples are correct; one class is absent, one never correct, one only at the end."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, LATE, (SAMPLES,), generator=generator)
    labels[labels == NONE], labels[-3:] = 0, LATE
    logits = torch.randn(SAMPLES, CLASSES, generator=generator)
    logits[torch.arange(SAMPLES), labels] += 2.0
    logits[:, NEVER] -= 100.0
    found = measure(logits.to(dtype), labels, 64)
    scores, truth = logits.to(dtype).double().numpy(), labels.numpy()
    confidence = 1 / np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1)
    correct = scores.argmax(axis=1) == truth
    own = [confidence[correct & (truth == label)] for label in range(CLASSES)]
    means = [each.mean() if len(each) else math.nan for each in own]
    np.testing.assert_allclose(found.averages, means, rtol=1e-13)
    assert found.average_confidence == pytest.approx(confidence[correct].mean(), rel=1e-12)
    assert found.confidence_deviation == pytest.approx(confidence[correct].std(), rel=1e-12)
    assert found.class_confidence_deviation == pytest.approx(np.nanstd(means), rel=1e-12)
    assert found.correct == tuple(map(len, own))


def test_without_a_correct_sample_there_is_no_confidence() -> None:
    found = measure(-torch.eye(3), torch.arange(3), 2)
    assert math.isnan(found.average_confidence)
    assert math.isnan(found.confidence_deviation)
    assert math.isnan(found.class_confidence_deviation)
    assert found.classes_never_correct == 3

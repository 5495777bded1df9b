"""Average confidence and its deviations: values by hand, NumPy, and any division of the samples."""

import math
from typing import Any

import pytest
import torch
from confidence import assert_confident
from threads import Thread, on_threads
from torch import Tensor, nn

from largebatch.distributed.serial import Serial
from largebatch.training.evaluation import Metrics, evaluate

CPU = Serial(torch.device("cpu"))
SAMPLES, CLASSES, NONE, NEVER, LATE = 211, 11, 4, 7, 10

PROBABILITIES = [
    ([0.7, 0.1, 0.1, 0.1], 0),
    ([0.5, 0.2, 0.2, 0.1], 0),
    ([0.1, 0.6, 0.2, 0.1], 0),
    ([0.6, 0.2, 0.1, 0.1], 2),
    ([0.05, 0.02, 0.03, 0.9], 3),
]
"""Labels: class 1 has no sample, class 2 no correct one, and class 3 comes last."""


def by_hand() -> tuple[Tensor, Tensor]:
    rows, labels = zip(*PROBABILITIES, strict=True)
    return torch.tensor(rows, dtype=torch.float64).log(), torch.tensor(labels)


def measure(logits: Tensor, labels: Tensor, *sizes: int) -> Metrics:
    """Evaluate in batches of these sizes; the last repeats."""
    size = sizes[-1]
    cut = [*sizes, *[size] * (len(labels) // size)]
    parts, start = [], 0
    for number in cut:
        parts.append((logits[start : start + number], labels[start : start + number]))
        start += number
    filled = [part for part in parts if len(part[1])]
    return evaluate(nn.Identity(), filled, CPU, expected=len(labels))


@pytest.mark.parametrize("sizes", [(5,), (4, 1), (1,), (2, 3)])
def test_confidence_by_hand(sizes: tuple[int, ...]) -> None:
    metrics = measure(*by_hand(), *sizes)
    assert metrics.top1 == 3 / 5
    # correct are the first, the second and the last: (0.7 + 0.5 + 0.9) / 3
    assert metrics.average_confidence == pytest.approx(0.7, rel=1e-14)
    # 0.7 lies 0 from this mean, 0.5 and 0.9 lie 0.2: the root of (0 + 0.04 + 0.04) / 3
    assert metrics.confidence_deviation == pytest.approx(math.sqrt(0.08 / 3), rel=1e-14)
    # class 0 has (0.7 + 0.5) / 2 and class 3 has 0.9: both 0.15 from their mean, 0.75
    assert metrics.class_confidence_deviation == pytest.approx(0.15, rel=1e-14)
    assert metrics.classes_never_correct == 1
    assert metrics.by_class.samples == (3, 0, 1, 1)
    assert metrics.by_class.correct == (2, 0, 0, 1)
    expected = (0.6, math.nan, math.nan, 0.9)
    assert metrics.by_class.average_confidence == pytest.approx(expected, rel=1e-14, nan_ok=True)


def test_the_loss_by_hand() -> None:
    probabilities = [0.7, 0.5, 0.1, 0.1, 0.9]
    expected = -sum(map(math.log, probabilities)) / 5
    assert measure(*by_hand(), 2).loss == pytest.approx(expected, rel=1e-14)


def random_scores() -> tuple[Tensor, Tensor]:
    """Most samples are correct; one class is absent, one never correct, one only at the end."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, LATE, (SAMPLES,), generator=generator)
    labels[labels == NONE], labels[-3:] = 0, LATE
    logits = torch.randn(SAMPLES, CLASSES, generator=generator)
    logits[torch.arange(SAMPLES), labels] += 2.0
    logits[:, NEVER] -= 100.0
    return logits, labels


@pytest.mark.parametrize("sizes", [(SAMPLES,), (1,), (64, 7, 100), (SAMPLES - 1,)])
def test_confidence_is_numpys_whatever_the_batches(sizes: tuple[int, ...]) -> None:
    logits, labels = random_scores()
    metrics = measure(logits, labels, *sizes)
    assert_confident(metrics, logits, labels)
    assert metrics.classes_never_correct == 1
    assert metrics.by_class.samples[NONE] == 0
    assert metrics.by_class.correct[LATE] > 0


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_confidence_is_numpys_whatever_the_workers(workers: int) -> None:
    """The last class is on one worker only, and shares differ; worker 2 has no sample."""
    logits, labels = random_scores()
    bounds = [0, 150, SAMPLES, SAMPLES] if workers > 1 else [0, SAMPLES]

    def work(worker: Thread) -> Metrics:
        backend: Any = worker
        own = slice(bounds[worker.rank], bounds[worker.rank + 1])
        batches = zip(logits[own].split(40), labels[own].split(40), strict=True)
        filled = [batch for batch in batches if len(batch[1])]
        return evaluate(nn.Identity(), filled, backend, expected=SAMPLES)

    for metrics in on_threads(work, workers=workers):
        assert_confident(metrics, logits, labels)


def test_a_deviation_far_below_the_mean_is_not_lost() -> None:
    """1e-9 around 0.4: a sum of squares in float64 would be off by ten times that."""
    generator = torch.Generator().manual_seed(1)
    top = 0.4 + 1e-9 * torch.randn(300, dtype=torch.float64, generator=generator)
    logits = torch.stack([top, (1 - top) / 2, (1 - top) / 2], dim=1).log()
    metrics = measure(logits, torch.zeros(300, dtype=torch.int64), 32)
    assert metrics.confidence_deviation == pytest.approx(top.numpy().std(), rel=1e-6)


def test_half_precision_scores_lose_nothing_more() -> None:
    logits, labels = random_scores()
    halves = logits.half()
    assert_confident(measure(halves, labels, 50), halves, labels)


def test_without_a_correct_sample_there_is_no_confidence() -> None:
    metrics = measure(-torch.eye(3), torch.arange(3), 2)
    assert metrics.top1 == 0
    assert math.isnan(metrics.average_confidence)
    assert math.isnan(metrics.confidence_deviation)
    assert math.isnan(metrics.class_confidence_deviation)
    assert metrics.classes_never_correct == 3


def test_scores_that_are_no_numbers_leave_other_classes_alone() -> None:
    logits, labels = by_hand()
    logits[3, 0] = math.nan  # of class 2, taken for class 0
    metrics = measure(logits, labels, 2)
    assert math.isnan(metrics.loss)
    assert metrics.average_confidence == pytest.approx(0.7)


def test_workers_with_other_classes_are_an_error_on_all_of_them() -> None:
    def work(worker: Thread) -> str:
        backend: Any = worker
        batch = torch.eye(3 + worker.rank), torch.arange(3 + worker.rank)
        with pytest.raises(ValueError, match="other classes") as found:
            evaluate(nn.Identity(), [batch], backend)
        return str(found.value)

    assert on_threads(work, workers=2) == ["workers have scores for other classes: [3, 4]"] * 2

"""Records of trained runs: LRBench's confidences by hand and by NumPy, and usage over workers."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_runs import FakeRun
from torch import Tensor

from largebatch.lab.studies.trained import Confidences, usage_of
from largebatch.report.run import read_run
from largebatch.tracking.events import SYSTEM

SAMPLES, CLASSES, NONE, NEVER, LATE = 211, 11, 4, 7, 10

PROBABILITIES = [
    ([0.7, 0.1, 0.1, 0.1], 0),
    ([0.5, 0.2, 0.2, 0.1], 0),
    ([0.1, 0.6, 0.2, 0.1], 0),
    ([0.6, 0.2, 0.1, 0.1], 2),
    ([0.05, 0.02, 0.03, 0.9], 3),
]
"""Labels: class 1 has no sample, class 2 no correct one, and class 3 comes last."""


def measure(scores: Tensor, labels: Tensor, size: int) -> tuple[float | None, ...]:
    found = Confidences()
    for part in zip(scores.split(size), labels.split(size), strict=True):
        found.add(*part)
    return tuple(found.measure().values())


@pytest.mark.parametrize("size", [1, 2, 5])
def test_confidence_by_hand(size: int) -> None:
    rows, labels = zip(*PROBABILITIES, strict=True)
    found = measure(torch.tensor(rows, dtype=torch.float64).log(), torch.tensor(labels), size)
    # correct are the first, the second and the last: (0.7 + 0.5 + 0.9) / 3
    # 0.7 is 0 from this mean, 0.5 and 0.9 are 0.2: the root of (0 + 0.04 + 0.04) / 3
    # class 0 has (0.7 + 0.5) / 2 and class 3 has 0.9: both 0.15 from their mean, 0.75
    assert found == pytest.approx((0.7, math.sqrt(0.08 / 3), 0.15), rel=1e-14)


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
    deviation = np.std([each.mean() for each in own if len(each)])
    right = confidence[correct]
    assert found == pytest.approx((right.mean(), right.std(), deviation), rel=1e-12)


def test_without_a_correct_sample_there_is_no_confidence() -> None:
    assert measure(-torch.eye(3), torch.arange(3), 2) == (None, None, None)


def test_usage_is_summed_over_records_and_workers(tmp_path: Path) -> None:
    draw = np.random.default_rng(4)
    seconds = np.repeat(draw.uniform(0.5, 2.0, (5, 1)), 2, axis=1)
    table = {
        "cpu_percent": draw.uniform(50, 200, (5, 2)),
        "peak_memory_bytes": np.sort(draw.uniform(1e8, 9e8, (5, 2)), axis=0),
        "gpu_percent": np.full((5, 2), 75.0),
        "seconds": seconds,
    }
    run = FakeRun(tmp_path / "run")
    for step in range(5):
        record = {name: [None, None] for name in SYSTEM}
        record |= {name: list(values[step]) for name, values in table.items()}
        run.records.append({"event": "system", "stage": "train", "step": step, **record})
    found = usage_of(read_run(run.write()))
    cpu = (table["cpu_percent"] * seconds).sum() / 100
    assert found["cpu_seconds"] == pytest.approx(cpu)
    assert found["cores"] == pytest.approx(cpu / seconds[:, 0].sum())
    assert found["peak_memory_bytes"] == table["peak_memory_bytes"][-1].sum()
    assert found["gpu_percent"] == pytest.approx(75)
    assert math.isnan(found["gpu_memory_bytes"])

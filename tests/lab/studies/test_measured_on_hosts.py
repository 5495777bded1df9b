"""How a measurement is put together from its workers, and what is raised for those that failed."""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from largebatch.errors import StudyError, WorkerFailedError
from largebatch.lab.studies.hosts import PacedCriterion, Placement, put_together, raise_cause
from largebatch.lab.studies.study import Compute


@pytest.mark.parametrize(
    ("codes", "error", "message"),
    [
        pytest.param([3, -9, 3], WorkerFailedError, "worker 1 .*: killed by signal 9", id="killed"),
        pytest.param([None, 1, 3], WorkerFailedError, "worker 1 .*: exit code 1", id="crashed"),
        pytest.param([3, 1, 2], StudyError, "^of 2$", id="mistake"),
        pytest.param([0, 3, None], WorkerFailedError, "worker 1 .*: exit code 3", id="lost"),
    ],
)
def test_the_failure_that_another_one_did_not_cause_is_raised(
    tmp_path: Path, codes: Sequence[int | None], error: type[Exception], message: str
) -> None:
    for rank in range(len(codes)):
        (tmp_path / f"output-{rank}").write_text(f"at first\nof {rank}\n")
    with pytest.raises(error, match=message):
        raise_cause(codes, tmp_path)


def test_what_starts_and_ends_a_stretch_falls_out_of_the_counters() -> None:
    """Rests of 70 bytes, updates of 1,000, one of which begins each stretch; four are timed."""

    def worker(rank: int, *, offset: int) -> dict[str, Any]:
        marks = list(itertools.accumulate([offset, 70 + 1000, 70 + 1000 + 4 * 1000]))
        return {
            "rank": rank,
            "counters": [[2 * mark, mark] for mark in marks],
            "seconds": [0.5] * 4 if rank == 0 else [],
            "rates": ["0x1p0"],
            "gradients": 6,
            "late": rank,
            "shards": [7],
        }

    placement = Placement(workers_per_host=(2, 1), megabits=None)
    workers = [worker(rank, offset=offset) for rank, offset in enumerate((5, 10**9, 0))]
    found = put_together(workers, placement, updates=4)
    assert found.sent == {"host1": 1000.0, "host2": 1000.0}
    assert found.received == {"host1": 2000.0, "host2": 2000.0}
    assert found.late == (0 + 1 + 2) / 18
    assert len(found.rates) == 3


def test_a_gradient_takes_the_time_that_is_set_and_one_that_took_longer_is_late() -> None:
    """Its value is that of the criterion; evaluation is not slept for."""

    def criterion(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels).square().sum()

    model = nn.Linear(1, 1)
    paced = PacedCriterion(criterion, model, iter([0.05, 1e-9]))
    begun = time.perf_counter()
    outputs = model(torch.ones(1, 1))
    loss = paced(outputs, torch.zeros(1, 1))
    assert time.perf_counter() - begun >= 0.05
    assert loss == criterion(outputs, torch.zeros(1, 1))
    paced(model(torch.ones(1, 1)), torch.zeros(1, 1))
    with torch.no_grad():
        paced(model(torch.ones(1, 1)), torch.zeros(1, 1))
    assert (paced.gradients, paced.late) == (2, 1)


def test_the_times_of_a_worker_follow_from_its_samples_and_the_seed_alone() -> None:
    compute = Compute.model_validate_json(
        '{"overhead": 0.5, "sample": 0.01, "factor": {"kind": "recorded", "seconds": [0.5, 1.5]}}'
    )

    def first(samples: int, *, seed: int, worker: int) -> list[float]:
        return list(itertools.islice(compute.times(samples, seed=seed, worker=worker), 50))

    times = first(50, seed=1, worker=0)
    assert set(times) == {0.5, 1.5}  # of a second
    assert first(150, seed=1, worker=0) == [2 * each for each in times]
    assert first(50, seed=1, worker=0) == times
    assert first(50, seed=1, worker=1) != times != first(50, seed=2, worker=0)

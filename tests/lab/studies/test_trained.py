"""Records of trained runs: usage over workers."""

import math
from pathlib import Path

import numpy as np
import pytest
from fake_runs import FakeRun

from largebatch.lab.studies.trained import usage_of
from largebatch.report.run import read_run
from largebatch.tracking.events import SYSTEM


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

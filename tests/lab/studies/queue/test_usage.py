"""What a run has used, by its log: sums over records and workers, against NumPy."""

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from fake_runs import FakeRun

from largebatch.lab.studies.queue.usage import usage_of, watch_others
from largebatch.report.run import read_run
from largebatch.tracking.events import SYSTEM


def a_log(folder: Path, table: dict[str, Any]) -> Path:
    """Write a run with a record of what two workers used after each of its first updates."""
    run = FakeRun(folder)
    for step in range(len(table["seconds"])):
        columns = {name: [None, None] for name in SYSTEM}
        columns |= {name: list(values[step]) for name, values in table.items()}
        run.records.append({"event": "system", "stage": "train", "step": step, **columns})
    return run.write()


def test_what_is_used_is_summed_over_records_and_workers(tmp_path: Path) -> None:
    draw = np.random.default_rng(4)
    seconds = np.repeat(draw.uniform(0.5, 2.0, (5, 1)), 2, axis=1)
    table = {
        "cpu_percent": draw.uniform(50, 200, (5, 2)),
        "peak_memory_bytes": np.sort(draw.uniform(1e8, 9e8, (5, 2)), axis=0),
        "read_bytes_per_second": draw.uniform(0, 1e6, (5, 2)),
        "written_bytes_per_second": draw.uniform(0, 1e6, (5, 2)),
        "gpu_percent": np.full((5, 2), 75.0),
        "seconds": seconds,
    }
    found = usage_of(read_run(a_log(tmp_path / "run", table)))
    cpu = (table["cpu_percent"] * seconds).sum() / 100
    assert found.cpu_seconds == pytest.approx(cpu)
    assert found.cores == pytest.approx(cpu / seconds[:, 0].sum())
    assert found.peak_memory_bytes == table["peak_memory_bytes"][-1].sum()
    assert found.read_bytes == pytest.approx((table["read_bytes_per_second"] * seconds).sum())
    assert found.gpu_percent == pytest.approx(75)
    assert math.isnan(found.gpu_memory_bytes)


def test_an_older_log_has_no_sums(tmp_path: Path) -> None:
    """Its records do not tell how long they are."""
    run = FakeRun(tmp_path / "run")
    columns = {name: [1.0] for name in SYSTEM if name not in {"seconds", "peak_memory_bytes"}}
    run.records.append({"event": "system", "stage": "train", "step": 0, **columns})
    assert math.isnan(usage_of(read_run(run.write())).cpu_seconds)


def test_cores_of_others_are_those_that_this_process_and_its_children_did_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def readings() -> Iterator[tuple[float, SimpleNamespace, tuple[float, ...]]]:
        yield 100.0, SimpleNamespace(user=50.0, nice=1.0, system=9.0, idle=40.0), (1, 1, 4, 2, 0)
        yield 110.0, SimpleNamespace(user=62.0, nice=1.0, system=12.0, idle=45.0), (2, 1, 6, 3, 0)

    every = list(readings())
    for place, (module, name) in enumerate(
        ((time, "monotonic"), (psutil, "cpu_times"), (os, "times"))
    ):
        values = iter([row[place] for row in every])
        monkeypatch.setattr(module, name, lambda values=values: next(values))
    others = watch_others()
    assert others() == pytest.approx((15 - 4) / 10)

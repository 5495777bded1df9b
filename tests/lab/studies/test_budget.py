"""The time that dry runs print: of what it is the sum."""

import dataclasses
import subprocess
from pathlib import Path

import pytest
from short_servers import write_study as write_servers
from short_staleness import STUDY, write_study

from largebatch.lab.studies import budget
from largebatch.lab.studies.budget import describe_total, seconds_of_runs, seconds_of_starts
from largebatch.lab.studies.hosts.namespaces import payload_bandwidth
from largebatch.lab.studies.hosts.starts import Start, starts_of
from largebatch.lab.studies.servers import study as servers
from largebatch.lab.studies.staleness.run import runs_of
from largebatch.lab.studies.staleness.study import cells_of, load_study
from largebatch.recipe.recipe import Recipe


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Batches whose updates were measured; each sample of them takes half a second."""
    batches: list[int] = []

    def step_seconds(recipe: Recipe) -> float:
        batches.append(recipe.batch.global_batch)
        return 0.5 * batches[-1]

    monkeypatch.setattr(budget, "_step_seconds", step_seconds)
    return batches


def test_runs_of_learners_take_the_time_of_all_their_gradients(
    tmp_path: Path, measured: list[int]
) -> None:
    """6 updates of 4 gradients with waiting and of 1 without, measured once for each mu."""
    grid = {**STUDY["grids"][0], "mu": [8, 16]}
    cells = cells_of(load_study(str(write_study(tmp_path, grids=[grid]))), tmp_path)
    runs = runs_of(cells, seeds=2, out=tmp_path)
    assert seconds_of_runs(runs) == 2 * 6 * (4 + 1) * 0.5 * (8 + 16)
    assert measured == [8, 16]
    assert seconds_of_runs([]) == 0.0


def starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Start]:
    """Return a start of each layout by its name, on a machine with 2 cores."""
    monkeypatch.setattr(budget, "available_cores", lambda: 2)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(servers, "find_spec", lambda _: None)
    cells = servers.cells_of(servers.load_study(str(write_servers(folder))), folder)
    return {start.cell: start for start in starts_of(cells, repeats=1, data={}, out=folder)}


def test_a_start_on_hosts_takes_its_gradients_and_what_the_busiest_link_carries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = starts(tmp_path, monkeypatch)
    alone, central, ring = (found[f"lenet5-{name}"] for name in ("alone-1", "central-2", "ring-2"))
    assert central.placement.megabits is not None
    each = seconds_of_starts([alone])
    updates = alone.job.stretches[-1]
    assert alone.job.compute is not None
    assert each == pytest.approx(updates * next(
        alone.job.compute.times(alone.job.samples, seed=1, worker=0)
    ), rel=0.5)  # fmt: skip
    link = payload_bandwidth(central.placement.megabits)
    weights = 4 * 431_080  # LeNet-5
    assert seconds_of_starts([ring]) - each == pytest.approx(updates * weights / link, rel=0.05)
    assert seconds_of_starts([central]) - each == pytest.approx(
        updates * 4 * weights / link, rel=0.05
    )
    assert seconds_of_starts([]) == 0.0


def test_gradients_without_a_set_time_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[int]
) -> None:
    central = starts(tmp_path, monkeypatch)["lenet5-central-2"]
    job = dataclasses.replace(central.job, compute=None, samples=16)
    placement = dataclasses.replace(central.placement, megabits=None)
    start = dataclasses.replace(central, job=job, placement=placement)
    assert seconds_of_starts([start]) == pytest.approx(job.stretches[-1] * 2 * 8.0, rel=1e-3)
    assert measured == [16]


def test_processes_share_the_time() -> None:
    assert describe_total("3 runs", 7200.0, processes=2) == (
        "3 runs; about 1:00:00 of forward, backward and update in 2 processes on this machine"
    )

"""Studies of scaling: their cells, rates bit for bit, and efficiency."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from on_hosts import needs_hosts
from short_studies import SCALING, cells_in, write_study

from largebatch.lab.studies.hosts import Start, applied_rates
from largebatch.lab.studies.runner import study
from largebatch.lab.studies.scaling import ScalingCell, make_page, rows_of, unequal_rates
from largebatch.lab.studies.store import Store
from largebatch.lab.studies.study import Machine, load_study
from largebatch.report.pages import Table
from largebatch.schedules.functions import warmup

LATE = 3
"""The update in which a worker still has the rate before."""


def cells_here(folder: Path, **changes: Any) -> dict[str, ScalingCell]:  # noqa: ANN401 -- parts of a study
    found = cells_in(folder, SCALING, **changes)
    return {cell.name: cell for cell in found if isinstance(cell, ScalingCell)}


def test_weak_and_strong_scaling_meet_at_the_most_workers(tmp_path: Path) -> None:
    cells = cells_here(tmp_path, scaling__workers=[2, 4])
    sizes = {name: cell.recipe.batch.global_batch for name, cell in cells.items()}
    assert sizes == {
        "lenet5/1x16-one-host": 2,
        "lenet5/2x16-one-host": 4,
        "lenet5/2x16-hosts": 4,
        "lenet5/4x16-one-host": 8,
        "lenet5/4x16-hosts": 8,
        "lenet5/1x64-one-host": 8,
        "lenet5/2x32-one-host": 8,
        "lenet5/2x32-hosts": 8,
    }
    assert cells["lenet5/4x16-one-host"].workers_per_host == (4,)
    assert cells["lenet5/4x16-hosts"].workers_per_host == (1, 1, 1, 1)


def applied(*, late: bool) -> list[str]:
    """Return the rates of a worker that makes six updates, one of them perhaps at an old rate."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [weight]}], lr=1.0)
    schedule = warmup(lambda _: 0.1, steps=5)
    with applied_rates(optimizer) as rates:
        for step in range(6):
            for group in optimizer.param_groups:
                group["lr"] = schedule(step - 1 if late and step == LATE else step)
            weight.grad = torch.ones(1)
            optimizer.step()
    optimizer.step()
    return rates


def test_a_rate_that_arrives_late_on_one_worker_is_found_bit_for_bit() -> None:
    good, bad = applied(late=False), applied(late=True)
    assert [float.fromhex(rate) for rate in good] == [0.1 * k / 5 for k in range(5)] + [0.1]
    assert unequal_rates(Start(seconds=[1.0], rates=[good, good])) == ""
    assert unequal_rates(Start(seconds=[1.0], rates=[good, good, bad])) == (
        f"in update {LATE} worker 0 has {good[LATE]} and worker 2 {bad[LATE]}"
    )
    near = [*good[:-1], float(np.nextafter(0.1, 1)).hex()]
    assert unequal_rates(Start(seconds=[1.0], rates=[good, near])).startswith("in update 5")
    assert unequal_rates(Start(seconds=[1.0], rates=[good, good[:-1]])).startswith(
        "worker 1 made 5"
    )


SECONDS = {
    "lenet5/1x16-one-host": 0.030,
    "lenet5/2x16-one-host": 0.032,
    "lenet5/2x16-hosts": 0.040,
    "lenet5/1x32-one-host": 0.050,
}


def made(folder: Path, *, rates: list[list[str]]) -> dict[str, Any]:
    """Return records of three starts of every cell."""
    return {
        cell.name: {
            f"seed-{seed}": {
                "seed": seed,
                "start": asdict(
                    Start(seconds=[SECONDS[cell.name] * (1 + 0.01 * seed)] * 3, rates=rates)
                ),
            }
            for seed in (1, 2, 3)
        }
        for cell in cells_here(folder).values()
    }


def test_efficiency_is_against_as_many_times_one_worker(tmp_path: Path) -> None:
    records = made(tmp_path, rates=[["0x1p0"]] * 2)
    found = rows_of(list(cells_here(tmp_path).values()), records)
    rows = {(row.kind, row.cell.name): row for row in found}
    weak = rows["weak", "lenet5/2x16-hosts"]
    strong = rows["strong", "lenet5/2x16-hosts"]
    assert len(rows) == 6
    assert weak.efficiency is not None
    assert strong.efficiency is not None
    assert weak.efficiency.mean == pytest.approx(100 * 0.030 / 0.040)
    assert strong.efficiency.mean == pytest.approx(100 * 0.050 / (2 * 0.040))
    assert weak.ideal is not None
    assert weak.ideal == pytest.approx(
        2 * np.mean([16 / (0.03 * (1 + k / 100)) for k in (1, 2, 3)])
    )
    assert 100 * weak.throughput.mean / weak.ideal == pytest.approx(weak.efficiency.mean)


def test_the_page_has_every_row_and_names_different_rates(tmp_path: Path) -> None:
    good, bad = applied(late=False), applied(late=True)
    records = made(tmp_path, rates=[good, good])
    given = load_study(tmp_path / "study.yaml")
    page = make_page(given, tmp_path, records)
    assert any("the same learning rate, bit for bit" in line for line in page.findings)
    table = page.sections[0].parts[0]
    assert isinstance(table, Table)
    found = {column.title: list(column.values) for column in table.columns}
    assert found["Cell"][:3] == ["lenet5/1x16-one-host", *list(SECONDS)[1:3]]
    assert found["Efficiency, %"][2] == pytest.approx(75)
    assert page.is_sound
    assert "<svg" in page.html()
    worse = make_page(given, tmp_path, made(tmp_path, rates=[good, bad]))
    assert sum(line.startswith("RATES DIFFER") for line in worse.findings) == len(SECONDS) * 3
    assert not worse.is_sound


@pytest.mark.long
@needs_hosts
def test_workers_in_one_host_and_on_hosts_apply_equal_rates(tmp_path: Path) -> None:
    """A real start of each cell; the rates are those of the recipe's schedule."""
    path, lines = write_study(tmp_path, SCALING), list[str]()
    assert study(path, out=tmp_path / "out", machine=Machine(), report=lines.append)
    assert "bit for bit, in each of 10 updates of 2 starts" in lines[-1]
    for cell in cells_here(tmp_path).values():
        record = Store(tmp_path / "out").read(cell, cell.slots[0])
        assert record is not None
        rates = record["start"]["rates"]
        assert len(rates) == cell.workers
        steps = [float.fromhex(rate) for rate in rates[0]]
        assert steps == pytest.approx([0.0, 0.01, 0.02, 0.002, 0.002])

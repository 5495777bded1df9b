"""Studies of scaling: their cells, rates bit for bit, and efficiency."""

from pathlib import Path
from typing import Any

import pytest
from on_hosts import needs_hosts
from short_studies import SCALING, cells_in, write_study

from largebatch.lab.studies.hosts import HostsCell
from largebatch.lab.studies.runner import study
from largebatch.lab.studies.scaling import make_page, rows_of
from largebatch.lab.studies.store import Store
from largebatch.lab.studies.study import Machine, load_study
from largebatch.report.pages import Table


def cells_here(folder: Path, **changes: Any) -> dict[str, HostsCell]:  # noqa: ANN401 -- parts of a study
    found = cells_in(folder, SCALING, **changes)
    return {cell.name: cell for cell in found if isinstance(cell, HostsCell)}


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


SECONDS = {
    "lenet5/1x16-one-host": 0.030,
    "lenet5/2x16-one-host": 0.032,
    "lenet5/2x16-hosts": 0.040,
    "lenet5/1x32-one-host": 0.050,
}


def made(folder: Path) -> dict[str, Any]:
    """Return records of three starts of every cell."""
    return {
        cell.name: {
            f"seed-{seed}": {
                "seed": seed,
                "late": 0.0,
                "seconds": [SECONDS[cell.name] * (1 + seed / 100)],
            }
            for seed in (1, 2, 3)
        }
        for cell in cells_here(folder).values()
    }


def test_efficiency_is_against_as_many_times_one_worker(tmp_path: Path) -> None:
    records = made(tmp_path)
    found = rows_of(load_study(tmp_path / "study.yaml"), tmp_path, records)
    rows = {(row.scaling, row.cell.name): row for row in found}
    weak = rows["weak", "lenet5/2x16-hosts"]
    strong = rows["strong", "lenet5/2x16-hosts"]
    assert len(rows) == 6
    assert weak.efficiency is not None
    assert strong.efficiency is not None
    assert weak.efficiency.mean == pytest.approx(100 * 0.030 / 0.040)
    assert strong.efficiency.mean == pytest.approx(100 * 0.050 / (2 * 0.040))


def test_the_page_has_every_row(tmp_path: Path) -> None:
    records = made(tmp_path)
    page = make_page(load_study(tmp_path / "study.yaml"), tmp_path, records)
    table = page.sections[0].parts[0]
    assert isinstance(table, Table)
    found = {column.title: list(column.values) for column in table.columns}
    assert found["Cell"][:3] == list(SECONDS)[:3]
    assert found["Efficiency, %"][2] == pytest.approx(75)
    assert "94% of the ideal in one host, 75% on hosts" in page.findings[0]
    assert "<svg" in page.html()


@pytest.mark.long
@needs_hosts
def test_real_starts_in_one_host_and_on_hosts(tmp_path: Path) -> None:
    path, lines = write_study(tmp_path, SCALING), list[str]()
    assert study(path, out=tmp_path / "out", machine=Machine(), report=lines.append)
    for cell in cells_here(tmp_path).values():
        record = Store(tmp_path / "out").read(cell, cell.slots[0])
        assert record is not None
        assert len(record["seconds"]) == 4

"""Studies of servers and of scaling: cells, rows, simulations by hand, and real starts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from short_studies import SCALING, SERVERS, Json, cells_in, needs_hosts, undisturbed, write_study

from largebatch.lab.studies import scaling
from largebatch.lab.studies.hosts import HostsCell, HostsRow, Start
from largebatch.lab.studies.runner import study
from largebatch.lab.studies.servers import draw, findings, rows_of, simulations
from largebatch.lab.studies.store import Store
from largebatch.lab.studies.study import Machine, load_study
from largebatch.recipe.protocols import Hardsync
from largebatch.report.pages import Table

MODEL = 4 * 432_080
LARGEST = 4 * 400_000
SECOND = 100e6 / 8 * 1448 / 1514
"""Payload in bytes of a second at 100 Mbit/s."""

GRADIENT = 0.01 + 16 * 0.001


def simulated(folder: Path, measured: list[HostsRow] | None = None) -> list[HostsRow]:
    path = write_study(folder, SERVERS, servers__megabits=100, servers__simulated=[2, 4])
    return simulations(load_study(path), folder, measured or [])


def seconds(rows: list[HostsRow]) -> dict[str, float]:
    return {row.cell.name: row.seconds.mean for row in rows}


def test_an_update_takes_the_gradient_and_what_the_fullest_link_carries(tmp_path: Path) -> None:
    """All workers start together and take equally long, so nothing overlaps."""
    found = seconds(simulated(tmp_path))
    expected = {
        "alone-1": 0.0,
        "central-2": 2 * 2 * MODEL / SECOND,
        "central-4": 2 * 4 * MODEL / SECOND,
        "ring-4": 2 * MODEL * 3 / 4 / SECOND,
    }
    for name, messages in expected.items():
        assert found[f"lenet5/{name}"] == pytest.approx(GRADIENT + messages, rel=1e-3), name
    assert found["lenet5/beside-4"] > GRADIENT + 2 * 3 * LARGEST / SECOND


def test_an_update_takes_besides_what_that_of_one_worker_takes_besides(tmp_path: Path) -> None:
    alone = cells_here(tmp_path)["alone"]
    measured = rows_of([alone], {alone.name: {1: Start(seconds=[GRADIENT + 0.5])}})
    bare, own = (seconds(simulated(tmp_path, rows)) for rows in ([], measured))
    for name in ("alone-1", "beside-2", "central-4", "ring-2"):
        assert own[f"lenet5/{name}"] == pytest.approx(bare[f"lenet5/{name}"] + 0.5, rel=0.02), name


def test_the_page_has_simulations_without_starts(tmp_path: Path) -> None:
    path, lines = write_study(tmp_path, SERVERS, servers__simulated=[2]), list[str]()
    assert study(path, out=tmp_path / "out", page=True, machine=Machine(), report=lines.append)
    assert "lenet5/beside-2" in lines[0]
    assert (tmp_path / "out" / "study.html").stat().st_size > 10_000


def hosts_cells(folder: Path, study: Json, **changes: Any) -> list[HostsCell]:  # noqa: ANN401 -- parts of a study
    return [cell for cell in cells_in(folder, study, **changes) if isinstance(cell, HostsCell)]


def cells_here(folder: Path, **changes: Any) -> dict[str, HostsCell]:  # noqa: ANN401 -- parts of a study
    return {cell.look: cell for cell in hosts_cells(folder, SERVERS, **changes)}


def test_every_layout_makes_the_same_update_of_the_same_samples(tmp_path: Path) -> None:
    cells = cells_here(tmp_path)
    sizes = {name: len(cell.workers_per_host) for name, cell in cells.items()}
    assert sizes == {"alone": 1, "central": 3, "beside": 2, "ring": 2}
    assert cells["alone"].recipe.batch.global_batch == 2
    for name in sizes.keys() - {"alone"}:
        recipe = cells[name].recipe
        assert recipe.batch.global_batch == 4
        assert recipe.model_copy(update={"protocol": None}) == cells["ring"].recipe
        assert isinstance(recipe.protocol, Hardsync) == (name in {"central", "beside"})


SECONDS = {
    "alone": (0.10, 0.11, 0.10),
    "central": (0.22, 0.23, 0.22),
    "beside": (0.15, 0.14, 0.15),
    "ring": (0.125, 0.125, 0.13),
}


def ratio(one: str, other: str) -> tuple[float, float, float]:
    """Return how many times as fast one layout is, by pairs of starts."""
    logs = np.log(np.array(SECONDS[other]) / np.array(SECONDS[one]))
    reach = 4.302652729911275 * logs.std(ddof=1) / np.sqrt(3)
    mean, low, high = np.exp([logs.mean(), logs.mean() - reach, logs.mean() + reach])
    return mean, low, high


def test_layouts_are_compared_over_pairs_of_starts(tmp_path: Path) -> None:
    cells = cells_here(tmp_path, seeds=3)
    starts = {
        cells[name].name: {
            seed: Start(seconds=[each, each]) for seed, each in enumerate(times, start=1)
        }
        for name, times in SECONDS.items()
    }
    rows = rows_of(list(cells.values()), starts)
    ring = rows[-1]
    mean, low, high = ratio("ring", "alone")
    assert ring.speed_up is not None
    assert ring.speed_up[:3] == pytest.approx((2 * mean, 2 * low, 2 * high))
    assert ring.efficiency is not None
    assert ring.efficiency.mean == pytest.approx(100 * mean)
    assert list(ring.throughputs.values()) == pytest.approx(32 / np.array(SECONDS["ring"]))
    mean, low, high = ratio("beside", "central")
    compared, slow = map(str, findings(rows, "measured"))
    assert f"{mean:.2f} times ({low:.2f} to {high:.2f}) as fast" in compared
    mean, low, high = (2 * each for each in ratio("central", "alone"))
    shown = f"{mean:.2f} times ({low:.2f} to {high:.2f}) on 2 workers"
    assert f"central against one worker: SLOWER THAN ONE WORKER: {shown}" in slow
    table = draw("tiny", rows, []).sections[0].parts[0]
    assert isinstance(table, Table)
    assert list(table.columns[0].values) == [cell.name for cell in cells.values()]


@pytest.mark.long
@needs_hosts
@pytest.mark.parametrize(
    ("kind", "least"),
    [pytest.param(SERVERS, GRADIENT, id="servers"), pytest.param(SCALING, 0.0, id="scaling")],
)
def test_a_real_start_of_each_cell(kind: Json, least: float, tmp_path: Path) -> None:
    path, lines = write_study(tmp_path, kind), list[str]()
    out = tmp_path / "out"
    assert study(path, out=out, machine=Machine(), report=lines.append)
    for cell in hosts_cells(tmp_path, kind):
        record = Store(out).read(cell, cell.slots[0])
        assert record is not None
        assert len(record["seconds"]) == 4
        assert min(record["seconds"]) > least


def test_weak_and_strong_scaling_meet_at_the_most_workers(tmp_path: Path) -> None:
    cells = {cell.name: cell for cell in hosts_cells(tmp_path, SCALING, scaling__workers=[2, 4])}
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


SCALED = {
    "lenet5/1x16-one-host": 0.030,
    "lenet5/2x16-one-host": 0.032,
    "lenet5/2x16-hosts": 0.040,
    "lenet5/1x32-one-host": 0.050,
}


def scaled(folder: Path) -> dict[str, Any]:
    """Return records of three starts of every cell."""
    return {
        cell.name: {
            f"seed-{seed}": {
                **undisturbed(seed, cell=cell.name),
                "late": 0.0,
                "seconds": [SCALED[cell.name] * (1 + seed / 100)],
            }
            for seed in (1, 2, 3)
        }
        for cell in hosts_cells(folder, SCALING)
    }


def test_efficiency_is_against_as_many_times_one_worker(tmp_path: Path) -> None:
    records = scaled(tmp_path)
    found = scaling.rows_of(load_study(tmp_path / "study.yaml"), tmp_path, records)
    rows = {(row.scaling, row.cell.name): row for row in found}
    weak = rows["weak", "lenet5/2x16-hosts"]
    strong = rows["strong", "lenet5/2x16-hosts"]
    assert len(rows) == 6
    assert weak.efficiency is not None
    assert strong.efficiency is not None
    assert weak.efficiency.mean == pytest.approx(100 * 0.030 / 0.040)
    assert strong.efficiency.mean == pytest.approx(100 * 0.050 / (2 * 0.040))


def test_the_page_of_scaling_has_every_row(tmp_path: Path) -> None:
    records = scaled(tmp_path)
    study_of = load_study(tmp_path / "study.yaml")
    page = scaling.make_page(study_of, tmp_path, records)
    table = page.sections[0].parts[0]
    assert isinstance(table, Table)
    found = {column.title: list(column.values) for column in table.columns}
    assert found["Cell"][:3] == list(SCALED)[:3]
    assert found["Efficiency, %"][2] == pytest.approx(75)
    assert "94% (94 to 94) of the ideal in one host, 75% (75 to 75) on hosts" in page.findings[0]
    assert "<svg" in page.html()
    late = {name: {run: {**one, "late": 0.26} for run, one in runs.items()}
            for name, runs in records.items()}  # fmt: skip
    busy = scaling.make_page(study_of, tmp_path, late)
    assert all("too busy to judge: up to 26.0 % of gradients" in each for each in busy.findings)
    single = {name: {"seed-1": runs["seed-1"]} for name, runs in records.items()}
    lonely = scaling.make_page(study_of, tmp_path, single)
    assert all("too few starts to judge: 1" in each for each in lonely.findings)
    assert not lonely.is_sound

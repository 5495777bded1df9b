"""Studies of servers and of scaling: cells, rows, simulations by hand, and real starts."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from short_studies import SCALING, SERVERS, Json, cells_in, needs_hosts, undisturbed, write_study

from largebatch.errors import StudyError
from largebatch.lab.studies import scaling
from largebatch.lab.studies.hosts import (
    HostsCell,
    HostsRow,
    StartResult,
    applied_rates,
    combined,
    starts_of,
)
from largebatch.lab.studies.runner import study
from largebatch.lab.studies.servers import (
    Links,
    draw,
    findings,
    rows_of,
    simulated_findings,
    simulations,
    verdict,
)
from largebatch.lab.studies.store import Store
from largebatch.lab.studies.study import Inside, StudyMachine, load_study
from largebatch.recipe.protocols import Hardsync
from largebatch.report.pages import Table

MODEL = 4 * 432_080
LARGEST = 4 * 400_000
SECOND = 100e6 / 8 * 1448 / 1514
"""Payload in bytes of a second at 100 Mbit/s."""

GRADIENT = 0.01 + 16 * 0.001


def simulated(folder: Path, measured: list[HostsRow] | None = None) -> list[HostsRow]:
    """Return the simulations of two and four workers."""
    swept = {"workers": [2, 4]}
    path = write_study(folder, SERVERS, servers__megabits=100, servers__simulated=swept)
    return simulations(load_study(path), folder, measured or [])["workers"]


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
    measured = rows_of([alone], {alone.name: {1: StartResult(seconds=[GRADIENT + 0.5])}})
    bare, own = (seconds(simulated(tmp_path, rows)) for rows in ([], measured))
    for name in ("alone-1", "beside-2", "central-4", "ring-2"):
        assert own[f"lenet5/{name}"] == pytest.approx(bare[f"lenet5/{name}"] + 0.5, rel=0.02), name
    counted = {"shares": [MODEL], "received": [0.0], "sent": [0.0], "rates": [["0x1p-4"]]}
    one = {**undisturbed(1), "seconds": [GRADIENT + 0.5], "late": 0.0, **counted}
    doubtful = rows_of([alone], {alone.name: starts_of(alone, {alone.name: {"seed-1": one}})})
    assert seconds(simulated(tmp_path, doubtful)) == bare  # one start is too few


def test_the_page_has_simulations_without_starts(tmp_path: Path) -> None:
    path, lines = write_study(tmp_path, SERVERS, servers__simulated={"workers": [2]}), list[str]()
    assert study(path, out=tmp_path / "out", page=True, machine=StudyMachine(), report=lines.append)
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
            seed: StartResult(seconds=[each, each]) for seed, each in enumerate(times, start=1)
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
    compared, slow = map(str, findings(rows))
    assert f"{mean:.2f} times ({low:.2f} to {high:.2f}) as fast" in compared
    mean, low, high = (2 * each for each in ratio("central", "alone"))
    shown = f"{mean:.2f} times ({low:.2f} to {high:.2f}) on 2 workers"
    assert f"central against one worker: SLOWER THAN ONE WORKER: {shown}" in slow
    nothing = simulations(load_study(tmp_path / "study.yaml"), tmp_path, rows)
    table = draw("tiny", rows, nothing).sections[0].parts[0]
    assert isinstance(table, Table)
    assert list(table.columns[0].values) == [cell.name for cell in cells.values()]


def test_links_and_mini_batches_are_swept_at_the_most_workers(tmp_path: Path) -> None:
    swept = {"megabits": [50, 100, 1_000, 10_000], "mini_batches": [0.5]}
    path = write_study(
        tmp_path,
        SERVERS,
        servers__megabits=100,
        servers__simulated=swept,
        recipes__lenet5__on_hosts__paper="faster",
    )
    rows = simulations(load_study(path), tmp_path, [])
    slow = {row.cell.look: row for row in rows["megabits"] if row.cell.megabits == 50}
    half = {row.cell.look: row for row in rows["samples"]}
    assert slow["ring"].seconds.mean == pytest.approx(GRADIENT + 2 * MODEL / SECOND, rel=1e-3)
    assert half["ring"].seconds.mean == pytest.approx(0.018 + MODEL / SECOND, rel=1e-3)
    speed_up = half["ring"].speed_up  # over one worker with the same mini-batch
    assert speed_up is not None
    assert speed_up.mean == pytest.approx(2 * 0.018 / (0.018 + MODEL / SECOND), rel=1e-3)
    assert not rows["workers"]
    assert len(draw("tiny", [], rows).sections[0].parts) == 2  # a chart for each sweep
    of_links, of_batches, pays = map(str, simulated_findings(rows, []))
    assert "at 50 to 10,000 Mbit/s; this confirms the paper's `faster`" in of_links
    assert "at 8 to 8 samples each" in of_batches
    # 26 ms of a gradient; a ring then sends 1.7 MB at 120 MB/s, a central server four times that.
    assert "ring 1,000" in pays
    assert "central 10,000" in pays


@pytest.mark.parametrize(
    ("paper", "low", "high", "word"),
    [
        pytest.param("faster", 1.01, 1.5, "confirms", id="faster"),
        pytest.param("faster", 0.5, 0.9, "refutes", id="slower"),
        pytest.param("faster", 0.9, 1.2, "does not decide", id="within noise"),
        pytest.param("no difference", 0.95, 1.05, "confirms", id="equal"),
        pytest.param("no difference", 1.02, 1.4, "refutes", id="different"),
        pytest.param("no difference", 0.8, 1.2, "does not decide", id="wide"),
        pytest.param(None, 1.0, 2.0, "does not have", id="not in the paper"),
    ],
)
def test_the_paper_is_judged_by_the_ends_of_the_interval(
    paper: Literal["faster", "no difference"] | None, low: float, high: float, word: str
) -> None:
    assert word in verdict(paper, low, high)


ON_LINKS = {
    "central": [12, 12, 24],  # two workers and one server that has everything
    "beside": [12 - 10 + 10, 12 - 2 + 2],
    "ring": [12, 12],
}


@pytest.mark.parametrize("layout", ON_LINKS)
def test_links_carry_the_bytes_of_the_formulas(layout: str, tmp_path: Path) -> None:
    cell, formula = cells_here(tmp_path)[layout], ON_LINKS[layout]
    shares = {"central": [12], "beside": [10, 2], "ring": [12]}[layout]
    received = [float(one) for one in formula]
    sent = [*received[:-1], 1.1 * received[-1]]
    counted = {"shares": shares, "received": received, "sent": sent, "rates": []}
    content = {**undisturbed(1), "seconds": [1.0], "late": 0.0, **counted}
    row = HostsRow(cell=cell, starts=starts_of(cell, {cell.name: {"seed-1": content}}))
    assert Links(row).formula == formula
    assert Links(row).deviation == pytest.approx((0.1, 0.1 * formula[-1]))
    busiest = max(formula)
    assert Links(row).busiest[1] == 2 * busiest
    (finding,) = [finding for finding in findings([row]) if "counters" in finding.about]
    assert "NOT within 5%" in finding.text
    assert "too few starts" in str(finding)


def test_the_traffic_of_idle_workers_is_taken_off() -> None:
    """Counters are read after the warm-up, after one update, and after one and two timed ones."""
    idle, update = 7, 100
    marks = [[0, 0], [idle + update, 0], [2 * idle + 4 * update, 5 * 2]]
    worker = {
        "seconds": [1.0, 1.0], "counters": marks, "rates": ["0x1p+0"], "shares": [4],
        "gradients": 5, "late": 1,
    }  # fmt: skip
    found = combined([worker, worker], ["host1", "host1"], updates=2)
    assert found["received"] == [update]
    assert found["sent"] == [5]
    assert found["late"] == pytest.approx(0.2)
    assert found["rates"] == [["0x1p+0"]] * 2


ON_HOROVOD: Json = {**SERVERS, "servers": {"megabits": 1000, "layouts": {"ring": "horovod"}}}


@pytest.mark.long
@needs_hosts
@pytest.mark.parametrize(
    ("kind", "least"),
    [
        pytest.param(SERVERS, GRADIENT, id="servers"),
        pytest.param(ON_HOROVOD, GRADIENT, id="ring over Horovod"),
        pytest.param(SCALING, 0.0, id="scaling"),
    ],
)
def test_a_real_start_of_each_cell(kind: Json, least: float, tmp_path: Path) -> None:
    """The counters of all links are near the bytes of the formulas."""
    path, lines = write_study(tmp_path, kind), list[str]()
    out = tmp_path / "out"
    assert study(path, out=out, machine=StudyMachine(), report=lines.append)
    for cell in hosts_cells(tmp_path, kind):
        record = Store(out).read(cell, cell.slots[0])
        assert record is not None
        assert len(record["seconds"]) == 4
        assert min(record["seconds"]) > least
        assert sum(record["shares"]) == MODEL
        if len(cell.workers_per_host) > 1:
            row = HostsRow(cell=cell, starts=starts_of(cell, {cell.name: {"seed-1": record}}))
            deviation = Links(row).deviation
            assert deviation is not None
            assert deviation[0] < 0.05
            if cell.recipe.protocol is None:
                assert [len(rates) for rates in record["rates"]] == [1 + 1 + 1 + 4] * cell.workers


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
                "shares": [MODEL],
                "received": [0.0] * len(cell.workers_per_host),
                "sent": [0.0] * len(cell.workers_per_host),
                "rates": [],
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


INSIDE = {"gigabytes_per_second": 0.5, "seconds": 0.001}


def test_the_planner_adds_what_one_worker_takes_and_the_bytes_of_a_ring(tmp_path: Path) -> None:
    records = scaled(tmp_path)
    study = load_study(write_study(tmp_path, SCALING, scaling__inside=INSIDE, seeds=3))
    rows = {
        (row.scaling, row.cell.name): scaling.planned_seconds(row, Inside(**INSIDE))
        for row in scaling.rows_of(study, tmp_path, records)
    }
    link, inside = 2 * MODEL / 2 / (10 * SECOND), 2 * MODEL / 2 / 0.5e9 + 0.001
    weak, strong = 1.02 * 0.030, 1.02 * 0.050 - 0.016  # means of starts; half of 32 samples
    assert rows["weak", "lenet5/1x16-one-host"] is None
    assert rows["weak", "lenet5/2x16-hosts"] == pytest.approx(weak + link)
    assert rows["weak", "lenet5/2x16-one-host"] == pytest.approx(weak + inside)
    assert rows["strong", "lenet5/2x16-hosts"] == pytest.approx(strong + link)
    page = scaling.make_page(study, tmp_path, records)
    assert any("planner" in text for text in page.findings)


def test_the_rate_that_an_optimizer_applies_is_recorded_in_each_update() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with applied_rates(optimizer) as rates:
        for lr in (0.1, 0.1 + 2**-56, 0.3):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
    optimizer.step()
    assert list(map(float.fromhex, rates)) == [0.1, 0.1 + 2**-56, 0.3]


LATE = [[0.4, 0.4, 0.04], [0.4, 0.4, 0.4]]
"""Learning rates of two workers, the second of which changes one update late."""


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        pytest.param(LATE, ["in update 2", "0.04", "worker 1 0.4"], id="late"),
        pytest.param([[0.1], [0.1 + 2**-56]], ["in update 0"], id="last bit"),
        pytest.param([[0.1, 0.1], [0.1]], ["made 1 updates"], id="fewer updates"),
        pytest.param([[0.1, 0.2], [0.1, 0.2]], [], id="equal"),
    ],
)
def test_rates_of_workers_are_compared_bit_for_bit(
    workers: list[list[float]], words: list[str], tmp_path: Path
) -> None:
    records, rates = scaled(tmp_path), [[lr.hex() for lr in one] for one in workers]
    records["lenet5/2x16-hosts"]["seed-2"]["rates"] = rates
    for record in records["lenet5/2x16-hosts"].values():
        record["rates"] = record["rates"] or [["0x1p-4"]] * 2
    study = load_study(write_study(tmp_path, SCALING, seeds=3))
    page = scaling.make_page(study, tmp_path, records)
    (found,) = [text for text in page.findings if "Learning rates" in text]
    assert all(word in found for word in words or ["equal, bit for bit, in each of 4 updates of 3"])
    assert page.is_sound == (not words)
    table = page.sections[0].parts[0]
    assert isinstance(table, Table)
    column = next(one for one in table.columns if one.title == "Learning rates")
    assert set(column.values) == {None, "differ" if words else "equal"}


@pytest.mark.parametrize("key", ["seconds", "seed"])
def test_a_damaged_record_of_a_start_is_named(key: str, tmp_path: Path) -> None:
    records = scaled(tmp_path)
    records["lenet5/2x16-hosts"]["seed-2"][key] = "soon"
    with pytest.raises(StudyError, match=r"2x16-hosts/seed-2\.json"):
        scaling.rows_of(load_study(tmp_path / "study.yaml"), tmp_path, records)


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

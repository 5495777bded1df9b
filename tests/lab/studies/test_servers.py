"""Studies of servers: layouts, bytes on links, rows against NumPy, and simulations by hand."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_hosts import needs_hosts
from short_studies import SERVERS, cells_in, write_study

from largebatch.lab.studies.hosts import Start
from largebatch.lab.studies.runner import study
from largebatch.lab.studies.servers import (
    ServersCell,
    ServersRow,
    Traffic,
    beside,
    central,
    findings,
    make_page,
    ring,
    row_of,
    sweeps,
)
from largebatch.lab.studies.store import Store
from largebatch.lab.studies.study import Machine, load_study
from largebatch.recipe.protocols import Hardsync
from largebatch.report.pages import Table

MODEL = 4 * 432_080
LARGEST = 4 * 400_000
BYTES_PER_SECOND = 100e6 / 8 * 1448 / 1514
GRADIENT = 0.01 + 16 * 0.001
LAYOUTS: dict[str, Any] = {
    "central": {"centralised": 1},
    "central-split": {"split": {"centralised": 2}},
    "beside": "decentralised",
    "beside-split": {"split": "decentralised"},
    "ring": "torch",
}


def simulated(
    folder: Path, measured: list[ServersRow] | None = None
) -> dict[Any, list[ServersRow]]:
    path = write_study(
        folder, SERVERS, servers__layouts=LAYOUTS, servers__megabits=100,
        servers__simulated={"workers": [1, 2, 4], "megabits": [100, 10_000],
                            "mini_batches": [1, 100], "updates": 3, "repeats": 2},
    )  # fmt: skip
    return dict(sweeps(load_study(path), folder, measured or []))


def seconds(rows: list[ServersRow]) -> dict[str, float]:
    return {row.cell.name: row.seconds.mean for row in rows}


def counted(row: ServersRow) -> ServersRow:
    """Return a simulated row as a measured one, whose counters have what the formulas have."""
    links = {f"host{place}": link for place, link in enumerate(row.expected)}
    found = {
        seed: replace(
            one,
            sent={host: link.sent for host, link in links.items()},
            received={host: link.received for host, link in links.items()},
        )
        for seed, one in row.starts.items()
    }
    return replace(row, starts=found)


def test_an_update_takes_the_gradient_and_what_the_fullest_link_carries(tmp_path: Path) -> None:
    """All workers start together and take equally long, so nothing hides behind anything."""
    found = seconds(simulated(tmp_path)["workers"])
    second = BYTES_PER_SECOND
    expected = {
        "alone-1": 0.0,
        "beside-1": 0.0,
        "central-1": 2 * MODEL / second,
        "central-2": 2 * 2 * MODEL / second,
        "central-4": 2 * 4 * MODEL / second,
        "ring-4": 2 * MODEL * 3 / 4 / second,
        "beside-split-2": 2 * MODEL / 2 / second,
        "central-split-2": 3 * MODEL / second,  # the first server is asked before the other one
    }
    for name, messages in expected.items():
        assert found[f"lenet5/{name}"] == pytest.approx(GRADIENT + messages, rel=1e-3), name
    assert "lenet5/ring-1" not in found
    assert found["lenet5/beside-4"] > GRADIENT + 2 * 3 * LARGEST / second
    assert found["lenet5/beside-split-4"] < found["lenet5/beside-4"] / 2


def test_an_update_takes_besides_what_that_of_one_worker_takes_besides(tmp_path: Path) -> None:
    alone = cells_here(tmp_path)["alone"]
    record = Start(
        seconds=[GRADIENT + 0.5], sent={}, received={}, shards=[MODEL], late=0.0, rates=[],
    )  # fmt: skip
    measured = [row_of(alone, {1: record}, {1: record})]
    bare, own = (seconds(simulated(tmp_path, rows)["workers"]) for rows in ([], measured))
    for name in ("alone-1", "beside-1", "central-1", "central-4", "ring-2"):
        assert own[f"lenet5/{name}"] == pytest.approx(bare[f"lenet5/{name}"] + 0.5), name


def test_the_page_has_simulations_with_and_without_starts(tmp_path: Path) -> None:
    found = simulated(tmp_path)
    given = load_study(tmp_path / "study.yaml")
    lines: list[str] = []
    path = tmp_path / "study.yaml"
    assert study(path, out=tmp_path / "out", page=True, machine=Machine(), report=lines.append)
    assert "lenet5/central-split-2" in lines[0]
    assert (tmp_path / "out" / "study.html").stat().st_size > 10_000
    real = [counted(row) for row in found["workers"] if row.cell.layout in {"alone", "beside"}]
    assert "not started" in make_page(given, [], found).findings[-1]
    page = make_page(given, real, found)
    assert not any("not started" in one for one in page.findings)
    table = page.sections[0].parts[0]
    assert isinstance(table, Table)
    cells = {column.title: list(column.values) for column in table.columns}
    assert cells["Cell"] == [row.cell.name for row in real]
    off = [each for each in cells["Largest deviation, %"] if each is not None]
    assert off == pytest.approx([0.0, 0.0])


def cells_here(folder: Path, **changes: Any) -> dict[str, ServersCell]:  # noqa: ANN401 -- parts of a study
    found = cells_in(folder, SERVERS, **changes)
    return {cell.layout: cell for cell in found if isinstance(cell, ServersCell)}


def test_every_layout_makes_the_same_update_of_the_same_samples(tmp_path: Path) -> None:
    cells = cells_here(tmp_path)
    sizes = {name: len(cell.placement.workers_per_host) for name, cell in cells.items()}
    horovod = {"ring-horovod": 2} if "ring-horovod" in cells else {}
    assert sizes == {"alone": 1, "central": 3, "beside": 2, "ring": 2, **horovod}
    assert cells["alone"].recipe.batch.global_batch == 2
    for name in sizes.keys() - {"alone"}:
        recipe = cells[name].recipe
        assert recipe.batch.global_batch == 4
        assert recipe.model_copy(update={"protocol": None}) == cells["ring"].recipe
        assert isinstance(recipe.protocol, Hardsync) == (name in {"central", "beside"})


SECONDS = {
    "alone": (0.10, 0.11, 0.10),
    "central": (0.20, 0.21, 0.20),
    "beside": (0.15, 0.14, 0.15),
    "ring": (0.125, 0.125, 0.13),
}
PARTS = {"central": [1000], "beside": [600, 400], "ring": [1000], "alone": [1000]}


def made(
    folder: Path,
    *,
    paper: str | None = "faster",
    excess: float = 1.01,
    late: float = 0.0,
    beside: Sequence[float] = SECONDS["beside"],
) -> list[ServersRow]:
    """Return rows of starts whose links carried `excess` times the bytes of the formulas."""
    cells = cells_here(folder, recipes__lenet5__on_hosts__paper=paper, seeds=3)
    starts = {}
    for name, times in (SECONDS | {"beside": beside}).items():
        bare = Start(
            seconds=[1.0], sent={}, received={}, shards=PARTS[name], late=late, rates=[],
        )  # fmt: skip
        links = {f"host{n}": link for n, link in enumerate(cells[name].expected(bare), start=1)}
        whole = replace(
            bare,
            sent={host: link.sent * excess for host, link in links.items()},
            received={host: link.received * excess for host, link in links.items()},
        )
        starts[name] = {
            seed: replace(whole, seconds=[each, each]) for seed, each in enumerate(times, start=1)
        }
    return [row_of(cells[name], starts[name], starts["alone"]) for name in SECONDS]


def ratio(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    logs = np.log(np.array(other) / np.array(one))
    reach = 4.302652729911275 * logs.std(ddof=1) / np.sqrt(3)
    mean, low, high = np.exp([logs.mean(), logs.mean() - reach, logs.mean() + reach])
    return mean, low, high


def test_speed_up_and_efficiency_are_over_pairs_of_starts(tmp_path: Path) -> None:
    _, _, _, own = made(tmp_path)
    mean, low, high = ratio(SECONDS["ring"], SECONDS["alone"])
    assert own.speed_up is not None
    assert own.speed_up[:3] == pytest.approx((2 * mean, 2 * low, 2 * high))
    assert own.efficiency is not None
    assert own.efficiency.mean == pytest.approx(100 * mean)
    assert own.throughput.mean == pytest.approx(np.mean(2 / np.array(SECONDS["ring"])))


@pytest.mark.parametrize(
    ("paper", "times", "expected"),
    [
        ("faster", SECONDS["beside"], "confirmed"),
        ("faster", (0.19, 0.15, 0.12), "not decided"),
        ("faster", (0.30, 0.32, 0.30), "refuted"),
        ("no difference", SECONDS["beside"], "refuted"),
        ("no difference", (0.19, 0.15, 0.12), "not decided"),
        ("no difference", (0.202, 0.21, 0.202), "confirmed"),
        (None, SECONDS["beside"], "does not have this model"),
    ],
)
def test_the_statement_of_the_paper_is_judged_by_the_interval(
    tmp_path: Path, paper: str | None, times: Sequence[float], expected: str
) -> None:
    mean, low, high = ratio(times, SECONDS["central"])
    judged, links = findings(made(tmp_path, paper=paper, beside=times))
    assert f"{mean:.2f} times as fast ({low:.2f} to {high:.2f})" in judged
    assert expected in judged
    assert " within 5% of the formulas: at most 1.0% off" in links


Message = tuple[int, int, float]
"""From one host to another one, and its bytes."""


def pushes_and_pulls(servers: Sequence[tuple[int, int]], *, learners: int) -> Iterator[Message]:
    """Yield every gradient and every weight; `servers` are hosts with the bytes of each part."""
    for learner in range(learners):
        for host, part in servers:
            yield learner, host, part
            yield host, learner, part


def ring_steps(bytes_: int, *, workers: int) -> Iterator[Message]:
    """Yield the parts of a ring: each goes around once to be summed, and once with the sum."""
    for _ in range(2 * (workers - 1)):
        for worker in range(workers):
            yield worker, (worker + 1) % workers, bytes_ / workers


def links(messages: Iterator[Message], *, hosts: int) -> list[Traffic]:
    received, sent = defaultdict[int, float](float), defaultdict[int, float](float)
    for source, target, bytes_ in messages:
        if source != target:  # what stays on a host crosses no link
            received[target] += bytes_
            sent[source] += bytes_
    return [Traffic(received[host], sent[host]) for host in range(hosts)]


@pytest.mark.parametrize("parts", [[60], [40, 20], [7, 50, 3]], ids=str)
def test_central_servers_carry_the_model_once_for_each_learner_and_direction(
    parts: list[int],
) -> None:
    servers = list(enumerate(parts, start=5))
    counted = links(pushes_and_pulls(servers, learners=5), hosts=5 + len(parts))
    assert central(parts, learners=5) == counted
    assert sum(sum(link) for link in counted[5:]) == 2 * 5 * 60  # 2 lambda M


@pytest.mark.parametrize("parts", [[30, 30], [15, 15, 15, 15], [40, 10, 6, 4]], ids=str)
def test_messages_to_the_server_on_the_own_host_cross_no_link(parts: list[int]) -> None:
    counted = links(pushes_and_pulls(list(enumerate(parts)), learners=len(parts)), hosts=len(parts))
    assert beside(parts) == counted


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_equal_parts_beside_the_learners_send_what_a_ring_sends(workers: int) -> None:
    counted = links(ring_steps(24 * workers, workers=workers), hosts=workers)
    assert ring(24 * workers, workers=workers) == counted == beside([24] * workers)


@pytest.mark.long
@needs_hosts
def test_counters_of_all_links_are_within_five_percent_of_the_formulas(tmp_path: Path) -> None:
    """A real start of each layout, and nothing is measured twice."""
    path, lines = write_study(tmp_path, SERVERS), list[str]()
    out = tmp_path / "out"
    assert study(path, out=out, machine=Machine(), report=lines.append)
    assert "The counters of all links are within 5%" in lines[-1]
    model = 4 * 432_080  # LeNet-5 for three colours and ten classes
    cells = cells_here(tmp_path)
    for layout, cell in cells.items():
        record = Store(out).read(cell, cell.slots[0])
        assert record is not None
        start = record["start"]
        assert sum(start["shards"]) == model
        assert len(start["seconds"]) == 4
        if layout != "alone":
            place, expected = {"central": (2, 2 * model)}.get(layout, (0, model))
            assert list(start["sent"].values())[place] == pytest.approx(expected, rel=0.05)
            assert list(start["received"].values())[place] == pytest.approx(expected, rel=0.05)
    assert study(path, out=out, machine=Machine(), report=lines.append)
    assert lines[-1] == lines[-2]

"""What a study of servers simulates, against arithmetic by hand, and its page."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from short_servers import with_recipe, write_study

from largebatch.cli.main import DONE, USER, main
from largebatch.lab.studies.hosts.starts import Found
from largebatch.lab.studies.servers.page import make_page
from largebatch.lab.studies.servers.rows import Row, row_of, slower
from largebatch.lab.studies.servers.simulated import findings, sweeps
from largebatch.lab.studies.servers.study import cells_of, load_study

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


def simulated(folder: Path, measured: list[Row] | None = None) -> dict[Any, list[Row]]:
    path = write_study(
        folder, layouts=LAYOUTS, megabits=100,
        simulated={"workers": [1, 2, 4], "megabits": [100, 10_000], "mini_batches": [1, 100],
                   "updates": 3, "repeats": 2},
    )  # fmt: skip
    return dict(sweeps(load_study(str(path)), folder, measured or []))


def seconds(rows: list[Row]) -> dict[str, float]:
    return {row.cell.name: row.seconds.mean for row in rows}


def counted(row: Row) -> Row:
    """Return a simulated row as a measured one, whose counters have what the formulas have."""
    links = {f"host{place}": link for place, link in enumerate(row.expected)}
    found = {
        seed: replace(
            one,
            sent={host: link.sent for host, link in links.items()},
            received={host: link.received for host, link in links.items()},
        )
        for seed, one in row.found.items()
    }
    return replace(row, found=found)


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
        assert found[f"lenet5-{name}"] == pytest.approx(GRADIENT + messages, rel=1e-3), name
    assert "lenet5-ring-1" not in found
    assert found["lenet5-beside-4"] > GRADIENT + 2 * 3 * LARGEST / second
    assert found["lenet5-beside-split-4"] < found["lenet5-beside-4"] / 2


def test_an_update_takes_besides_what_that_of_one_worker_takes_besides(tmp_path: Path) -> None:
    study = load_study(str(write_study(tmp_path)))
    alone = cells_of(study, tmp_path)[0]
    record = Found(
        seconds=[GRADIENT + 0.5], sent={}, received={}, shards=[MODEL], late=0.0, rates=[],
        device_batch=2,
    )  # fmt: skip
    measured = [row_of(alone, {1: record}, {1: record})]
    bare, own = (seconds(simulated(tmp_path, rows)["workers"]) for rows in ([], measured))
    for name in ("alone-1", "beside-1", "central-1", "central-4", "ring-2"):
        assert own[f"lenet5-{name}"] == pytest.approx(bare[f"lenet5-{name}"] + 0.5), name


def test_findings_say_where_workers_pay_and_what_the_paper_says(tmp_path: Path) -> None:
    found = simulated(tmp_path)
    (words,) = slower(found["workers"], "simulated")
    assert words.startswith(
        "SLOWER THAN ONE WORKER: lenet5, simulated: central on 2, 4 workers (0."
    )
    by_workers, by_link, by_batch, pays = findings(found, [])
    assert by_workers.startswith("lenet5, simulated, beside over one central server: ")
    assert by_workers.endswith(
        " at 2 to 4 workers; the paper has faster for this model: confirmed."
    )
    assert by_link.endswith(" at 100 to 10,000 Mbit/s.")
    assert by_batch.endswith(" at 16 to 1,600 samples.")
    assert "central 10,000" in pays
    real = [row for row in found["workers"] if row.cell.layout in {"alone", "central"}]
    *_, held = findings(found, real)
    assert held == (
        "The simulated time of an update is 1.00 to 1.00 times the measured one over 2 cells of "
        "several workers."
    )
    slow = replace(real[-1], found={1: replace(real[-1].first, seconds=[10.0])})
    *_, held, limited = findings(found, [*real[:-1], slow])
    assert " over 2 cells of several workers." in held
    assert limited == (
        "Updates took more than 1.25 times as long as simulated, so cores rather than links limit "
        "them and the simulation judges: lenet5-central-4."
    )


def test_the_page_of_simulations_needs_no_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated(tmp_path)
    words = ["lab", "study", "servers", str(tmp_path / "study.yaml"), "--simulated"]
    assert main([*words, "--out", str(tmp_path / "out")]) == DONE
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split("  ")[0] == "Simulated speed-up"
    assert any(line.startswith("lenet5 central-split") for line in printed)
    assert (tmp_path / "out" / "study.html").stat().st_size > 10_000
    write_study(tmp_path, recipes=with_recipe())
    assert main(words) == USER
    assert "has no section `simulated`" in capsys.readouterr().err


def test_points_of_starts_stand_on_simulated_lines(tmp_path: Path) -> None:
    found = simulated(tmp_path)
    study = load_study(str(tmp_path / "study.yaml"))
    real = [counted(row) for row in found["workers"] if row.cell.layout in {"alone", "beside"}]
    page = make_page(study, [], found)
    assert page.findings[-1].startswith("No start of one worker alone is recorded for lenet5: ")
    assert not any("recorded" in one for one in make_page(study, real, found).findings)
    assert [part.name for section in page.sections for part in section.parts] == [
        *("by-workers", "throughput", "speed-up", "efficiency", "megabits", "mini_batch", "points"),
    ]
    (charts,) = (section for section in make_page(study, real, found).sections
                 if section.title == "Speed by workers")  # fmt: skip
    curves = charts.parts[2].curves  # type: ignore[union-attr]
    lines = [curve for curve in curves if curve.line]
    assert {curve.series.label for curve in lines} == set(LAYOUTS)
    assert all(not curve.points for curve in lines)
    assert sum(curve.points for curve in curves) == len(LAYOUTS)

"""Studies of scaling: their files, rates bit for bit, the planner, and the page in a browser."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import opened, point_at, rows_of, started_browser
from on_hosts import needs_hosts
from short_scaling import with_recipe, write_study

from largebatch.cli.main import DONE, USER, main
from largebatch.lab.studies.hosts.starts import Found
from largebatch.lab.studies.hosts.worker import applied_rates
from largebatch.lab.studies.scaling import rows as found_rows
from largebatch.lab.studies.scaling.page import make_page
from largebatch.lab.studies.scaling.rows import Row, findings, unequal_rates
from largebatch.lab.studies.scaling.study import Cell, cells_of, load_study
from largebatch.schedules.functions import warmup

LATE = 3
"""The update in which a worker still has the rate before."""

MODEL_BYTES = 1_200_000


def cells_here(folder: Path, **changes: Any) -> dict[str, Cell]:  # noqa: ANN401 -- parts of a study
    path = write_study(folder, **changes)
    return {cell.name: cell for cell in cells_of(load_study(str(path)), folder)}


def test_weak_and_strong_scaling_meet_at_the_most_workers(tmp_path: Path) -> None:
    cells = cells_here(tmp_path, workers=[2, 4])
    sizes = {name: cell.recipe.batch.global_batch for name, cell in cells.items()}
    assert sizes == {
        "lenet5-1x16-one-host": 2,
        "lenet5-2x16-one-host": 4,
        "lenet5-2x16-hosts": 4,
        "lenet5-4x16-one-host": 8,
        "lenet5-4x16-hosts": 8,
        "lenet5-1x64-one-host": 8,
        "lenet5-2x32-one-host": 8,
        "lenet5-2x32-hosts": 8,
    }
    assert cells["lenet5-4x16-one-host"].placement.hosts == ["host1"] * 4
    assert cells["lenet5-4x16-hosts"].placement.hosts == [f"host{n}" for n in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"workers": [2, 3]}, "2 do not share the batch of 3 evenly", id="workers"),
        pytest.param({"inside": {}}, "inside.gigabytes_per_second", id="inside"),
        pytest.param(
            {"recipes": with_recipe(mini_batch=300, computed=300)},
            "300 samples that are really computed make 2 micro-batches", id="computed",
        ),
        pytest.param(
            {"recipes": with_recipe(updates=40)}, "the recipe ends after 40 updates", id="updates"
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    assert main(["lab", "study", "scaling", str(write_study(tmp_path, **changes))]) == USER
    assert message in capsys.readouterr().err


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


def a_start(seconds: float, *, rates: list[list[str]]) -> Found:
    return Found(
        seconds=[seconds] * 3, sent={}, received={}, shards=[MODEL_BYTES], late=0.0, rates=rates,
        device_batch=2,
    )  # fmt: skip


def test_a_rate_that_arrives_late_on_one_worker_is_found_bit_for_bit() -> None:
    good, bad = applied(late=False), applied(late=True)
    assert [float.fromhex(rate) for rate in good] == [0.1 * k / 5 for k in range(5)] + [0.1]
    assert unequal_rates(a_start(1.0, rates=[good, good])) == ""
    assert unequal_rates(a_start(1.0, rates=[good, good, bad])) == (
        f"in update {LATE} worker 0 has {good[LATE]} and worker 2 {bad[LATE]}"
    )
    near = [*good[:-1], float(np.nextafter(0.1, 1)).hex()]
    assert unequal_rates(a_start(1.0, rates=[good, near])).startswith("in update 5")
    assert unequal_rates(a_start(1.0, rates=[good, good[:-1]])).startswith("worker 1 made 5")


SECONDS = {
    "lenet5-1x16-one-host": 0.030,
    "lenet5-2x16-one-host": 0.032,
    "lenet5-2x16-hosts": 0.040,
    "lenet5-1x32-one-host": 0.050,
}


def made(folder: Path, *, rates: list[list[str]]) -> list[Row]:
    study = load_study(str(write_study(folder)))
    cells = cells_of(study, folder)

    class Recorded:
        def __init__(self, cell: str, seed: int) -> None:
            self.cell, self.seed = cell, seed

        def read(self) -> Found:
            return a_start(SECONDS[self.cell] * (1 + 0.01 * self.seed), rates=rates)

    starts: Any = [Recorded(cell.name, seed) for cell in cells for seed in (1, 2, 3)]
    return found_rows.rows_of(study, cells, starts)


def test_efficiency_is_against_as_many_times_one_worker(tmp_path: Path) -> None:
    rows = {(row.scaling, row.cell.name): row for row in made(tmp_path, rates=[["0x1p0"]] * 2)}
    weak = rows["weak", "lenet5-2x16-hosts"]
    strong = rows["strong", "lenet5-2x16-hosts"]
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


def test_the_planners_time_is_that_of_one_worker_and_of_the_link(tmp_path: Path) -> None:
    rows = {(row.scaling, row.cell.name): row for row in made(tmp_path, rates=[["0x1p0"]] * 2)}
    alone = 0.030 * 1.02  # the mean over the seeds
    ring = 2 * MODEL_BYTES / 2 / (1e9 / 8 * 1448 / 1514)
    assert rows["weak", "lenet5-2x16-hosts"].predicted == pytest.approx(alone + ring)
    inside = 2 * MODEL_BYTES / 2 / 1e9 + 0.001
    assert rows["weak", "lenet5-2x16-one-host"].predicted == pytest.approx(alone + inside)
    strong = 0.050 * 1.02 - 16 * 0.001  # half the samples of one worker
    assert rows["strong", "lenet5-2x16-hosts"].predicted == pytest.approx(strong + ring)


def test_the_page_has_every_row_and_says_where_rates_differ(tmp_path: Path) -> None:
    study = load_study(str(write_study(tmp_path)))
    good, bad = applied(late=False), applied(late=True)
    rows = made(tmp_path, rates=[good, good])
    assert any("the same learning rate, bit for bit" in line for line in findings(rows))
    path = make_page(study, rows).write(tmp_path / "study.html")
    with started_browser() as browser, opened(browser, path) as page:
        assert [row[0] for row in rows_of(page, "cells")] == [
            row.cell.name for row in rows if row.scaling == "weak"
        ]
        (shown,) = point_at(page, "efficiency", "hosts", row=1)
        assert "lenet5-2x16-hosts" in shown
        assert "75.0000" in shown
        page.locator(".filter").get_by_text("strong", exact=True).click()
        assert rows_of(page, "cells")[0][0] == "lenet5-1x32-one-host"
    worse = made(tmp_path, rates=[good, bad])
    assert sum(line.startswith("RATES DIFFER") for line in findings(worse)) == len(SECONDS) * 3
    assert 'class="verdict bad"' in make_page(study, worse).write(path).read_text()


@pytest.mark.long
@needs_hosts
def test_workers_in_one_host_and_on_hosts_apply_equal_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real start of each cell; the rates are those of the recipe's schedule."""
    words = ["lab", "study", "scaling", str(write_study(tmp_path)), "--out", str(tmp_path / "out")]
    assert main(words) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert any("bit for bit, in each of 14 updates of 2 starts" in line for line in lines)
    for cell in SECONDS:
        record = json.loads((tmp_path / "out" / cell / "seed-1.json").read_bytes())
        rates = record["found"]["rates"]
        assert len(rates) == int(cell.split("-")[1][0])
        steps = [float.fromhex(rate) for rate in rates[0]]
        assert steps == pytest.approx([0.0, 0.01, 0.02, 0.02, 0.02, 0.002, 0.002])

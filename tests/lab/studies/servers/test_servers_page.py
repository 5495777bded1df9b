"""What a study of servers has found, against NumPy, and its page in a real browser."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser import opened, point_at, rows_of, started_browser
from short_servers import with_recipe, write_study

from largebatch.lab.studies.hosts.starts import Found
from largebatch.lab.studies.servers.page import make_page
from largebatch.lab.studies.servers.rows import Row, findings, row_of, slower
from largebatch.lab.studies.servers.simulated import Sweep
from largebatch.lab.studies.servers.study import Cell, cells_of, load_study

SECONDS = {
    "alone": (0.10, 0.11, 0.10),
    "central": (0.20, 0.21, 0.20),
    "beside": (0.15, 0.14, 0.15),
    "ring": (0.125, 0.125, 0.13),
}
NONE: dict[Sweep, list[Row]] = {"workers": [], "megabits": [], "mini_batch": []}
PARTS = {"central": [1000], "beside": [600, 400], "ring": [1000], "alone": [1000]}


def found(cell: Cell, seconds: float, *, excess: float, late: float) -> Found:
    """Return a start whose links carried so much more than the formulas have."""
    bare = Found(
        seconds=[seconds, seconds], sent={}, received={}, shards=PARTS[cell.layout], late=0.0,
        rates=[], device_batch=2,
    )  # fmt: skip
    links = cell.expected(bare)
    names = [f"host{place}" for place in range(1, len(links) + 1)]
    return Found(
        seconds=bare.seconds,
        sent={name: link.sent * excess for name, link in zip(names, links, strict=True)},
        received={name: link.received * excess for name, link in zip(names, links, strict=True)},
        shards=bare.shards,
        late=late,
        rates=[],
        device_batch=2,
    )


def made(
    folder: Path,
    *,
    paper: str | None = "faster",
    excess: float = 1.01,
    late: float = 0.0,
    beside: Sequence[float] = SECONDS["beside"],
) -> list[Row]:
    path = write_study(folder, recipes=with_recipe(paper=paper), repeats=3)
    cells = {cell.layout: cell for cell in cells_of(load_study(str(path)), folder)}
    starts = {
        name: {
            seed: found(cells[name], seconds, excess=excess, late=late)
            for seed, seconds in enumerate(times, start=1)
        }
        for name, times in (SECONDS | {"beside": beside}).items()
    }
    return [row_of(cells[name], starts[name], starts["alone"]) for name in SECONDS]


def ratio(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    logs = np.log(np.array(other) / np.array(one))
    reach = 4.302652729911275 * logs.std(ddof=1) / np.sqrt(3)
    mean, low, high = np.exp([logs.mean(), logs.mean() - reach, logs.mean() + reach])
    return mean, low, high


def test_speed_up_and_efficiency_are_over_pairs_of_starts(tmp_path: Path) -> None:
    _, _, _, ring = made(tmp_path)
    mean, low, high = ratio(SECONDS["ring"], SECONDS["alone"])
    assert ring.speed_up is not None
    assert ring.speed_up[:3] == pytest.approx((2 * mean, 2 * low, 2 * high))
    throughput = np.mean(2 / np.array(SECONDS["ring"]))
    assert ring.throughput.mean == pytest.approx(throughput)


def test_the_statement_of_the_paper_is_judged_by_the_interval(tmp_path: Path) -> None:
    mean, low, high = ratio(SECONDS["beside"], SECONDS["central"])
    assert low > 1
    small, links = findings(made(tmp_path))
    assert f"{mean:.2f} times as fast ({low:.2f} to {high:.2f})" in small
    assert small.endswith("the paper has faster for this model: confirmed.")
    assert links == "The counters of all links are within 5% of the formulas: at most 1.0% off."
    undecided, _ = findings(made(tmp_path, beside=(0.19, 0.15, 0.12)))
    assert undecided.endswith("has faster for this model: not decided.")
    slower, _ = findings(made(tmp_path, beside=(0.30, 0.32, 0.30)))
    assert slower.endswith("has faster for this model: refuted.")
    large, links = findings(made(tmp_path, paper="no difference", excess=1.06))
    assert large.endswith("no difference for this model: refuted (level: up to 1.1 times).")
    open_, _ = findings(made(tmp_path, paper="no difference", beside=(0.19, 0.15, 0.12)))
    assert open_.endswith("no difference for this model: not decided (level: up to 1.1 times).")
    near = tuple(
        one * factor for one, factor in zip(SECONDS["central"], (1.01, 1, 1.01), strict=True)
    )
    same, _ = findings(made(tmp_path, paper="no difference", beside=near))
    assert same.endswith("no difference for this model: confirmed (level: up to 1.1 times).")
    ours, _ = findings(made(tmp_path, paper=None))
    assert ours.endswith("the paper does not have this model.")
    assert "NOT within 5% of the formulas: at most 6.0% off" in links


def test_only_one_pair_of_layouts_judges_and_only_on_a_machine_that_is_free(
    tmp_path: Path,
) -> None:
    busy, _ = findings(made(tmp_path, late=0.2))
    assert busy.endswith("; 20% of gradients were late, so the machine was too busy to judge.")
    rows = made(tmp_path)
    more = rows[1].cell.trained.model_copy(update={"workers": (2, 4)})
    pair, _ = findings([replace(row, cell=replace(row.cell, trained=more)) for row in rows])
    assert pair.endswith(" to 1.64)."), "four workers judge"


def test_what_is_slower_than_one_worker_is_said_with_its_speed_up(tmp_path: Path) -> None:
    rows = made(tmp_path, beside=(0.30, 0.32, 0.30))
    mean = ratio((0.30, 0.32, 0.30), SECONDS["alone"])[0] * 2
    assert mean < 1
    central = ratio(SECONDS["central"], SECONDS["alone"])[0] * 2
    assert central > 1
    assert list(slower(rows, "measured")) == [
        f"SLOWER THAN ONE WORKER: lenet5, measured: beside on 2 workers ({mean:.2f})."
    ]
    assert list(slower(made(tmp_path), "measured")) == []


def test_the_page_has_every_cell_and_link_and_its_charts_answer(tmp_path: Path) -> None:
    rows = made(tmp_path)
    study = load_study(str(tmp_path / "study.yaml"))
    path = make_page(study, rows, NONE).write(tmp_path / "study.html")
    with started_browser() as browser, opened(browser, path) as page:
        assert "confirmed" in page.locator(".verdict").inner_text()
        cells = rows_of(page, "cells")
        assert [row[0] for row in cells] == [row.cell.name for row in rows]
        links = rows_of(page, "links")
        assert len(links) == 3 + 2 + 2
        (shown,) = point_at(page, "throughput", "ring", row=1)
        assert "lenet5-ring-2" in shown
        assert f"{np.mean(2 / np.array(SECONDS['ring'])):.4g}" in shown
        page.locator("button[data-series='0']").click()
        assert [row[0] for row in rows_of(page, "cells")] == [
            row.cell.name for row in rows if row.cell.layout != "central"
        ]

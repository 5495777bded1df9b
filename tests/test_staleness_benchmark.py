"""The study of benchmarks/staleness.py, and its figures from the records."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import staleness  # noqa: E402
from contrasts import contrast, noise_of  # noqa: E402
from staleness_studies import EPOCHS, IMAGES, rates_study, studies  # noqa: E402
from staleness_times import distributions, mean_tau, simulated  # noqa: E402

from largebatch.lab.studies.queue.cells import cells_of as policies_of  # noqa: E402
from largebatch.lab.studies.queue.study import Study  # noqa: E402
from largebatch.lab.studies.staleness.pictures import diagonals  # noqa: E402
from largebatch.lab.studies.staleness.run import Row  # noqa: E402
from largebatch.lab.studies.staleness.study import Cell, cells_of, load_study  # noqa: E402
from largebatch.recipe.loading import validate_tree  # noqa: E402


@pytest.fixture
def cells(tmp_path: Path) -> dict[str, dict[str, Cell]]:
    found = {}
    for name, study in studies().items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(study))
        found[name] = {cell.name: cell for cell in cells_of(load_study(str(path)), tmp_path)}
    return found


def a_row(cell: Cell, *top1: float, **stages: float) -> Row:
    """Seeds 1, 2 ... that end at these; stages end so much below."""
    return Row(cell, tuple(
        {
            "seed": seed, "top1": value, "diverged": None, "tau": [1, 2, 1],
            "stages": [{"name": name, "top1": value - less} for name, less in stages.items()],
        }
        for seed, value in enumerate(top1, start=1)
    ))  # fmt: skip


def test_all_studies_can_be_planned_and_cells_take_as_many_samples(
    cells: dict[str, dict[str, Cell]],
) -> None:
    assert {name: len(each) for name, each in cells.items()} == {
        "sensitivity": 21, "main": 24, "products": 15,
    }  # fmt: skip
    rates = validate_tree(Study, rates_study(), source="rates")
    assert len(policies_of(rates, ROOT)) == 3
    for each in cells.values():
        for cell in each.values():
            batch = cell.recipe.batch.global_batch
            updates = IMAGES * EPOCHS / batch
            assert batch * round(updates) == pytest.approx(IMAGES * EPOCHS, rel=0.003)


def test_products_are_compared_within_a_protocol(cells: dict[str, dict[str, Cell]]) -> None:
    lines = diagonals([Row(cell, ()) for cell in cells["products"].values()])
    pairs = {
        (protocol.partition(",")[0], product): [(row.cell.mu, row.cell.learners) for row in rows]
        for (protocol, product), rows in lines.items()
    }
    for protocol in ("1-softsync", "asynchronous"):
        assert sorted(pairs[protocol, 120]) == [(4, 30), (30, 4), (120, 1)]
        assert sorted(pairs[protocol, 480]) == [(16, 30), (120, 4), (480, 1)]
        assert sorted(pairs[protocol, 16]) == [(4, 4), (16, 1)]
    assert pairs["hardsync", 480] == [(480, 1)]
    rows = {
        name: a_row(cell, 0.5, 0.51 + 0.001 * cell.learners / 30)
        for name, cell in cells["products"].items()
    }
    found = list(staleness.products(rows))
    within = [one for one in found if "cells" in one]
    assert len(within) == 2 * (3 + 3 + 1)
    assert all(one["level"] for one in within)
    assert {one["protocol"] for one in found if "products" in one} >= {"hardsync"}


def test_every_question_uses_its_own_cells(
    cells: dict[str, dict[str, Cell]],
) -> None:
    """Late cells lose 10 points to one learner; with BatchNorm 20, 15 of them until the pass."""
    late, alone, norm = "sigma30-mu4-lambda30-staleness", "alone-usual", "norm-"
    rows = {}
    for place, (name, cell) in enumerate(cells["main"].items()):
        end = 0.5 + 0.001 * place - (0.1 if late in name else 0.0)
        less = {"train": 0.15 if late in name and norm in name else 0.0, "statistics": 0.0}
        rows[name] = a_row(cell, end, end + 0.01, end - 0.01, **less, clean=0.0)
    at = {name: 0.001 * place for place, name in enumerate(rows)}
    own = staleness.noise(rows)
    assert own.deviation == pytest.approx(0.0, abs=1e-9)
    assert own.freedom == 2 * (len(rows) - 1)
    found = dict(staleness.differences(rows))
    cost = found["staleness: sigma 30, minus one learner at a rate as low"]
    assert cost.keys() == {"sgd", "lars", "norm", "polished", "lars-root"}
    sgd, one = f"sgd-usual-{late}", f"sgd-{alone}-sigma1-mu4-lambda1-staleness"
    assert cost["sgd"]["mean"] == pytest.approx(100 * (at[sgd] - at[one] - 0.1))
    assert not cost["sgd"]["level"]
    repaired = found["repaired of staleness"]
    assert repaired["statistics"]["mean"] == pytest.approx(15.0)
    assert repaired["clean epochs, statistics"]["mean"] == pytest.approx(15.0, abs=0.5)
    assert repaired["LARS"]["mean"] == pytest.approx(0.0, abs=0.5)
    every_n = found["the rate over tau: is every n where hardsync is?"]
    assert len(every_n) == 6
    assert not all(one["level"] for one in every_n.values())
    assert staleness.fails(a_row(cells["main"][sgd], 0.1, 0.5)) == 1


def test_a_contrast_is_that_of_the_analysis_of_variance() -> None:
    """Against a linear model of cells and seeds, by NumPy's least squares."""
    draw = np.random.default_rng(1)
    values = draw.normal(size=(5, 3)) + draw.normal(size=(1, 3)) + np.arange(5)[:, None]
    cells = [dict(enumerate(row)) for row in values.tolist()]
    design = np.zeros((15, 7))
    for place, (cell, seed) in enumerate(np.ndindex(5, 3)):
        design[place, cell] = 1
        if seed:
            design[place, 4 + seed] = 1
    solved, squares, rank, _ = np.linalg.lstsq(design, values.ravel(), rcond=None)
    weights = np.array([1, -1, -1, 1, 0, 0, 0])
    error = np.sqrt(squares[0] / (15 - rank) * weights @ np.linalg.inv(design.T @ design) @ weights)
    noise = noise_of(cells)
    found = contrast([*zip((1, -1, -1, 1), cells, strict=False)], noise)
    assert noise.freedom == 15 - rank
    assert found.mean == pytest.approx(weights @ solved)
    assert (found.high - found.mean) / error == pytest.approx(2.306, abs=1e-3)  # t, 8 degrees


def test_the_time_to_a_loss_is_that_of_its_first_part(cells: dict[str, dict[str, Cell]]) -> None:
    course = [{"seconds": 2.0, "loss": 1.4}, {"seconds": 4.0, "loss": 1.2}]
    row = Row(cells["main"]["sgd-usual-sigma0-mu4-lambda30"], ({"seed": 1, "course": course},))
    found = dict(staleness.seconds_to({"sgd": row}))["sgd"]
    assert found == {"1.6": {1: 2.0}, "1.3": {1: 4.0}, "1": {1: None}}


def test_an_exact_interval_is_that_of_the_tables() -> None:
    """3 of 10: 6.67 % to 65.25 % (Clopper and Pearson 1934, as in any table of them)."""
    found = staleness.clopper_pearson(3, 10)
    assert (found["low"], found["high"]) == pytest.approx((0.0667, 0.6525), abs=1e-4)
    assert staleness.clopper_pearson(0, 3)["low"] == 0.0
    assert staleness.clopper_pearson(3, 3)["high"] == 1.0


def test_waiting_costs_more_where_learners_straggle() -> None:
    factors = distributions([1.0])
    names = ("usual: lognormal 0.1", "1 of 50 takes 10 times as long", "recorded here")
    found: list[dict[str, Any]] = [
        simulated(factors[name], model_bytes=4e5, gradients=3_000)["sigma 30"] for name in names
    ]
    usual, worst, recorded = found
    times = [found["hardsync takes, times"]["mean"] for found in (usual, worst)]
    assert 1 < times[0] < 1.6 < times[1]
    assert usual["tau > 2 sigma"]["gradients"] == 0
    alike = recorded["hardsync takes, times"]
    assert alike["mean"] == pytest.approx(1.1, abs=0.15)
    assert alike["high"] - alike["low"] < 0.01
    late = [mean_tau(updates, model_bytes=4e5, gradients=600) for updates in (30, 300)]
    assert late[0] == pytest.approx(14.5, abs=0.5)  # 0, 1 ... 29 and no learner twice
    assert late[0] < late[1] < usual["mean tau"]

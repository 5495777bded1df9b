"""What benchmarks/staleness.py carries out, and the numbers that it makes of the records."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import staleness  # noqa: E402
from staleness_studies import EPOCHS, IMAGES, rates_study, studies  # noqa: E402
from staleness_times import distributions, simulated  # noqa: E402

from largebatch.recipe.loading import validate_tree  # noqa: E402
from largebatch.studies.cells import cells_of as policies_of  # noqa: E402
from largebatch.studies.staleness.pictures import diagonals  # noqa: E402
from largebatch.studies.staleness.run import Row  # noqa: E402
from largebatch.studies.staleness.study import Cell, cells_of, load_study  # noqa: E402
from largebatch.studies.study import Study  # noqa: E402


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
        "sensitivity": 21, "main": 21, "products": 15,
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
    assert pairs["hardsync", 120] == [(120, 1)]
    rows = {
        name: a_row(cell, 0.5, 0.5 + 0.01 * cell.learners / 30)
        for name, cell in cells["products"].items()
    }
    found = list(staleness.products(rows))
    within = [one for one in found if "cells" in one]
    assert len(within) == 2 * (3 + 3 + 1)
    assert not any(one["apart"] for one in within)
    assert {one["protocol"] for one in found if "products" in one} >= {"hardsync"}


def test_what_a_remedy_repairs_is_what_it_loses_less(cells: dict[str, dict[str, Cell]]) -> None:
    late = "{}-usual-sigma30-mu4-lambda30-staleness"
    waits = "{}-usual-sigma0-mu4-lambda30"
    ends = {
        late.format("sgd"): (0.50, 0.51, 0.52), waits.format("sgd"): (0.60, 0.61, 0.62),
        late.format("lars"): (0.55, 0.55, 0.58), waits.format("lars"): (0.60, 0.61, 0.62),
        late.format("norm"): (0.50, 0.50, 0.50), waits.format("norm"): (0.60, 0.60, 0.60),
    }  # fmt: skip
    rows: dict[str, Row] = {}
    for name, top1 in ends.items():
        less = {"train": 0.1 if "sigma30" in name else 0.0, "statistics": 0.0}
        rows[name] = a_row(cells["main"][name], *top1, **less)
    found = dict(staleness.repairs(rows))
    assert found.keys() == {"LARS", "statistics"}
    assert found["LARS"]["mean"] == pytest.approx(100 * (0.05 + 0.04 + 0.06) / 3)
    assert found["statistics"]["mean"] == pytest.approx(10.0)
    fails = dict(staleness.failures({"low": a_row(cells["main"][late.format("sgd")], 0.1, 0.5)}))
    assert (fails["low"]["failed"], fails["low"]["of"]) == (1, 2)
    there = dict(staleness.differences(rows))
    assert there[f"{late.format('sgd')} - {waits.format('sgd')}"]["mean"] == pytest.approx(-10)


def test_an_exact_interval_is_that_of_the_tables() -> None:
    """3 of 10: 6.67 % to 65.25 % (Clopper and Pearson 1934, as in any table of them)."""
    found = staleness.clopper_pearson(3, 10)
    assert (found["low"], found["high"]) == pytest.approx((0.0667, 0.6525), abs=1e-4)
    assert staleness.clopper_pearson(0, 3)["low"] == 0.0
    assert staleness.clopper_pearson(3, 3)["high"] == 1.0


def test_waiting_costs_more_where_learners_straggle() -> None:
    found: dict[str, Any] = {
        name: simulated(factor, model_bytes=4e5, gradients=3_000)["sigma 30"]
        for name, factor in distributions([1.0]).items()
    }
    usual, worst = found["usual: lognormal 0.1"], found["1 of 50 takes 10 times as long"]
    assert 1 < usual["hardsync takes, times"] < 1.6 < worst["hardsync takes, times"]
    assert usual["tau > 2 sigma"]["gradients"] == 0
    assert found["recorded here"]["hardsync takes, times"] == pytest.approx(1.1, abs=0.15)

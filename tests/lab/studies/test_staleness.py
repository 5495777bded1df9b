"""Studies of staleness: their cells, runs against the synchronous core, rows and page."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from short_studies import GRID, NORMED, PLAIN, STALENESS, cells_in, opened, undisturbed, write_study

from largebatch import run
from largebatch.lab.protocols.stage import Gradients
from largebatch.lab.studies.records import read_as
from largebatch.lab.studies.runner import carry_out, study
from largebatch.lab.studies.staleness import (
    StalenessCell,
    StalenessRecord,
    StalenessRow,
    cells_of,
    diagonals,
    make_page,
    rudra_findings,
    speed_ups,
    tau_chart,
    trade_off_chart,
    train,
)
from largebatch.lab.studies.study import StudyMachine, load_study
from largebatch.report.pages import Table, series
from largebatch.runs.options import Options


def cells(folder: Path, *grids: dict[str, Any], **changes: Any) -> dict[str, StalenessCell]:  # noqa: ANN401
    every = [{**GRID, **grid} for grid in grids or ({},)]
    found = cells_in(folder, STALENESS, staleness__grids=every, **changes)
    return {cell.name: cell for cell in found if isinstance(cell, StalenessCell)}


def one_cell(folder: Path, *, changes: dict[str, Any] | None = None, **grid: Any) -> StalenessCell:  # noqa: ANN401
    settings = {**PLAIN, **(changes or {})}
    (cell,) = cells(folder, grid, recipes__plain__set=settings).values()
    return cell


def test_a_cell_is_a_recipe_with_the_protocol_of_its_point(tmp_path: Path) -> None:
    grid = {"sigma": [0, 2, "lambda"], "learners": [6], "modulation": ["none", "staleness"]}
    found = cells(tmp_path, grid, grid)  # a point of several grids is one cell
    assert list(found) == [
        "plain/usual-sigma0-mu8-lambda6",
        "plain/usual-sigma2-mu8-lambda6-none",
        "plain/usual-sigma2-mu8-lambda6-staleness",
        "plain/usual-sigma6-mu8-lambda6-none",
        "plain/usual-sigma6-mu8-lambda6-staleness",
    ]
    rules = [cell.rule for cell in found.values()]
    assert [rule.gradients for rule in rules] == [6, 3, 3, 1, 1]
    assert [rule.waits for rule in rules] == [True, False, False, False, False]
    assert [rule.by_staleness for rule in rules] == [False, False, True, False, True]
    assert [cell.recipe.batch.global_batch for cell in found.values()] == [48, 24, 24, 8, 8]
    assert rules[0].rate == pytest.approx((6 * 8 / 32) ** 0.5)
    assert {rule.rate for rule in rules[1:]} == {1.0}


def test_the_installed_study_has_the_points_of_the_papers() -> None:
    found = {cell.name: cell for cell in cells_of(load_study("rudra"), Path())}
    for n in (1, 15, 30):
        for modulation in ("none", "staleness"):
            cell = found[f"sgd/usual-sigma{n}-mu4-lambda30-{modulation}"]
            assert cell.rule.gradients == 30 // n
            assert cell.recipe.batch.global_batch == 4 * (30 // n)
    assert {cell.cluster.learners for cell in found.values()} == {1, 4, 10, 30}
    assert [cell.sigma for cell in cells_of(load_study("rudra-imagenette"), Path())] == [0, 1, 18]


@pytest.mark.parametrize("recipe", ["polished", pytest.param("plain", marks=pytest.mark.long)])
def test_hardsync_of_simulated_learners_ends_as_the_synchronous_core(
    tmp_path: Path, recipe: str
) -> None:
    """In every stage: 4 learners with 8 images each have the batch of 32 for which the rate is."""
    polish = {
        "affine": {"steps": 3, "lr": 0.01},
        "clean": {"steps": 2},
        "statistics": {"samples": 64},
    }
    changed = {**PLAIN, **NORMED, "polish": polish}
    grid = {"recipes": [recipe], "sigma": [0]}
    (cell,) = cells(tmp_path, grid, recipes__polished__set=changed).values()
    ours = train(cell, seed=3, options=Options(out=tmp_path / "ours"))
    synchronous = cell.recipe.model_copy(update={"protocol": None, "seed": 3})
    core = run(synchronous, out=tmp_path / "core", report=False)
    assert [stage["name"] for stage in ours["stages"]] == [stage.name for stage in core.stages]
    for one, other in zip(ours["stages"], core.stages, strict=True):
        assert one["loss"] == pytest.approx(other.loss, rel=2e-4)
        assert one["top1"] == pytest.approx(other.top1, abs=1 / 300)


def test_a_record_has_staleness_and_simulated_time(tmp_path: Path) -> None:
    (waiting, stale) = cells(tmp_path).values()
    found = train(stale, seed=2, options=Options(out=tmp_path / "stale"))
    assert found["updates"] == sum(found["tau"]) == 6
    assert np.average(range(len(found["tau"])), weights=found["tau"]) == pytest.approx(2.5, abs=0.7)
    assert found["seed"] == 2
    found = train(waiting, seed=1, options=Options(out=tmp_path / "waiting"))
    assert found["tau"] == [24]
    assert found["simulated_seconds"] > 6 * 0.018


def test_a_run_at_too_high_a_rate_is_recorded_as_diverged_at_chance(tmp_path: Path) -> None:
    cell = one_cell(
        tmp_path, changes={"schedule.peak_lr": 1e6}, sigma=["lambda"], modulation=["none"]
    )
    found = train(cell, seed=1, options=Options(out=tmp_path))
    assert found["diverged"] is not None
    assert found["top1"] == 0.1
    assert sum(found["tau"][1:]) > 0


def test_a_study_that_is_stopped_leaves_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the signal came while the first gradient is computed."""
    compute = Gradients.of

    def signalled(self: Gradients, mini_batch: int) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return compute(self, mini_batch)

    monkeypatch.setattr(Gradients, "of", signalled)
    runs = opened(tmp_path, STALENESS)
    assert not carry_out(runs, jobs=1, report=lambda _: None)
    assert len(runs.left) == runs.number
    assert runs.store.claim(*runs.left[0])
    runs.store.release_all()


def record(top1: float, tau: list[int], seconds: float, *, seed: int = 1) -> dict[str, Any]:
    return {
        **undisturbed(seed), "top1": top1, "diverged": None, "tau": tau, "updates": 4,
        "simulated_seconds": seconds,
    }  # fmt: skip


def test_a_row_is_the_mean_of_its_seeds(tmp_path: Path) -> None:
    records = record(0.75, [1, 2, 1], 10.0), record(0.65, [1, 2, 0, 1], 30.0, seed=2)
    results = tuple(read_as(StalenessRecord, each, source="row") for each in records)
    row = StalenessRow(one_cell(tmp_path, sigma=[1]), results)
    assert (row.top1.mean, row.seconds) == pytest.approx((70.0, 20.0))
    assert row.diverged == 0
    assert row.tau == pytest.approx((4 * 1 + 2 + 3) / 8)
    assert row.largest_tau == 3
    assert row.late == 1  # of eight, above twice a sigma of 1


@pytest.mark.parametrize(
    ("tau", "word"),
    [
        pytest.param([9_980], "too few gradients", id="no late one of few"),
        pytest.param([10_000], "confirms", id="no late one of many"),
        pytest.param([49_999, 0, 0, 0, 0, 0, 0, 0, 0, 1], "confirms", id="a late one of many"),
        pytest.param([7, 0, 0, 0, 0, 0, 0, 0, 0, 1], "refutes", id="late ones"),
        pytest.param([11_999, 0, 0, 0, 0, 0, 0, 0, 0, 1], "too few gradients", id="3 for 3.6"),
        pytest.param([2_999, 0, 0, 0, 0, 0, 0, 0, 0, 1], "too few gradients", id="3 for 0.9"),
    ],
)
def test_the_share_of_late_gradients_is_judged_where_there_are_enough(
    tmp_path: Path, tau: list[int], word: str
) -> None:
    """Three seeds, with a sigma of 4."""
    records = [record(0.5, tau, 1.0, seed=seed) for seed in (1, 2, 3)]
    results = tuple(read_as(StalenessRecord, each, source="row") for each in records)
    cell = replace(one_cell(tmp_path, sigma=["lambda"]), seeds=3)
    (finding,) = rudra_findings("plain", [StalenessRow(cell, results)])
    assert word in str(finding)


def worse(records: tuple[StalenessRecord, ...]) -> tuple[StalenessRecord, ...]:
    first, second, third = records
    return first, replace(second, top1=second.top1 - 0.1), third


def test_lines_join_cells_of_equal_protocol_and_mu_times_lambda(tmp_path: Path) -> None:
    """One learner alone is on the line of every protocol that does not wait."""
    grids = [
        {"sigma": [1], "mu": [16], "learners": [2], "modulation": ["n"]},
        {"sigma": [0, 1], "mu": [8, 32], "learners": [1, 4], "modulation": ["n"]},
    ]
    top1 = {"mu8-lambda4-n": 0.6, "mu16-lambda2-n": 0.7, "mu32-lambda1-n": 0.9}
    rows = []
    for cell in cells(tmp_path, *grids, seeds=3).values():
        value = next((one for key, one in top1.items() if key in cell.name), 0.5)
        records = [
            record(value + seed / 100, [3, 0, 0, 1], float(cell.mu), seed=seed)
            for seed in (1, 2, 3)
        ]
        results = tuple(read_as(StalenessRecord, each, source=cell.name) for each in records)
        rows.append(StalenessRow(cell, results))
    joined = diagonals(rows)
    of_softsync = joined["1-softsync, modulation n", 32]
    assert sorted((row.cell.mu, row.cell.cluster.learners) for row in of_softsync) == [
        (8, 4), (16, 2), (32, 1)
    ]  # fmt: skip
    assert [len(inside) for key, inside in joined.items() if key[0] == "hardsync"] == [2]
    late, equal = map(str, rudra_findings("plain, usual", rows))
    assert "refutes" in late
    assert "30.00 points (30.00 to 30.00) of top-1, at 32 of 1-softsync" in equal
    # 30, 20 and 30 points are beyond 0 for the two protocols, and not for all four pairs of cells.
    gaps = np.array([30.0, 20.0, 30.0])
    error = gaps.std(ddof=1) / np.sqrt(3)
    low_of_two, low_of_four = gaps.mean() - stats.t.ppf(1 - 0.05 / np.array([4, 8]), 2) * error
    assert low_of_two > 0 > low_of_four
    unsure = [
        replace(row, records=worse(row.records)) if row.cell.mu == 32 else row for row in rows
    ]
    _, equal = map(str, rudra_findings("plain, usual", unsure))
    assert "within the noise" in equal
    looks = {row.cell.protocol: series(0, row.cell.protocol) for row in rows}
    assert trade_off_chart("x", "plain", rows, looks).svg().count("<path") > 0
    assert tau_chart("y", "plain", rows, looks).svg()


def test_speed_up_over_learners_is_that_of_the_simulated_cluster(tmp_path: Path) -> None:
    """With equal times and links without limit every learner adds its own speed."""
    path = write_study(
        tmp_path,
        STALENESS,
        staleness__machines={"overhead": 0.01, "sample": 0.001},
        staleness__times={"usual": {"kind": "constant", "seconds": 1.0}},
        staleness__speed_up={"recipe": "plain", "mu": [8], "learners": [4], "gradients": 40},
    )
    lines = list[str]()
    assert study(path, out=tmp_path / "out", page=True, machine=StudyMachine(), report=lines.append)
    rows = speed_ups(load_study(path), tmp_path)
    assert {(row.protocol, row.cell.cluster.learners) for row in rows} == {
        (protocol, learners)
        for protocol in ("hardsync", "1-softsync", "asynchronous")
        for learners in (1, 4)
    }
    for row in rows:
        assert row.speed_up[:3] == pytest.approx([row.cell.cluster.learners] * 3)
        assert row.seconds[1] * row.cell.cluster.learners == pytest.approx(0.018 / 8)
    assert "hardsync 4.0 times (4.0 to 4.0)" in lines[0]


def test_the_page_compares_the_fastest_with_hardsync(tmp_path: Path) -> None:
    grid = {**GRID, "modulation": ["n"]}
    hard, free = cells(tmp_path, grid).values()
    spread = (-0.01, 0.0, 0.02)
    records = {
        cell.name: {
            f"seed-{seed}": record(top1 + each, tau, seconds, seed=seed)
            for seed, each in enumerate(spread, start=1)
        }
        for cell, top1, tau, seconds in ((hard, 0.9, [12], 20.0), (free, 0.86, [1, 2, 1], 4.0))
    }
    given = load_study(write_study(tmp_path, STALENESS, seeds=3, staleness__grids=[grid]))
    page = make_page(given, tmp_path, records)
    best, fastest, late = page.findings
    assert "not concluded: too few gradients" in late
    reach = 4.302652729911275 * np.std(spread, ddof=1) / np.sqrt(3)
    mean = 90 + 100 * np.mean(spread)
    assert f"{mean:.2f}% ({mean - 100 * reach:.2f} to {mean + 100 * reach:.2f})" in best
    assert "0.20 times as long" in fastest
    assert "-4.00 points (-4.00 to -4.00)" in fastest
    (table,) = page.sections[0].parts
    assert isinstance(table, Table)
    found = {column.title: list(column.values) for column in table.columns}
    assert found["sigma"] == [0, 4]
    assert found["Seconds"] == pytest.approx([20.0, 4.0])
    assert found["Mean tau"] == pytest.approx([0.0, 1.0])
    assert "<svg" in page.html()
    for doubt, last, changes in (
        ("too few seeds to judge: 2", True, {"seed": 1}),
        ("1 of 3 seeds", True, {"diverged": "nan"}),
        ("within the noise", False, {"top1": 0.9}),
    ):
        spoiled = {
            name: {
                run: {**one, **(changes if one["seed"] == 3 or not last else {})}
                for run, one in runs.items()
            }
            for name, runs in records.items()
        }
        best = make_page(given, tmp_path, spoiled).findings[0]
        assert doubt in best
        assert "not concluded" in best

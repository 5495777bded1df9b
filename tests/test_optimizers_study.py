"""The study of optimizers: equal searches, order, resumption, critical batches and tables."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from largebatch import load_recipe
from largebatch.lab.studies.metrics import Interval
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.writing import dump_recipe

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import optimizers  # noqa: E402
import optimizers_together  # noqa: E402
from measuring import RESULTS, newest  # noqa: E402
from optimizers import RECIPE, TRIALS, Study, proposals, score, train  # noqa: E402
from optimizers_figure import (  # noqa: E402
    Critical,
    critical_batch,
    critical_batches,
    seeds_of,
    show,
    tables,
)
from optimizers_runs import (  # noqa: E402
    NETWORKS,
    RESNET,
    VIT,
    Cell,
    Job,
    Setting,
    Setup,
    carry_out,
    epochs_to,
    offered,
    recipe_of,
)

DIGITS = ("data.source=digits", "data.train_samples=1437", "data.val_samples=360")


def setup_of(recipe: Path = RECIPE) -> Setup:
    return Setup(recipe=recipe, data=None, epochs=2, held_out=300, statistics=250)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("optimizer", offered())
@pytest.mark.parametrize("batch", optimizers.BATCHES)
def test_every_cell_can_be_planned(network: str, optimizer: str, batch: int) -> None:
    cell = Cell(network, optimizer, batch)
    for seed in (None, 3):
        recipe = recipe_of(Job(cell, cell.start, seed), setup_of())
        plan = make_plan(recipe, workers=1)
        assert plan.global_batch == batch
        assert recipe.optimizer.weight_decay == cell.start.decay
        if recipe.optimizer.kind == "muon":
            assert recipe.optimizer.others.weight_decay == cell.start.decay
        assert recipe.schedule.peak_lr == cell.start.rate
        assert plan.train_samples == (49_700 if seed is None else 50_000)
        assert plan.device_batch < batch, "the noise scale needs two sizes"


def search(best: Setting, start: Setting) -> list[Setting]:
    """Return all trials of a search whose score falls with the distance from `best`."""
    tried: dict[Setting, float] = {}
    while settings := proposals(start, tried):
        for one in settings:
            ratios = one.rate / best.rate, one.decay / best.decay
            tried[one] = -max(ratios[0], 1 / ratios[0]) - max(ratios[1], 1 / ratios[1])
    return list(tried)


@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0, 2.0, 50.0])
def test_every_search_has_as_many_trials_and_comes_nearer(rate: float) -> None:
    trials = search(Setting(rate, 0.1), Setting(1.0, 0.1))
    assert len(set(trials)) == TRIALS
    distances = [max(one.rate / rate, rate / one.rate) for one in trials]
    assert min(distances) <= 4
    assert [one.rate for one in trials[-2:]] == [trials[distances.index(min(distances))].rate] * 2
    assert {one.decay for one in trials[-2:]} == {0.02, 0.5}


def fake(job: Job, *, epochs: float, top1: float = 0.7, polished: float | None = None) -> Any:  # noqa: ANN401 -- JSON
    return {
        "network": job.cell.network, "optimizer": job.cell.optimizer, "batch": job.cell.batch,
        "rate": job.setting.rate, "decay": job.setting.decay, "seed": job.seed,
        "top1": top1, "diverged": False,
        "curve": [[epochs - 1e-3, 0.2, polished and 0.2], [epochs, top1, polished]],
        "noise": {"value": 900.0, "low": 800.0, "high": None}, "update_seconds": 60.0,
        "polished": polished,
    }  # fmt: skip


def test_a_trial_that_reaches_the_target_sooner_is_better() -> None:
    job = Job(Cell(RESNET, "lars", 500), Setting(1.0, 0.1))
    soon, late = fake(job, epochs=3), fake(job, epochs=4, top1=0.9)
    never, worse = fake(job, epochs=2, top1=0.35), fake(job, epochs=2, top1=0.3)
    diverged = soon | {"diverged": True, "top1": 0.1}
    order = [soon, late, never, worse, diverged]
    assert sorted(order, key=score, reverse=True) == order
    assert epochs_to(0.95, soon["curve"]) is None
    polished = fake(job, epochs=3.5, top1=0.3, polished=0.7)
    assert score(soon) > score(polished) > score(late)


def test_the_most_useful_part_comes_first(tmp_path: Path) -> None:
    cells = [Cell(RESNET, name, batch) for name in ("lars", "muon") for batch in optimizers.BATCHES]
    study = Study(tmp_path / "results.json", cells)
    jobs: list[Job] = []
    while job := study.next():
        jobs.append(job)
        study.take(job, fake(job, epochs=2 * job.setting.rate))
    assert len({job.key for job in jobs}) == len(jobs) == 8 * (TRIALS + 5)
    first = jobs[: 4 * (TRIALS + 2)]
    assert {job.cell.batch for job in first} == {2_000, 8_000}
    assert all(job.seed is None for job in first[: 4 * TRIALS])
    assert {job.seed for job in first[4 * TRIALS :]} == {1, 2}
    assert {job.cell.batch for job in jobs[len(first) : -24]} == {500, 16_000}
    assert {job.seed for job in jobs[-24:]} == {3, 4, 5}


def test_a_grid_is_searched_together_and_one_after_the_other(tmp_path: Path) -> None:
    """A ridge along rate times decay: one after the other stays beside its top."""
    cell = Cell(RESNET, "nesterov", optimizers_together.BATCH)
    study = optimizers_together.Together(tmp_path / "results.json", [cell])
    start, jobs = cell.start, []
    while job := study.next():
        jobs.append(job)
        rate, decay = (
            math.log2(ours / first)
            for ours, first in (
                (job.setting.rate, start.rate),
                (job.setting.decay, start.decay),
            )
        )
        polished = 0.7 - 0.01 * abs(rate + decay) - 0.003 * abs(rate + 2)
        if job.seed is not None:
            polished = 0.8 if rate else 0.75
        study.take(job, fake(job, epochs=10, top1=0.3, polished=polished))
    trials, seeds = jobs[:25], jobs[25:]
    assert len({job.setting for job in trials}) == 25
    assert all(job.seed is None and job.bound == job.target == math.inf for job in trials)
    tried = study.tried(cell)
    both = optimizers.best_of(tried)
    apart = optimizers_together.one_after_other(cell, tried)
    assert apart == start
    assert both == start.times(rate=0.25, decay=5)
    assert [job.seed for job in seeds] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert {job.setting for job in seeds} == {both, apart}
    text = list(optimizers_together.show(study))
    assert sum(line.lstrip().startswith("| ") for line in text) == 6
    assert text[-3:] == [
        f"together: rate {both.rate:g} (lowest), decay {both.decay:g}",
        f"one after the other: rate {start.rate:g}, decay {start.decay:g}",
        "polished top-1 at the end, points: +5.0 (+5.0 to +5.0)",
    ]


@pytest.mark.long
def test_a_small_study_resumes_and_has_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(optimizers, "STAGES", (((500,), 2),))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(load_recipe(RECIPE, DIGITS)), encoding="utf-8")
    setup, path = setup_of(recipe), tmp_path / "results.json"
    cells = [Cell(RESNET, "muon", 500)]
    study = Study(path, cells, epochs=2)
    for _ in range(2):
        job = study.next()
        assert job is not None
        study.take(job, carry_out(job, setup))
    interrupted = study.next()
    assert interrupted is not None
    again = Study(path, cells, epochs=2)
    assert again.runs == study.runs
    train(again, setup, processes=1)
    assert interrupted.key in again.runs
    assert again.next() is None
    seeds = [run for run in again.runs.values() if run["seed"] is not None]
    assert len(again.runs) == TRIALS + 2
    assert {run["seed"] for run in seeds} == {1, 2}
    tried = again.tried(cells[0])
    best = max(tried, key=lambda setting: tried[setting])
    for run in seeds:
        assert (run["rate"], run["decay"]) == (best.rate, best.decay)
        assert run["curve"][-1][1] == run["top1"]
        assert 0 <= run["polished"] <= 1
    with pytest.raises(SystemExit, match="holds runs of 2 epochs, not 5"):
        Study(path, cells, epochs=5)
    show(Study(path, cells, epochs=2), {RESNET: 0.15, VIT: 0.15}, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert "| Muon | 500 | " in capsys.readouterr().out


@pytest.mark.parametrize(("network", "polished"), [(VIT, None), (RESNET, 0.1)])
def test_a_run_that_diverges_is_a_result(
    tmp_path: Path, network: str, polished: float | None
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(load_recipe(RECIPE, DIGITS)), encoding="utf-8")
    job = Job(Cell(network, "nesterov", 500), Setting(1e30, 0.0))
    result = carry_out(job, setup_of(recipe))
    assert result["diverged"]
    assert (result["top1"], result["polished"]) == (0.1, polished)


def test_polishing_is_undone_and_a_trial_ends_at_its_target_or_bound(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(load_recipe(RECIPE, DIGITS)), encoding="utf-8")
    cell = Cell(RESNET, "adamw", 500)
    job = Job(cell, cell.start)
    whole = carry_out(job, setup_of(recipe))["curve"]
    assert whole[-1][0] == pytest.approx(2, abs=0.3)
    fewer = carry_out(job, replace(setup_of(recipe), statistics=100))["curve"]
    assert [row[:2] for row in fewer] == [row[:2] for row in whole]
    assert [row[2] for row in fewer] != [row[2] for row in whole]
    for limit in ({"bound": whole[1][0]}, {"target": whole[1][2]}):
        assert carry_out(replace(job, **limit), setup_of(recipe))["curve"] == whole[:2]


@pytest.mark.parametrize("scale", [2_000, 20_000])
def test_the_critical_batch_is_that_of_the_law(scale: float) -> None:
    epochs = {batch: 3 * (1 + batch / scale) for batch in optimizers.BATCHES}
    assert critical_batch(epochs) == pytest.approx(0.2 * scale, rel=1e-3)


def test_no_critical_batch_where_epochs_do_not_grow_or_too_few_batches_reach() -> None:
    assert critical_batch(dict.fromkeys(optimizers.BATCHES, 3.0)) is None
    assert critical_batch({500: 3.0, 2_000: 5.0}) is None


def test_a_critical_batch_that_is_not_measured_is_said_to_be_below_all() -> None:
    outside = Critical(Interval(100.0, 80.0, 120.0, 5), at_most=True, smallest=500)
    assert str(outside) == "below 500: at most 100 (80 to 120)"
    assert outside.short == "< 500"
    undecided = Critical(Interval(166.0, 39.0, 704.0, 5), at_most=False, smallest=500)
    assert str(undecided) == "166 (39 to 704)"
    assert undecided.short == "170"
    inside = Critical(Interval(1_234.0, 800.0, 1_900.0, 5), at_most=True, smallest=500)
    assert str(inside) == "at most 1,234 (800 to 1,900)"
    assert inside.short == "≤ 1,200"


def test_the_interval_is_over_seeds_and_a_missing_fit_leaves_none(tmp_path: Path) -> None:
    cells = [Cell(RESNET, "lars", batch) for batch in optimizers.BATCHES]
    study = Study(tmp_path / "results.json", cells)
    while job := study.next():
        growth = 1 + job.cell.batch / (4_000 + 1_000 * (job.seed or 0))
        study.take(job, fake(job, epochs=3 * growth, polished=0.72))
    by_batch = {cell.batch: runs for cell, runs in seeds_of(study).items()}
    found = critical_batches(by_batch, 0.6, epochs=25)
    assert found is not None
    assert not found.at_most
    assert found.value.number == 5
    assert 1_000 < found.value.low < found.value.mean < found.value.high < 2_000
    for run in by_batch[16_000]:
        run["curve"] = [[10.0, 0.5, 0.5]]
    censored = critical_batches(by_batch, 0.6, epochs=10)
    assert censored is not None
    assert str(censored).startswith("at most ")
    for run in by_batch[2_000]:
        run["curve"] = [[10.0, 0.5, 0.5]]
    assert critical_batches(by_batch, 0.6, epochs=10) is None
    for run in by_batch[2_000]:  # fewer epochs than at 500
        run["curve"] = [[0.1, 0.9, 0.9]]
    assert critical_batches(by_batch, 0.6, epochs=10) is None


def test_only_seeds_of_every_batch_are_fitted(tmp_path: Path) -> None:
    cells = [Cell(RESNET, "lars", batch) for batch in optimizers.BATCHES]
    study = Study(tmp_path / "results.json", cells)
    while job := study.next():
        study.take(job, fake(job, epochs=3 + job.cell.batch / 2_000, polished=0.72))
    by_batch = {cell.batch: runs for cell, runs in seeds_of(study).items()}
    by_batch[8_000] = by_batch[8_000][:2]
    found = critical_batches(by_batch, 0.6, epochs=25)
    assert found is not None
    assert found.value.number == 2


def test_the_page_has_the_tables_of_the_newest_results() -> None:
    path = newest(optimizers.NAME, RESULTS, machine="cpu2")
    assert path is not None
    content = json.loads(path.read_text(encoding="utf-8"))
    study = Study(path, optimizers.every_cell([]), epochs=content["epochs"])
    assert {len(runs) for runs in seeds_of(study).values()} == {optimizers.SEEDS}
    lines = [line for line in tables(study, content["targets"]) if line]
    page = ROOT / "docs" / "studies" / "optimizers.md"
    assert len(lines) > 60
    assert not set(lines) - set(page.read_text(encoding="utf-8").splitlines())


def test_the_page_has_the_grids_that_were_searched_together() -> None:
    path = newest(optimizers_together.NAME, RESULTS, machine="cpu2")
    assert path is not None
    cells = [
        Cell(RESNET, optimizer, optimizers_together.BATCH)
        for optimizer in optimizers_together.OPTIMIZERS
    ]
    study = optimizers_together.Together(path, cells)
    assert study.next() is None
    shown = list(optimizers_together.show(study))
    rows = {line.strip() for line in shown if line.lstrip().startswith("|")}
    page = (ROOT / "docs" / "studies" / "optimizers.md").read_text(encoding="utf-8")
    assert len(rows) == 1 + 3 * 6
    assert not rows - set(page.splitlines())
    (gained,) = (line for line in shown if line.startswith("polished top-1"))
    assert gained.rpartition("points: ")[2].replace("-", "−") in page

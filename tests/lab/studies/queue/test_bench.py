"""A study carried out: the same budget for every policy, what is found, and seeds as train's.

Most runs here are made up, by accuracies that depend on the rate; a few are real.
"""

import json
import math
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState
from short_studies import a_record, write_study

from largebatch.errors import DivergedError
from largebatch.lab.studies.metrics import measurements, outcome
from largebatch.lab.studies.policies.page import make_page
from largebatch.lab.studies.queue import bench as bench_module
from largebatch.lab.studies.queue.bench import work
from largebatch.lab.studies.queue.cells import cells_of
from largebatch.lab.studies.queue.database import Claim, open_storage
from largebatch.lab.studies.queue.owners import Owners
from largebatch.lab.studies.queue.phases import Bench, Phase, Progress
from largebatch.lab.studies.queue.results import Result as Recorded
from largebatch.lab.studies.queue.results import read_results
from largebatch.lab.studies.queue.study import RATE, Study, load_study
from largebatch.lab.studies.queue.trial import Hopeless, Machine, Result, train
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.report.run import read_run
from largebatch.runs.interrupts import InterruptedStudyError, stop_requests
from largebatch.runs.run import run
from largebatch.tracking.events import Evaluation

BEST = {"fall": 0.8, "flat": 0.1}
"""The rate that suits each policy, in the world that is made up."""

DIVERGES_FROM = 2.0
ONE: dict[str, Any] = {"fall": {}}


def accuracy(policy: str, rate: float) -> float:
    return math.exp(-(math.log(rate / BEST[policy]) ** 2) / 20)


class World:
    """Runs that take no time."""

    def __init__(self, *, interrupted_at: int | None = None) -> None:
        self.made: list[tuple[str, str, Recipe]] = []
        self.interrupted_at = interrupted_at

    def train(
        self, recipe: Recipe, folder: Path, _: Machine, *, stops: Sequence[int], hopeless: Hopeless
    ) -> Result:
        if len(self.made) == self.interrupted_at:
            self.interrupted_at = None
            raise InterruptedStudyError
        policy, rate = folder.parent.name, recipe.schedule.peak_lr
        self.made.append((policy, folder.name, recipe))
        top1 = accuracy(policy, rate)
        rest = a_record(top1, seed=recipe.seed, evaluations=[(9, top1)])
        if rate >= DIVERGES_FROM:
            return {**rest, "top1": 0.1, "loss": None, "diverged": "the loss is infinite"}
        for stop in stops:
            found = Evaluation(
                stage="train", step=stop, epoch=1, top1=top1, top5=1, loss=1, samples=9
            )
            if hopeless(stop, found):
                return {**rest, "pruned_after": stop}
        return {**rest, "seconds": 24.0}

    def of(self, policy: str, word: str) -> list[Recipe]:
        return [recipe for name, slot, recipe in self.made if name == policy and word in slot]


def a_bench(folder: Path, **changes: Any) -> tuple[Bench, str]:  # noqa: ANN401 -- parts of a study
    study = load_study(write_study(folder, **changes))
    cells = tuple(cells_of(study, folder))
    bench = Bench(study=study, cells=cells, out=folder / "out", machine=Machine())
    return bench, f"{folder}/study.journal"


def ignore(*_: object) -> None:
    """Print nothing."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(bench_module, "train", world.train)
    return world


def table(bench: Bench, url: str) -> dict[str, dict[str, str]]:
    """Return the printed table: the columns of each policy."""
    assert isinstance(bench.study, Study)
    with open_storage(url) as storage:
        text = make_page(read_results(storage), targets=bench.study.targets).text()
    heads, *rows = (re.split(" {2,}", line.strip()) for line in text.splitlines())
    return {row[0]: dict(zip(heads, row, strict=True)) for row in rows if len(row) == len(heads)}


def test_every_policy_has_the_same_budget_and_its_own_rate(tmp_path: Path, world: World) -> None:
    search = {"trials": 6, "held_out": 300, "prune": False}
    bench, url = a_bench(tmp_path, search=search, targets=[0.999, 0.5])
    assert work(bench, url, ignore)
    assert len(world.made) == bench.num_runs == 2 * (6 + 2)
    for policy in BEST:
        trials = world.of(policy, "search")
        assert len(trials) == 6
        assert [one.schedule.peak_lr for one in trials[:5]] == [0.5, 0.2, 1.25, 0.08, 3.125]
        assert {one.seed for one in trials} == {100}
        assert all(one.data.held_out and one.data.held_out.samples == 300 for one in trials)
        best = max(trials, key=lambda one: accuracy(policy, one.schedule.peak_lr))
        seeds = world.of(policy, "seed")
        assert [one.seed for one in seeds] == [1, 2]
        assert {one.schedule.peak_lr for one in seeds} == {best.schedule.peak_lr}
        assert not any(one.data.held_out for one in seeds)
    rows = table(bench, url)
    assert rows.keys() == BEST.keys()
    for policy, row in rows.items():
        rate = world.of(policy, "seed")[0].schedule.peak_lr
        assert row["peak_lr"] == f"{rate:g}"
        assert row["Top-1, %"] == f"{100 * accuracy(policy, rate):.2f}"
        assert row["Updates to 50 %"] == "9"
        num_reached = 2 * (accuracy(policy, rate) >= 0.999)
        assert row["reached"] == f"{num_reached} of 2"  # the last target


def test_a_rate_at_an_end_of_those_tried_is_marked(tmp_path: Path, world: World) -> None:
    search = {"trials": 2, "held_out": 300, "prune": False}
    bench, url = a_bench(tmp_path, search=search)
    assert work(bench, url, ignore)
    for policy, row in table(bench, url).items():
        rate = world.of(policy, "seed")[0].schedule.peak_lr
        assert (
            row["At the end of the range"] == f"peak_lr {({0.2: 'lowest', 0.5: 'highest'})[rate]}"
        )


def test_a_resumed_study_repeats_no_run(tmp_path: Path, world: World) -> None:
    bench, url = a_bench(tmp_path, policies=ONE)
    for stop in (0, 2, 4):
        world.interrupted_at = stop
        assert not work(bench, url, ignore)
        assert len(world.made) == stop
    assert work(bench, url, ignore)
    assert len(world.made) == bench.num_runs
    assert len({(policy, slot) for policy, slot, _ in world.made}) == bench.num_runs
    assert work(bench, url, ignore)
    assert len(world.made) == bench.num_runs
    more, _ = a_bench(tmp_path, policies=ONE, seeds=3)
    assert work(more, url, ignore)
    assert len(world.made) == bench.num_runs + 1


@pytest.mark.parametrize("prune", [True, False])
def test_a_process_that_another_treats_as_gone_drops_its_result_and_continues(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, prune: bool
) -> None:
    search = {"trials": 4, "held_out": 300, "prune": prune}
    bench, url = a_bench(tmp_path, policies=ONE, search=search)

    def slow(recipe: Recipe, folder: Path, *args: Any, **options: Any) -> Result:  # noqa: ANN401
        if len(world.made) in {1, 5}:  # a trial, and a seed
            with open_storage(url) as storage:
                for name in optuna.get_all_study_names(storage):
                    study = optuna.load_study(study_name=name, storage=storage)
                    for trial in study.get_trials(states=[TrialState.RUNNING]):
                        study.tell(trial.number, state=TrialState.FAIL)
        return world.train(recipe, folder, *args, **options)

    monkeypatch.setattr(bench_module, "train", slow)
    assert work(bench, url, ignore)
    with open_storage(url) as storage:
        (cell,) = read_results(storage)
    assert cell.finished
    assert (len(cell.search), len(cell.seeds)) == (4, 2)
    assert len(world.made) == bench.num_runs + 2


def test_a_trial_that_diverges_is_a_result_as_good_as_chance(tmp_path: Path, world: World) -> None:
    keys = {RATE: [2.0, 16.0]}  # 2.5 times the rate diverges
    search = {"trials": 4, "held_out": 300, "keys": keys, "prune": False}
    bench, url = a_bench(
        tmp_path,
        policies=ONE,
        search=search,
        robustness_seeds=1,
        robustness_scales=[0.1, 0.5, 5, 10],
    )
    assert work(bench, url, ignore)
    with open_storage(url) as storage:
        search_phase, seeds = Progress(bench, storage).phases()[:2]
        found = search_phase.queue.done()
        results = search_phase.results()
        diverged = [slot for slot, one in results.items() if one.diverged]
        assert diverged
        assert {one.state.name for one in found.values()} == {"COMPLETE"}
        assert all(found[slot].values == [0.1] for slot in diverged)
        scaled = seeds.results()
    rates = sorted(one.schedule.peak_lr for one in world.of("fall", "seed-1"))
    found_rate = world.of("fall", "seed-2")[0].schedule.peak_lr
    assert rates == pytest.approx([found_rate * scale for scale in (0.1, 0.5, 1, 5, 10)])
    assert scaled["seed-1-rate-x10"].diverged
    row = table(bench, url)["fall"]
    assert row["Diverged"] == "0"  # ten times the rate is not the policy's rate
    drop = 100 * (accuracy("fall", found_rate) - 0.1)
    assert row["Worst drop, points"] == f"{drop:.2f}"


def stopped_after(top1: float, before: Sequence[Recorded]) -> int | None:
    """Return where a trial is to be stopped that has this accuracy from its start, as others do."""
    for stop in (3, 6, 9):
        there = [one.top1 for one in before if (one.pruned_after or 12) >= stop]
        if len(there) >= 3 and top1 < np.median(there):
            return stop
    return None


def test_a_hopeless_trial_is_stopped_by_others_of_its_policy_alone(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flat is far below fall everywhere, and yet its best trials continue."""
    monkeypatch.setitem(BEST, "flat", 1e-5)
    bench, url = a_bench(tmp_path, search={"trials": 6, "held_out": 300})
    assert work(bench, url, ignore)
    stopped = []
    with open_storage(url) as storage:
        for phase in Progress(bench, storage).phases()[::2]:
            results = [one for one in phase.results().values() if not one.diverged]
            for place, one in enumerate(results):
                expected = stopped_after(one.top1, results[:place])
                assert one.pruned_after == expected
                stopped.append(expected)
    assert any(stopped)
    best_flat = max(accuracy("flat", one.schedule.peak_lr) for one in world.of("flat", "search"))
    worst_fall = min(accuracy("fall", one.schedule.peak_lr) for one in world.of("fall", "search"))
    assert best_flat < worst_fall


def test_time_left_is_that_of_the_runs_that_are_left(tmp_path: Path, world: World) -> None:
    """24 seconds a run of 12 updates, in trials and seeds alike."""
    del world
    bench, url = a_bench(tmp_path, search={"trials": 2, "held_out": 300, "prune": False})
    left: list[float | None] = []

    def note(progress: Progress, _: Phase, __: Claim, ___: Result) -> None:
        left.append(progress.remaining_seconds())

    assert work(bench, url, note)
    assert left == pytest.approx([24.0 * (8 - done) for done in range(1, 9)])


def test_the_runs_that_are_left_are_shared_with_the_processes_that_are_at_work(
    tmp_path: Path, world: World
) -> None:
    """One of 8 runs is done and two run elsewhere, so three processes share the other 7."""
    del world
    bench, url = a_bench(tmp_path, search={"trials": 2, "held_out": 300, "prune": False})
    with open_storage(url) as storage:
        progress = Progress(bench, storage)
        done, other = (phase.queue for phase in progress.phases())
        claim = done.claim(Owners())
        assert claim is not None
        record = {**a_record(0.5, seed=100), "values": {RATE: 0.5}, "seconds": 24.0}
        done.finish(claim, record, value=0.5)
        for queue in (done, other):
            assert queue.claim(Owners()) is not None
        assert progress.remaining_seconds() == pytest.approx(24.0 * 7 / 3)


def test_the_search_uses_its_metric_everywhere(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By top-5 the lowest rate is the best, by top-1 the highest one."""
    reported: list[float] = []

    def given(recipe: Recipe, folder: Path, machine: Machine, **rest: Any) -> Result:  # noqa: ANN401
        rate = recipe.schedule.peak_lr
        top = {"top1": 0.1 + rate / 10, "top5": 0.9 - rate / 10}
        found = Evaluation(
            stage="train", step=6, epoch=1, loss=1, samples=9, top1=top["top1"], top5=top["top5"]
        )
        if rest["stops"]:
            reported.append(top["top5"])
            rest["hopeless"](6, found)
        world.made.append((folder.parent.name, folder.name, recipe))
        return {**a_record(top["top1"], seed=recipe.seed), **top}

    monkeypatch.setattr(bench_module, "train", given)
    search = {"trials": 3, "held_out": 300, "metric": "top5"}
    bench, url = a_bench(tmp_path, policies=ONE, seeds=1, search=search)
    assert work(bench, url, ignore)
    with open_storage(url) as storage:
        trials = Progress(bench, storage).phases()[0]
        told = [one.value for one in trials.queue.done().values()]
        seen = [one.intermediate_values[6] for one in trials.queue.done().values()]
        assert told == seen == pytest.approx(reported)
    assert {one.schedule.peak_lr for one in world.of("fall", "seed")} == {0.2}


@pytest.mark.parametrize(("held_out", "found"), [(100, 0.2), (300, 0.5), (1000, 1.25)])
def test_the_lowest_rate_within_a_standard_error_of_the_best_is_found(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, held_out: int, found: float
) -> None:
    """The standard error of 72 % is 4.5 points on 100 images, 2.6 on 300, 1.4 on 1,000."""
    top1 = {0.5: 0.7, 0.2: 0.69, 1.25: 0.72}

    def given(recipe: Recipe, folder: Path, machine: Machine, **rest: Any) -> Result:  # noqa: ANN401
        made = World.train(world, recipe, folder, machine, **rest)
        return {**made, "top1": top1[recipe.schedule.peak_lr]}

    monkeypatch.setattr(bench_module, "train", given)
    search = {"trials": 3, "held_out": held_out, "prune": False}
    bench, url = a_bench(tmp_path, policies=ONE, seeds=1, search=search)
    assert work(bench, url, ignore)
    assert {one.schedule.peak_lr for one in world.of("fall", "seed")} == {found}
    assert table(bench, url)["fall"]["peak_lr"] == f"{found:g}"


def test_the_lower_loss_decides_between_equal_accuracies_at_one_rate(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def same(recipe: Recipe, folder: Path, machine: Machine, **rest: Any) -> Result:  # noqa: ANN401
        found = World.train(world, recipe, folder, machine, **rest)
        return {**found, "top1": 0.7, "loss": 1 - recipe.optimizer.weight_decay}

    monkeypatch.setattr(bench_module, "train", same)
    keys = {"optimizer.weight_decay": [0.1, 10]}
    search = {"trials": 3, "held_out": 300, "prune": False, "keys": keys}
    bench, url = a_bench(tmp_path, policies=ONE, seeds=1, search=search)
    assert work(bench, url, ignore)
    tried = {one.optimizer.weight_decay for one in world.of("fall", "search")}
    assert len(tried) == 3
    assert {one.optimizer.weight_decay for one in world.of("fall", "seed")} == {max(tried)}


def test_a_seed_is_the_run_that_train_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("largebatch.runs.record.write_report", None)  # none is drawn
    search = {"trials": 1, "held_out": 300}
    bench, url = a_bench(tmp_path, policies=ONE, seeds=1, search=search)
    assert work(bench, url, ignore)
    with open_storage(url) as storage:
        trials, seeds = Progress(bench, storage).phases()
        (trial,), (seed,) = (one.results().values() for one in (trials, seeds))
        reported = trials.queue.done()["search-001"].intermediate_values
    text = Path(seed.folder, "recipe.yaml")
    assert load_recipe(text).data.held_out is None
    summary = run(load_recipe(text), out=tmp_path / "alone", report=False)
    assert summary.weights_sha256 == seed.weights_sha256
    assert summary.top1 == seed.top1
    assert [one.step for one in trial.evaluations] == [3, 6, 9, 12]
    assert reported.keys() == {3, 6, 9}
    with open_storage(url) as storage:
        (cell,) = read_results(storage)
    (found,) = cell.seeds
    folder = read_run(Path(found.folder))
    alone = outcome(folder)
    assert found.evaluations == tuple(measurements(folder))
    assert found.top5 == alone.top5
    assert 0 < found.average_confidence < 1
    assert 0 < found.confidence_deviation < 1
    assert found.classes is not None
    assert (sum(found.classes.samples), len(found.classes.average_confidence)) == (360, 10)
    assert sum(found.classes.correct) == pytest.approx(360 * found.top1)
    assert (cell.finished, cell.values) == (True, {RATE: 0.5})
    correct = trial.top1 * 300
    assert correct == pytest.approx(round(correct))  # of the images held out, and not of 360


def test_a_run_that_diverges_is_recorded_and_not_raised(tmp_path: Path) -> None:
    bench, _ = a_bench(tmp_path)
    sgd = bench.cells[0].recipe.model_dump(mode="json")
    sgd["optimizer"] = {"kind": "sgd", "momentum": 0.9, "weight_decay": 0.0, "nesterov": False}
    sgd["schedule"]["peak_lr"] = 1e30
    recipe = Recipe.model_validate_json(json.dumps(sgd))
    found = train(recipe, tmp_path / "run", Machine(), stops=(), hopeless=lambda *_: False)
    assert (found["top1"], found["top5"], found["loss"]) == (0.1, 0.5, None)
    assert "diverged" in found
    assert (tmp_path / "run.log").exists()


@pytest.mark.parametrize("ending", ["paused", "finished", "diverges"])
def test_a_request_to_stop_that_comes_as_a_run_ends_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """It comes after the run has last looked, so that its summary tells nothing of it."""

    def end(*_: object, **__: object) -> SimpleNamespace:
        with stop_requests(handles_signals=False):
            os.kill(os.getpid(), signal.SIGTERM)
        if ending == "diverges":
            raise DivergedError("the loss is infinite")
        return SimpleNamespace(status=ending)

    monkeypatch.setattr("largebatch.lab.studies.queue.trial.run", end)
    bench, _ = a_bench(tmp_path)
    with pytest.raises(InterruptedStudyError):
        train(
            bench.cells[0].recipe,
            tmp_path / "run",
            Machine(),
            stops=[3] if ending == "paused" else [],
            hopeless=lambda *_: False,
        )

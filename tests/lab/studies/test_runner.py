"""Studies carried out: budgets, searches, resumed runs, processes, and seeds as those of train.

Most runs here are made up, by accuracies that depend on the rate; a few are real.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import psutil
import pytest
from largebatch.lab.studies.confidence import Confidence
from largebatch.lab.studies.search import should_prune
from short_studies import POLICIES, STALENESS, VARIED, a_record, cells_in, write_study

from largebatch.errors import DivergedError, LargebatchError, StudyError
from largebatch.lab.studies import trained
from largebatch.lab.studies.metrics import measurements
from largebatch.lab.studies.runner import Runs, carry_out, open_runs, study
from largebatch.lab.studies.study import RATE, Machine, load_study
from largebatch.lab.studies.trained import (
    CellResults,
    TrainedCell,
    results_of,
    train,
)
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.report.run import read_run
from largebatch.runs.interrupts import InterruptedStudyError, stop_requests
from largebatch.runs.run import run
from largebatch.tracking.events import Evaluation

CONFIDENCE = Confidence(
    average_confidence=0.9, confidence_deviation=0.1, class_confidence_deviation=0.05,
    classes_never_correct=0, samples=(360,), correct=(300,), averages=(0.9,),
)  # fmt: skip
BEST = {"fall": 0.8, "flat": 0.1}
"""The rate that suits each policy, in the made-up world."""

DIVERGES_FROM = 2.0
ONE: dict[str, Any] = {"fall": {}}
SEARCH = POLICIES["search"]
Json = dict[str, Any]


def accuracy(policy: str, rate: float) -> float:
    return math.exp(-(math.log(rate / BEST[policy]) ** 2) / 20)


class World:
    """Runs that take no time."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str, Recipe]] = []
        self.interrupted_at: int | None = None
        self.record: Callable[[Json, Recipe], Json] = lambda record, _: record

    def train(
        self, recipe: Recipe, folder: Path, _: object, *, stops: Sequence[int] = (),
        stop_early: Callable[[int, Evaluation], bool], watches: bool = False,
    ) -> Json:  # fmt: skip
        del watches
        if len(self.made) == self.interrupted_at:
            self.interrupted_at = None
            raise InterruptedStudyError
        policy, rate = folder.parent.name, recipe.schedule.peak_lr
        self.made.append((policy, folder.name, recipe))
        top1 = accuracy(policy, rate)
        steps = [(stop, top1) for stop in stops] or [(9, top1)]
        record = a_record(top1, seed=recipe.seed, evaluations=steps)
        if rate >= DIVERGES_FROM:
            return {**record, "top1": 0.1, "loss": None, "diverged": "the loss is infinite"}
        for place, stop in enumerate(stops):
            found = Evaluation(
                stage="train", step=stop, epoch=1, top1=top1, top5=1, loss=1, samples=9
            )
            if stop_early(stop, found):
                evaluations = record["evaluations"][: place + 1]
                return {**record, "evaluations": evaluations, "pruned_after": stop}
        return self.record({**record, "seconds": 24.0}, recipe)

    def of(self, policy: str, word: str) -> list[Recipe]:
        return [recipe for name, slot, recipe in self.made if name == policy and word in slot]


def opened(folder: Path, tree: Json = POLICIES, **changes: Any) -> Runs:  # noqa: ANN401 -- parts of a study
    given = load_study(write_study(folder, tree, **changes))
    return open_runs(given, folder, out=folder / "out", machine=Machine())


def carried_out(runs: Runs, jobs: int = 1) -> bool:
    return carry_out(runs, jobs=jobs, report=lambda _: None)


def results(runs: Runs) -> dict[str, CellResults]:
    return {
        cell.variant: results_of(cell, runs.records(cell))
        for cell in runs.cells
        if isinstance(cell, TrainedCell)
    }


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(trained, "train", world.train)
    monkeypatch.setattr(trained, "measure_confidence", lambda *_: CONFIDENCE)
    return world


def test_every_policy_has_the_same_budget_and_its_own_rate(tmp_path: Path, world: World) -> None:
    runs = opened(tmp_path, search={**SEARCH, "trials": 6, "prune": False})
    assert carried_out(runs)
    assert len(world.made) == runs.number == 2 * (6 + 2)
    for policy in BEST:
        trials = world.of(policy, "search")
        assert [one.schedule.peak_lr for one in trials[:5]] == [0.5, 0.2, 1.25, 0.08, 3.125]
        assert {one.seed for one in trials} == {100}
        assert all(one.data.held_out and one.data.held_out.samples == 300 for one in trials)
        best = max(trials, key=lambda one: accuracy(policy, one.schedule.peak_lr))
        seeds = world.of(policy, "seed")
        assert [one.seed for one in seeds] == [1, 2]
        assert {one.schedule.peak_lr for one in seeds} == {best.schedule.peak_lr}
        assert not any(one.data.held_out for one in seeds)
        found = results(runs)[policy]
        assert found.finished
        assert found.values == {RATE: best.schedule.peak_lr}
        assert found.top1 is not None
        assert found.top1.mean == pytest.approx(accuracy(policy, best.schedule.peak_lr))


def test_a_resumed_study_repeats_no_run(tmp_path: Path, world: World) -> None:
    runs = opened(tmp_path, policies=ONE)
    for stop in (0, 2, 4):
        world.interrupted_at = stop
        assert not carried_out(runs)
        assert len(world.made) == stop
    for _ in range(2):
        assert carried_out(runs)
        assert len({(policy, slot) for policy, slot, _ in world.made}) == runs.number
        assert len(world.made) == runs.number
    assert carried_out(opened(tmp_path, policies=ONE, seeds=3))
    assert len(world.made) == runs.number + 1
    with pytest.raises(StudyError, match="search"):
        carried_out(opened(tmp_path, policies=ONE, search={**SEARCH, "trials": 4}))


def test_a_trial_that_diverges_is_a_result_as_good_as_chance(tmp_path: Path, world: World) -> None:
    keys = {RATE: [2.0, 16.0]}  # 2.5 times the rate diverges
    runs = opened(
        tmp_path, policies=ONE, search={**SEARCH, "trials": 4, "keys": keys, "prune": False},
        robustness_seeds=1, robustness_scales=[0.1, 0.5, 5, 10],
    )  # fmt: skip
    assert carried_out(runs)
    found = results(runs)["fall"]
    diverged = [trial for trial in found.trials if trial.diverged]
    assert diverged
    assert {trial.top1 for trial in diverged} == {0.1}
    rates = sorted(one.schedule.peak_lr for one in world.of("fall", "seed-1"))
    rate = found.values[RATE]
    assert rates == pytest.approx([rate * scale for scale in (0.1, 0.5, 1, 5, 10)])
    assert [run.diverged is not None for run in found.scaled][-1]
    assert found.diverged == 0  # ten times the rate is not the policy's rate
    assert found.robustness is not None
    assert found.robustness.worst_drop == pytest.approx(accuracy("fall", rate) - 0.1)


def test_a_trial_is_stopped_by_others_of_its_policy_alone(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flat is far below fall everywhere, and yet its best trials continue."""
    monkeypatch.setitem(BEST, "flat", 1e-5)
    runs = opened(tmp_path, search={**SEARCH, "trials": 6})
    assert carried_out(runs)
    stopped = []
    for found in results(runs).values():
        whole = [one for one in found.trials if not one.diverged]
        for place, one in enumerate(whole):
            expected = None
            for stop in (3, 6, 9):
                there = [e.top1 for e in found.trials[:place] if (e.pruned_after or 12) >= stop]
                if expected is None and len(there) >= 3 and one.top1 < np.median(there):
                    expected = stop
            assert one.pruned_after == expected
            stopped.append(expected)
    assert any(stopped)
    best_flat = max(accuracy("flat", one.schedule.peak_lr) for one in world.of("flat", "search"))
    worst_fall = min(accuracy("fall", one.schedule.peak_lr) for one in world.of("fall", "search"))
    assert best_flat < worst_fall


def test_a_trial_is_stopped_as_by_optunas_median_pruner() -> None:
    draw = np.random.default_rng(5)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_min_trials=3)
    study_ = optuna.create_study(direction="maximize", pruner=pruner)
    before: list[list[float]] = []
    answers = []
    for _ in range(12):
        values, trial, so_far = draw.uniform(size=3).tolist(), study_.ask(), list[float]()
        for step, value in enumerate(values):
            trial.report(value, step)
            so_far.append(value)
            others = [each[step] for each in before if len(each) > step]
            answers.append(trial.should_prune())
            assert should_prune(so_far, others) == answers[-1]
            if answers[-1]:
                break
        before.append(so_far)
        study_.tell(trial, so_far[-1])
    assert {True, False} == set(answers)


@pytest.mark.parametrize(("held_out", "rate"), [(100, 0.2), (300, 0.5), (1000, 1.25)])
def test_the_lowest_rate_within_a_standard_error_of_the_best_is_found(
    tmp_path: Path, world: World, held_out: int, rate: float
) -> None:
    """The standard error of 72 % is 4.5 points on 100 images, 2.6 on 300, 1.4 on 1,000."""
    top1 = {0.5: 0.7, 0.2: 0.69, 1.25: 0.72}
    world.record = lambda record, recipe: {**record, "top1": top1[recipe.schedule.peak_lr]}
    search = {"trials": 3, "held_out": held_out, "prune": False}
    runs = opened(tmp_path, policies=ONE, seeds=1, search=search)
    assert carried_out(runs)
    assert results(runs)["fall"].values == {RATE: rate}


def test_a_seed_is_the_run_that_train_makes(tmp_path: Path) -> None:
    runs = opened(tmp_path, policies=ONE, seeds=1, search={"trials": 1, "held_out": 300})
    assert carried_out(runs)
    found = results(runs)["fall"]
    (trial,), (seed,) = found.trials, found.seeds
    text = Path(seed.folder, "recipe.yaml")
    assert load_recipe(text).data.held_out is None
    summary = run(load_recipe(text), out=tmp_path / "alone", report=False)
    assert summary.weights_sha256 == seed.weights_sha256
    assert summary.top1 == seed.top1
    assert [one.step for one in trial.evaluations] == [3, 6, 9, 12]
    folder = read_run(Path(seed.folder))
    assert seed.evaluations == tuple(measurements(folder))
    assert 0 < seed.average_confidence < 1
    assert 0 < seed.confidence_deviation < 1
    assert (found.finished, found.values) == (True, {RATE: 0.5})
    correct = trial.top1 * 300
    assert correct == pytest.approx(round(correct))  # of the held-out images, and not of 360


WILD = {"kind": "sgd", "momentum": 0.9, "weight_decay": 0.0, "nesterov": False}


def test_a_run_that_diverges_is_recorded_and_not_raised(tmp_path: Path) -> None:
    (cell, _) = cells_in(tmp_path)
    tree = cell.recipe.model_dump(mode="json")
    tree["optimizer"] = WILD
    tree["schedule"]["peak_lr"] = 1e30
    found = train(Recipe.model_validate_json(json.dumps(tree)), tmp_path / "run", {})
    assert (found["top1"], found["top5"], found["loss"]) == (0.1, 0.5, None)
    assert "diverged" in found
    assert (tmp_path / "run.log").exists()


@pytest.mark.parametrize("ending", ["paused", "finished", "diverges"])
def test_a_request_to_stop_that_comes_as_a_run_ends_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """It comes after the run has last looked, so that its summary does not tell it."""

    def end(*_: object, **__: object) -> SimpleNamespace:
        with stop_requests(handles_signals=False):
            os.kill(os.getpid(), signal.SIGTERM)
        if ending == "diverges":
            raise DivergedError("the loss is infinite")
        return SimpleNamespace(status=ending)

    monkeypatch.setattr(trained, "run", end)
    (cell, _) = cells_in(tmp_path)
    with pytest.raises(InterruptedStudyError):
        train(cell.recipe, tmp_path / "run", {}, stops=[3] if ending == "paused" else [])


def test_a_setting_has_its_own_process_and_a_mistake_in_one_ends_the_study(tmp_path: Path) -> None:
    settings = {"own": {"threads": 2, "environment": {"ONEDNN_MAX_CPU_ISA": "AVX2"}}}
    images = {"recipe": "cifar10_resnet8_128", "set": {"execution.cache": None}}
    recipes = {**VARIED["recipes"], "images": images}
    runs = opened(tmp_path, VARIED, recipes=recipes, settings=settings, seeds=1)
    with pytest.raises(LargebatchError, match=r"images/own seed-1: "):
        carried_out(runs)
    assert not list((tmp_path / "out").rglob("*.claim-*"))
    assert len(runs.left) == 1
    cell = runs.cells[0]
    assert isinstance(cell, TrainedCell)
    (own,) = results_of(cell, runs.records(cell)).seeds
    assert own.hardware.endswith("2 threads")
    assert own.usage is not None
    assert own.usage.cpu_seconds > 0
    assert own.usage.peak_memory_bytes > 1e8
    assert 0 < own.usage.train_seconds + own.usage.evaluation_seconds < own.seconds
    assert own.seconds < own.ended - own.begun
    assert own.other_cores >= 0
    assert cell.environment_of_process == {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "2"}
    assert "system" in cell.recipe.monitor


def test_the_command_resumes_draws_and_lists(tmp_path: Path, world: World) -> None:
    path = write_study(tmp_path)
    lines: list[str] = []

    def command(**options: Any) -> bool:  # noqa: ANN401 -- options
        return study(path, out=tmp_path / "out", machine=Machine(), report=lines.append, **options)

    assert command(dry_run=True)
    assert not (tmp_path / "out").exists()
    with pytest.raises(StudyError):
        command(page=True)
    world.interrupted_at = 3
    assert not command()
    assert "3 of 10" in lines[-1]
    assert command(page=True)
    assert not (tmp_path / "out" / "study.html").read_text().count("<script src")
    world.made.clear()
    assert command()
    assert len(world.made) == 7
    assert "fall" in lines[-1]


@pytest.mark.long
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda one: one.name
)
def test_runs_in_processes_end_with_the_command_and_are_resumed(
    tmp_path: Path, number: signal.Signals
) -> None:
    path = write_study(tmp_path, STALENESS, seeds=3)
    program = (
        "import sys; from pathlib import Path\n"
        "from largebatch.lab.studies.runner import study\n"
        "from largebatch.lab.studies.study import Machine\n"
        "if __name__ == '__main__':\n"
        "    done = study(Path(sys.argv[1]), out=Path(sys.argv[2]), jobs=2, machine=Machine(),\n"
        "        report=lambda line: print(line, flush=True))\n"
        "    sys.exit(0 if done else 75)\n"
    )
    (tmp_path / "program.py").write_text(program)
    words = [sys.executable, str(tmp_path / "program.py"), str(path), str(tmp_path / "out")]
    # of a program outside of the tree: the package and its recipes are those that are tested
    tested = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=tested) as parent:
        assert parent.stdout is not None
        assert "top-1" in parent.stdout.readline()
        workers = psutil.Process(parent.pid).children(recursive=True)
        time.sleep(1)
        parent.send_signal(number)
        parent.communicate()
        assert parent.returncode == (75 if number != signal.SIGKILL else -number)
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=tested)
    assert "study.html" in done.stdout


@pytest.mark.long
def test_runs_in_processes_record_the_same_as_in_one(tmp_path: Path) -> None:
    found = []
    for jobs in (1, 2):
        (tmp_path / str(jobs)).mkdir()
        runs = opened(tmp_path / str(jobs), STALENESS)
        assert carried_out(runs, jobs=jobs)
        found.append([runs.records(cell) for cell in runs.cells])
    for one, other in zip(*found, strict=True):
        for name in one:
            assert one[name]["tau"] == other[name]["tau"]
            assert one[name]["loss"] == pytest.approx(other[name]["loss"], rel=1e-4)

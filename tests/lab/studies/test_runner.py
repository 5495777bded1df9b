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
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from programs import with_default_signals
from short_studies import POLICIES, STALENESS, VARIED, a_record, cells_in, opened, write_study

from largebatch.errors import DataError, DivergedError, LargebatchError, StudyError
from largebatch.lab.studies import runner, trained
from largebatch.lab.studies.metrics import measurements
from largebatch.lab.studies.runner import Runs, carry_out, study
from largebatch.lab.studies.study import PROBED, StudyMachine
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
from largebatch.runs.options import Options
from largebatch.runs.run import run

BEST = {"fall": 0.8, "flat": 0.1}
"""The rate that suits each policy, in the made-up world."""

DIVERGES_FROM = 2.0
ONE: dict[str, Any] = {"fall": {}}
SEARCH = POLICIES["search"]
Json = dict[str, Any]


def accuracy(policy: str, rate: float) -> float:
    return math.exp(-(math.log(rate / BEST.get(policy, 0.5)) ** 2) / 20)


class World:
    """Runs that take no time."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str, Recipe]] = []
        self.interrupted_at: int | None = None
        self.record: Callable[[Json, Recipe], Json] = lambda record, _: record

    def train(self, recipe: Recipe, options: Options) -> Json:
        folder = options.out
        if len(self.made) == self.interrupted_at:
            self.interrupted_at = None
            raise InterruptedStudyError
        policy, rate = folder.parent.name, recipe.schedule.peak_lr
        self.made.append((policy, folder.name, recipe))
        top1 = accuracy(policy, rate)
        record = a_record(top1, seed=recipe.seed, evaluations=[(9, top1)])
        if rate >= DIVERGES_FROM:
            return {**record, "top1": 0.1, "loss": None, "diverged": "the loss is infinite"}
        return self.record(record, recipe)

    def of(self, policy: str, word: str) -> list[Recipe]:
        return [recipe for name, slot, recipe in self.made if name == policy and word in slot]


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
    return world


def test_every_policy_has_the_same_budget_and_its_own_rate(tmp_path: Path, world: World) -> None:
    runs = opened(tmp_path, search={**SEARCH, "trials": 6})
    assert carried_out(runs)
    assert len(world.made) == runs.number == 2 * (6 + 2)
    for policy in BEST:
        trials = world.of(policy, "search")
        assert [one.schedule.peak_lr for one in trials[:5]] == [0.5, 0.2, 1.25, 0.08, 3.125]
        assert 0.5 / 16 <= trials[5].schedule.peak_lr <= 0.5 * 16
        assert {one.seed for one in trials} == {100}
        assert all(one.data.held_out and one.data.held_out.samples == 300 for one in trials)
        best = max(trials, key=lambda one: accuracy(policy, one.schedule.peak_lr))
        seeds = world.of(policy, "seed")
        assert [one.seed for one in seeds] == [1, 2]
        assert {one.schedule.peak_lr for one in seeds} == {best.schedule.peak_lr}
        assert not any(one.data.held_out for one in seeds)
        found = results(runs)[policy]
        assert found.finished
        assert found.rate == best.schedule.peak_lr
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
    search = {**SEARCH, "trials": 4, "factors": [0.4, 16.0]}
    runs = opened(tmp_path, policies=ONE, search=search)
    assert carried_out(runs)
    found = results(runs)["fall"]
    diverged = [trial for trial in found.trials if trial.diverged]
    assert {trial.top1 for trial in diverged} == {0.1}
    assert found.diverged == 0


@pytest.mark.parametrize(("held_out", "rate"), [(100, 0.2), (300, 0.5), (1000, 1.25)])
def test_the_lowest_rate_within_a_standard_error_of_the_best_is_found(
    tmp_path: Path, world: World, held_out: int, rate: float
) -> None:
    """The standard error of 72 % is 4.5 points on 100 images, 2.6 on 300, 1.4 on 1,000."""
    top1 = {0.5: 0.7, 0.2: 0.69, 1.25: 0.72}
    world.record = lambda record, recipe: {**record, "top1": top1[recipe.schedule.peak_lr]}
    search = {"trials": 3, "held_out": held_out}
    runs = opened(tmp_path, policies=ONE, seeds=1, search=search)
    assert carried_out(runs)
    assert results(runs)["fall"].rate == rate


def test_a_seed_is_the_run_that_train_makes(tmp_path: Path) -> None:
    runs = opened(tmp_path, policies=ONE, seeds=1, search={"trials": 1, "held_out": 300})
    assert carried_out(runs)
    found = results(runs)["fall"]
    (trial,), (seed,) = found.trials, found.seeds
    record = runs.records(runs.cells[0])["seed-1"]
    text = Path(record["folder"], "recipe.yaml")
    assert load_recipe(text).data.held_out is None
    summary = run(load_recipe(text), out=tmp_path / "alone", report=False)
    assert summary.weights_sha256 == record["weights_sha256"]
    assert summary.top1 == seed.top1
    assert seed.evaluations == tuple(measurements(read_run(Path(record["folder"]))))
    assert (found.finished, found.rate) == (True, 0.5)
    correct = trial.top1 * 300
    assert correct == pytest.approx(round(correct))  # of the held-out images, and not of 360


WILD = {"kind": "sgd", "momentum": 0.9, "weight_decay": 0.0, "nesterov": False}


def test_a_run_that_diverges_is_recorded_and_not_raised(tmp_path: Path) -> None:
    (cell, _) = cells_in(tmp_path)
    tree = cell.recipe.model_dump(mode="json")
    tree["optimizer"] = WILD
    tree["schedule"]["peak_lr"] = 1e30
    found = train(Recipe.model_validate_json(json.dumps(tree)), Options(out=tmp_path / "run"))
    assert (found["top1"], found["loss"]) == (0.1, None)
    assert found["diverged"] is not None
    assert (tmp_path / "run.log").exists()


@pytest.mark.parametrize("ending", ["finished", "diverges"])
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

    monkeypatch.setattr(trained, "start", end)
    (cell, _) = cells_in(tmp_path)
    with pytest.raises(InterruptedStudyError):
        train(cell.recipe, Options(out=tmp_path / "run"))


def test_a_setting_has_its_own_process_and_a_mistake_in_one_ends_the_study(tmp_path: Path) -> None:
    settings = {"own": {"threads": 2, "environment": {"ONEDNN_MAX_CPU_ISA": "AVX2"}}}
    images = {"recipe": "cifar10_resnet8_128", "set": {"execution.cache": None}}
    recipes = {**VARIED["recipes"], "images": images}
    runs = opened(tmp_path, VARIED, recipes=recipes, settings=settings, seeds=1)
    with pytest.raises(LargebatchError, match=r"images/own seed-1: "):
        carried_out(runs)
    (left,) = runs.left
    assert runs.store.claim(*left)
    runs.store.release_all()
    cell = runs.cells[0]
    assert isinstance(cell, TrainedCell)
    record = runs.records(cell)["seed-1"]
    assert record["hardware"].endswith("2 threads")
    assert record["usage"]["cpu_seconds"] > 0
    assert record["usage"]["peak_memory_bytes"] > 1e8
    assert record["usage"]["train_seconds"] > 0
    assert record["usage"]["read_bytes"] >= 0
    assert cell.environment_of_process == {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "2"}
    assert "system" in cell.recipe.monitor


def test_the_command_resumes_draws_and_lists(tmp_path: Path, world: World) -> None:
    path = write_study(tmp_path)
    lines: list[str] = []

    def command(**options: Any) -> bool:  # noqa: ANN401 -- options
        return study(
            path, out=tmp_path / "out", machine=StudyMachine(), report=lines.append, **options
        )

    assert command(dry_run=True)
    assert not (tmp_path / "out").exists()
    # Both policies begin alike. 12 updates of 0.5 s; the evaluation took what is left of 9 s.
    assert len(world.made) == 1
    assert world.made[0][2].duration.steps == PROBED
    assert lines[-1] == "10 of 10 runs are left: about 0:01:30"
    world.made.clear()
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
    assert "fall" in lines[-2]
    drawn = {path.name for path in (tmp_path / "out" / "paper").iterdir()}
    assert drawn == {"variants.csv", "variants.tex"}  # without a target there is no chart
    record = tmp_path / "out" / "digits" / "fall" / "seed-1.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "begun": 0, "ended": 100}))
    (record.parent / "seed-2.json").unlink()
    world.made.clear()
    assert command(dry_run=True)
    records = [json.loads(path.read_text()) for path in record.parent.glob("se*-*.json")]
    mean = sum(one["ended"] - one["begun"] for one in records) / 4
    assert lines[-1] == f"1 of 10 runs are left: about {timedelta(seconds=round(mean))}"
    assert not world.made
    damages: list[Json] = [{"top1": "0.5"}, {"top1": None}, {"evaluations": [1]}, {"begun": []}]
    damages += [{"cores": 10**400}, {"evaluations": [{"step": 0, "seconds": 1.0, "top1": 1.0}]}]
    for spoiled in damages:
        record.write_text(json.dumps({**content, **spoiled}))
        with pytest.raises(StudyError, match=next(iter(spoiled))):
            command(page=True)


def test_a_dry_run_is_bounded_and_says_on_how_many_cells_it_rests(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each probe begins with another rate, so none serves two cells; each recipe has one."""
    policies = {name: {"peak_lr": rate} for name, rate in (("a", 0.1), ("b", 0.2), ("c", 0.3))}
    recipes = {"one": POLICIES["recipes"]["digits"], "two": POLICIES["recipes"]["digits"]}
    path = write_study(tmp_path, recipes=recipes, policies=policies)
    lines: list[str] = []

    def dry_run() -> str:
        out = tmp_path / "out"
        assert study(path, dry_run=True, out=out, machine=StudyMachine(), report=lines.append)
        return lines[-1]

    assert dry_run() == "30 of 30 runs are left: about 0:04:30"
    assert len(world.made) == 6
    world.made.clear()
    monkeypatch.setattr(runner, "PROBING_SECONDS", -1.0)
    assert dry_run() == "30 of 30 runs are left: about 0:04:30, by 2 of 6 cells"
    assert len(world.made) == 2


def test_a_dry_run_refuses_what_the_run_refuses(tmp_path: Path, world: World) -> None:
    path, out = write_study(tmp_path), tmp_path / "out"

    def refused(**options: Any) -> None:  # noqa: ANN401 -- options
        for dry_run in (True, False):
            given = {"out": out, "machine": StudyMachine(), "report": print, **options}
            with pytest.raises(LargebatchError):
                study(path, dry_run=dry_run, **given)

    refused(machine=StudyMachine(data={"": tmp_path}))
    blocked = tmp_path / "file"
    blocked.touch()
    refused(out=blocked)
    refused(out=blocked / "below")
    opened(tmp_path).store.define(cells_in(tmp_path, search={**SEARCH, "trials": 4}))
    write_study(tmp_path)
    refused()
    images = {"recipe": "cifar10_resnet8_128", "set": {"execution.cache": None}}
    write_study(tmp_path, recipes={"images": images})
    refused(out=tmp_path / "other")
    assert not world.made
    world.record = fail
    write_study(tmp_path)
    refused(out=tmp_path / "third")


def fail(*_: object) -> Json:
    raise DataError("such as a data set that cannot be read")


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
        "from largebatch.lab.studies.study import StudyMachine\n"
        "if __name__ == '__main__':\n"
        "    done = study(Path(sys.argv[1]), out=Path(sys.argv[2]), jobs=2,\n"
        "        machine=StudyMachine(),\n"
        "        report=lambda line: print(line, flush=True))\n"
        "    sys.exit(0 if done else 75)\n"
    )
    (tmp_path / "program.py").write_text(program)
    words = [sys.executable, str(tmp_path / "program.py"), str(path), str(tmp_path / "out")]
    # of a program outside of the tree: the package and its recipes are those that are tested
    tested = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = with_default_signals(*words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=tested) as parent:
        assert parent.stdout is not None
        assert "top-1" in parent.stdout.readline()
        workers = psutil.Process(parent.pid).children(recursive=True)
        time.sleep(1)
        parent.send_signal(number)
        parent.communicate()
        assert parent.returncode == (75 if number != signal.SIGKILL else -number)
    assert workers
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

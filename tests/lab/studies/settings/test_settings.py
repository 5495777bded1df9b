"""A study of settings carried out: what is refused, what is run, and what is measured of it.

Most runs here are made up; one is real.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import psutil
import pytest
from short_studies import SETTINGS, a_record, write_settings, write_study

import largebatch
from largebatch.cli.main import DONE, USER, main
from largebatch.errors import RecipeError, StudyError
from largebatch.lab.studies.queue import bench as bench_module
from largebatch.lab.studies.queue.bench import work
from largebatch.lab.studies.queue.cells import cells_of
from largebatch.lab.studies.queue.database import Claim, open_storage
from largebatch.lab.studies.queue.phases import Bench, Phase, Progress
from largebatch.lab.studies.queue.results import SettingResults, read_results, read_settings
from largebatch.lab.studies.queue.study import RATE, load_configuration_study, load_study
from largebatch.lab.studies.queue.trial import Hopeless, Machine, Result, train
from largebatch.recipe.recipe import Recipe
from largebatch.runs.interrupts import InterruptedStudyError

EXAMPLES = Path(__file__).parents[4] / "docs" / "examples"
TOP1 = {96: 0.9, 192: 0.8}


class World:
    """Runs that take no time, and reach what suits their batch."""

    def __init__(self, *, interrupted_at: int | None = None) -> None:
        self.made: list[tuple[str, str, Recipe, Machine]] = []
        self.interrupted_at = interrupted_at

    def train(
        self,
        recipe: Recipe,
        folder: Path,
        machine: Machine,
        *,
        stops: Sequence[int],
        hopeless: Hopeless,
    ) -> Result:
        del stops, hopeless
        if len(self.made) == self.interrupted_at:
            self.interrupted_at = None
            raise InterruptedStudyError
        self.made.append((folder.parent.name, folder.name, recipe, machine))
        top1 = TOP1[recipe.batch.global_batch] - abs(recipe.schedule.peak_lr - 0.5)
        seconds = 24.0 / (machine.threads or 1)
        usage = {"train_seconds": seconds, "evaluation_seconds": 1.0, "cpu_seconds": 24.0}
        times = {"begun": 100.0 * len(self.made), "ended": 100.0 * len(self.made) + seconds + 6}
        return {
            **a_record(top1, seed=recipe.seed), "host": "node-7", "seconds": seconds, **times,
            "images_per_second": 12 * 96 / seconds, "usage": usage, "other_cores": 0.5,
        }  # fmt: skip


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(bench_module, "train", world.train)
    return world


def a_bench(folder: Path, **changes: Any) -> tuple[Bench, str]:  # noqa: ANN401 -- parts of a study
    study = load_configuration_study(write_settings(folder, **changes))
    cells = tuple(cells_of(study, folder))
    bench = Bench(study=study, cells=cells, out=folder / "out", machine=Machine())
    return bench, f"{folder}/study.journal"


def ignore(*_: object) -> None:
    """Print nothing."""


def read(url: str) -> list[SettingResults]:
    with open_storage(url) as storage:
        return read_settings(storage)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {}}, "settings: dictionary should have at least 1 item"),
        ({"settings": {"a": {"worker": 2}}}, "settings.a.worker: unknown key; did you mean"),
        ({"settings": {"a": {"threads": 0}}}, "settings.a.threads: input should be greater"),
        ({"settings": {"a": {"backend": "mpi"}}}, "settings.a.backend: input should be 'auto'"),
        (
            {"settings": {"a": {}, "b": {"threads": 2}, "c": {"set": {}}}},
            "settings.a and settings.c are the same: leave one of them out",
        ),
        ({"metrics": ["f1"]}, "1 problem\n  metrics.0: input should be 'top1', 'top5', 'train_s"),
        ({"metrics": ["top1", "top1"]}, "metrics: top1 is given twice"),
        (
            {"search": {"trials": 1, "held_out": 9, "seed": 2}},
            r"search.seed \(2\) is one of the seeds 1 to 2",
        ),
        ({"policies": {"flat": {}}}, "policies: unknown key"),
    ],
)
def test_a_study_file_with_a_mistake_is_refused_by_its_key(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        load_configuration_study(write_settings(tmp_path, **changes))


def test_a_setting_that_is_given_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("name: a\nsettings:\n  own: {}\n  own: {threads: 2}\n")
    with pytest.raises(RecipeError, match=r'study.yaml:4: found duplicate key "own"'):
        load_configuration_study(path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"set": {"batch.globl": 3}}, "recipe digits with setting a: (?s:.*)globl: unknown key"),
        ({"workers": 7}, "recipe digits with setting a: (?s:.*)cannot be divided over 7 workers"),
        ({"set": {"execution.decoder": "dali"}}, "decoder: dali would not be used"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_by_its_name(
    tmp_path: Path, setting: dict[str, Any], message: str
) -> None:
    study = load_configuration_study(write_settings(tmp_path, settings={"a": setting}))
    with pytest.raises(RecipeError, match=message):
        cells_of(study, tmp_path)


def test_a_study_of_the_other_kind_names_its_command(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="a study of settings; run it with `largebatch bench`"):
        load_study(write_settings(tmp_path))
    with pytest.raises(RecipeError, match="a study of policies; run it with `largebatch lr bench`"):
        load_configuration_study(write_study(tmp_path))


def test_the_example_can_be_run() -> None:
    study = load_configuration_study(EXAMPLES / "digits_settings.yaml")
    assert len(cells_of(study, EXAMPLES)) == len(study.recipes) * len(study.settings)


def test_every_setting_is_run_with_a_seed_before_the_next_one_in_a_process_of_its_own(
    tmp_path: Path, world: World
) -> None:
    bench, url = a_bench(tmp_path)
    left: list[float | None] = []

    def note(progress: Progress, _: Phase, __: Claim, ___: Result) -> None:
        left.append(progress.remaining_seconds())

    assert work(bench, url, note)
    names = [(setting, slot) for setting, slot, *_ in world.made]
    assert names == [(one, f"seed-{seed}") for seed in (1, 2) for one in SETTINGS["settings"]]
    assert [machine.threads for *_, machine in world.made[:3]] == [None, None, 2]
    assert all(machine.apart for *_, machine in world.made)
    assert all("system" in recipe.monitor for _, _, recipe, _ in world.made)
    assert [recipe.batch.global_batch for _, _, recipe, _ in world.made[:3]] == [96, 192, 96]
    assert left[:2] == [None, None]
    assert left[2:] == pytest.approx([30 + 30 + 18, 30 + 18, 18, 0])
    cells = read(url)
    assert [(one.setting, one.threads, one.finished) for one in cells] == [
        *(("own", None, True), ("large", None, True), ("threads", 2, True)),
    ]
    assert [run.usage.train_seconds for run in cells[2].seeds if run.usage] == [12.0, 12.0]
    with open_storage(url) as storage:
        assert read_results(storage) == []  # for `lr recommend` there is no policy


def test_a_study_that_is_stopped_goes_on_and_what_was_measured_stays_what_it_was(
    tmp_path: Path, world: World
) -> None:
    bench, url = a_bench(tmp_path)
    world.interrupted_at = 2
    assert not work(bench, url, ignore)
    assert [one.finished for one in read(url)] == [False, False, False]
    assert work(bench, url, ignore)
    assert len(world.made) == bench.num_runs == 6
    more, _ = a_bench(tmp_path, seeds=3, settings={**SETTINGS["settings"], "two": {"workers": 2}})
    assert work(more, url, ignore)
    assert len(world.made) == more.num_runs == 12
    assert world.made[-1][-1].workers == 2
    other, _ = a_bench(tmp_path, settings={"threads": {"threads": 4}})
    with pytest.raises(StudyError, match=r"another study of this name: machine.threads is 2 there"):
        work(other, url, ignore)
    cached = {"own": {"set": {"execution.cache": None}}}
    with pytest.raises(StudyError, match='recipe.execution.cache is "memory" there and null here'):
        work(a_bench(tmp_path, settings=cached)[0], url, ignore)


def test_two_studies_of_different_kinds_under_one_name_are_refused(
    tmp_path: Path, world: World
) -> None:
    del world
    bench, url = a_bench(tmp_path)
    assert work(bench, url, ignore)
    study = load_study(write_study(tmp_path, policies={"flat": {}}))
    policies = Bench(
        study=study, cells=tuple(cells_of(study, tmp_path)), out=tmp_path, machine=Machine()
    )
    with pytest.raises(StudyError, match="tiny: .*compares every setting, and this one every pol"):
        work(policies, url, ignore)


def test_a_search_gives_every_setting_a_rate_of_its_own(tmp_path: Path, world: World) -> None:
    search = {"trials": 3, "held_out": 300, "prune": False}
    bench, url = a_bench(
        tmp_path, search=search, seeds=1, settings={"own": {}, "two": {"workers": 2}}
    )
    assert work(bench, url, ignore)
    trials = [recipe for _, slot, recipe, _ in world.made if "search" in slot]
    assert [one.schedule.peak_lr for one in trials[::2]] == [0.5, 0.2, 1.25]
    assert all(one.data.held_out for one in trials)
    assert [dict(one.values) for one in read(url)] == [{RATE: 0.5}] * 2
    assert all(len(one.search) == 3 for one in read(url))


def test_the_command_prints_what_settings_cost_and_writes_the_page(
    tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_settings(tmp_path, seeds=1)
    words = ["lab", "study", "settings", str(path), "--out", str(tmp_path / "out")]
    world.interrupted_at = 2
    assert main(words) == os.EX_TEMPFAIL
    assert "2 of 3 runs are done; to resume: the same command" in capsys.readouterr().out
    page = tmp_path / "out" / "study.html"
    assert main([*words, "--report"]) == DONE
    *_, waiting, written = capsys.readouterr().out.splitlines()
    assert waiting == "Not finished: 1 cell, digits with threads"
    assert written == f"page: {page}"
    assert main(words) == DONE
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "3/3  digits/threads seed-1: top-1 90.00%; 0:00:00 left"
    heads, *rows = (re.split(" {2,}", line.strip()) for line in printed[1:5])
    columns = [dict(zip(heads, row, strict=True)) for row in rows]
    assert [(row["Setting"], row["Top-1, %"]) for row in columns] == [
        *(("own", "90.00"), ("large", "80.00"), ("threads", "90.00"))
    ]
    assert (columns[2]["Training, s"], columns[2]["Images/s"]) == ("12.0", "96")
    assert "threads trains in the shortest time, 12.0 s" in printed[5]
    assert "Other programs used 0.5 to 0.5 cores" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--report",), "study.db: no such file"),
        (("--storage", "nonsense"), "nonsense: cannot be used"),
        (("--data", "/images"), "/images would not be read: no recipe of the study"),
    ],
)
def test_what_a_user_can_mend_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    path = write_settings(tmp_path)
    assert (
        main(["lab", "study", "settings", str(path), "--out", str(tmp_path / "out"), *words])
        == USER
    )
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1


def test_a_dry_run_prints_the_runs_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_settings(tmp_path, settings={"own": {}})
    assert (
        main(["lab", "study", "settings", str(path), "--dry-run", "--out", str(tmp_path / "out")])
        == DONE
    )
    first, total = capsys.readouterr().out.splitlines()
    assert first == "digits/own: 2 runs of 12 updates"
    assert total.startswith("2 runs; about ")
    assert [each.name for each in tmp_path.iterdir()] == ["study.yaml"]


class Watched(NamedTuple):
    """A real run, and what the system counted of its process meanwhile."""

    result: Result
    cpu_seconds: float
    memory_bytes: int
    threads: int
    kernels: set[str | None]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    bench, _ = a_bench(tmp_path_factory.mktemp("real"))
    ended, memory, threads = Event(), [0], [0]
    kernels: set[str | None] = set()

    def watch() -> None:
        while not ended.wait(0.02):
            for process in psutil.Process().children(recursive=True):
                try:
                    memory.append(process.memory_info().rss)
                    threads.append(int(process.environ().get("OMP_NUM_THREADS", 0)))
                    kernels.add(process.environ().get("ONEDNN_MAX_CPU_ISA"))
                except psutil.NoSuchProcess:
                    continue

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    thread = Thread(target=watch)
    thread.start()
    machine = Machine(apart=True, threads=2, environment={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    result = train(
        bench.cells[0].recipe, bench.out / "run", machine, stops=(), hopeless=lambda *_: False
    )
    ended.set()
    thread.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Watched(result, used, max(memory), max(threads), kernels)


@pytest.mark.long
def test_what_a_run_is_recorded_to_use_is_what_the_system_counted(watched: Watched) -> None:
    found = watched.result["usage"]
    assert 0 < found["cpu_seconds"] < watched.cpu_seconds  # which has the imports too
    part = found["peak_memory_bytes"] / watched.memory_bytes  # the last evaluation may need more
    assert 0.7 < part < 1.1  # between two looks there may be more
    assert 0 < found["train_seconds"] + found["evaluation_seconds"] < watched.result["seconds"]
    assert watched.result["seconds"] < watched.result["ended"] - watched.result["begun"]
    assert found["gpu_percent"] is None
    assert watched.result["other_cores"] >= 0


def test_a_run_has_the_threads_and_the_environment_of_its_setting(watched: Watched) -> None:
    assert watched.threads == 2
    assert "AVX2" in watched.kernels
    assert len(watched.result["evaluations"]) >= 1


@pytest.mark.long
@pytest.mark.usefixtures("ends")
def test_a_study_that_is_killed_leaves_no_process_and_goes_on_to_the_same_end(
    tmp_path: Path,
) -> None:
    """With a setting whose runs diverge, and one of two workers."""
    wild = {"optimizer": {"kind": "sgd", "momentum": 0.9, "weight_decay": 0.0, "nesterov": False}}
    settings = {
        "own": {},
        "two": {"workers": 2, "threads": 1},
        "wild": {"set": {**wild, "schedule.peak_lr": 1e30}},
    }
    path = write_settings(tmp_path, settings=settings, seeds=1)
    paths = {"PYTHONPATH": str(Path(largebatch.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    words = [
        sys.executable,
        "-m",
        "largebatch",
        "lab",
        "study",
        "settings",
        str(path),
        "--out",
        str(tmp_path / "out"),
    ]
    environment = os.environ | paths | {"CUDA_VISIBLE_DEVICES": ""}
    for number in (signal.SIGKILL, signal.SIGTERM, None):
        with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
            if number is not None:
                while not (children := psutil.Process(process.pid).children(recursive=True)):
                    time.sleep(0.1)
                process.send_signal(number)
            printed, _ = process.communicate()
        if number is not None:
            assert process.returncode != DONE
            gone, alive = psutil.wait_procs(children, timeout=300)
            assert (len(gone), alive) == (len(children), [])
    assert process.returncode == DONE
    assert "wild" in printed
    (wild_row,) = (line.split() for line in printed.splitlines() if line.startswith("wild "))
    assert wild_row[-1] == "1"  # the column Diverged
    cells = {one.setting: one for one in read(f"sqlite:///{tmp_path}/out/study.db")}
    (own,), (two,), (diverged,) = (cells[name].seeds for name in ("own", "two", "wild"))
    assert (diverged.top1, diverged.diverged is not None) == (0.1, True)
    assert (own.workers, two.workers) == (1, 2)
    assert own.usage is not None
    assert two.usage is not None
    assert two.usage.peak_memory_bytes > 1.5 * own.usage.peak_memory_bytes
    assert json.loads(json.dumps(own.top1)) == pytest.approx(two.top1, abs=0.02)

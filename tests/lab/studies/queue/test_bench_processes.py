"""`largebatch lr bench` as a user runs it: killed, terminated, and gone on with."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from policy_databases import Policy, fill
from short_studies import write_study

import largebatch
from largebatch.cli.main import DONE, USER, main
from largebatch.lab.studies.queue.bench import JOB, work_together
from largebatch.lab.studies.queue.cells import cells_of
from largebatch.lab.studies.queue.database import open_storage
from largebatch.lab.studies.queue.phases import Bench, Progress
from largebatch.lab.studies.queue.study import load_study
from largebatch.lab.studies.queue.trial import Machine
from largebatch.recipe.loading import load_recipe
from largebatch.runs.run import run


@contextmanager
def benching(folder: Path, *words: str) -> Iterator["subprocess.Popen[str]"]:
    command = ["-m", "largebatch", "lab", "study", "bench", str(folder / "study.yaml")]
    paths = {"PYTHONPATH": str(Path(largebatch.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, *command, "--out", str(folder / "out"), *words],
        env=os.environ | paths | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def read_runs(process: "subprocess.Popen[str]", number: int) -> None:
    """Wait until `number` runs have been printed."""
    assert process.stdout is not None
    for _ in range(number):
        assert "top-1" in process.stdout.readline()


def test_processes_get_a_study_that_is_too_long_for_an_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_study(tmp_path)
    study = load_study(tmp_path / "study.yaml")
    cells = (*cells_of(study, tmp_path),) * 100
    bench = Bench(study=study, cells=cells, out=tmp_path / "out", machine=Machine())
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\ncp "$3" "$0.$$"\n', encoding="utf-8")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    assert work_together(bench, "sqlite://", processes=2) == [0, 0]
    got = [path.read_bytes() for path in tmp_path.glob("program.*")]
    assert [len(one) > 2**17 for one in got] == [True, True]  # the most that Linux takes
    assert all(JOB.validate_json(one) == (bench, "sqlite://") for one in got)


@pytest.mark.long
@pytest.mark.usefixtures("ends")
def test_a_study_whose_processes_are_killed_resumes_to_the_same_end(
    tmp_path: Path,
) -> None:
    write_study(tmp_path)
    with benching(tmp_path, "--processes", "2") as process:
        read_runs(process, 1)
        psutil.Process(process.pid).children()[0].kill()  # the other one takes over
        read_runs(process, 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == os.EX_TEMPFAIL
    with benching(tmp_path) as process:
        read_runs(process, 1)
        process.kill()
    with benching(tmp_path, "--processes", "2") as process:
        printed, _ = process.communicate()
        assert process.returncode == DONE
    assert "top-1 (2 seeds)" in printed

    study = load_study(tmp_path / "study.yaml")
    cells = tuple(cells_of(study, tmp_path))
    bench = Bench(study=study, cells=cells, out=tmp_path / "out", machine=Machine())
    with open_storage(f"sqlite:///{tmp_path}/out/study.db") as storage:
        for phase in Progress(bench, storage).phases():
            trials = phase.queue.study.get_trials()
            states = Counter(trial.state.name for trial in trials)
            assert states["COMPLETE"] + states["PRUNED"] == len(phase.queue.slots)
            assert not states["RUNNING"]
            if not phase.is_search:
                seed = phase.results()["seed-2"]
    recipe = load_recipe(Path(seed.folder, "recipe.yaml"))
    alone = run(recipe, out=tmp_path / "alone", report=False)
    assert alone.weights_sha256 == seed.weights_sha256


def test_a_study_that_is_done_is_shown_without_its_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"duration": {"steps": 12}, "schedule.peak_lr": 0.5, "polish": None}
    images = {"recipe": "cifar10_resnet8_128", "set": changes}
    measured = Policy(reached=[4, 5], top1=[0.9, 0.92])
    fill(tmp_path, {"one": measured}, recipes={"images": images})
    words = ["lab", "study", "bench", str(tmp_path / "study.yaml"), "--out", str(tmp_path)]
    assert main(words) == DONE
    assert "\none  " in capsys.readouterr().out


def test_a_dry_run_prints_the_runs_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_study(tmp_path, robustness_seeds=1)
    assert (
        main(["lab", "study", "bench", str(path), "--dry-run", "--out", str(tmp_path / "out")])
        == DONE
    )
    first, second, total = capsys.readouterr().out.splitlines()
    assert first == (
        "digits/fall: 3 trials of 12 updates around peak_lr 0.5, then 6 runs of 12 updates"
    )
    assert second.startswith("digits/flat: ")
    assert total.startswith("18 runs; about ")
    assert [each.name for each in tmp_path.iterdir()] == ["study.yaml"]


IMAGES = {"recipes": {"images": {"recipe": "cifar10_resnet8_128"}}}


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({}, ("--storage", "nonsense"), "nonsense: cannot be used"),
        ({"policies": {"a": {"dekay": 1}}}, (), "schedule.dekay: unknown key"),
        ({"name": "a b"}, (), "study.yaml: 1 problem"),
        ({}, ("--out", "/proc/no"), "--out /proc/no: cannot be made"),
        ({}, ("--data", "/images"), "/images would not be read: no recipe of the study"),
        (IMAGES, ("--processes", "2"), "this recipe reads images from a folder; pass --data DIR"),
        (IMAGES, ("--dry-run", "--data", "/no"), "/no: there is no such folder; expected /no/tr"),
    ],
)
def test_what_a_user_can_mend_is_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # whose runs/ a study takes
    path = write_study(tmp_path, **changes)
    assert main(["lab", "study", "bench", str(path), *words]) == USER
    assert capsys.readouterr().err.count(message) == 1

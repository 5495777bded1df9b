"""Real data through the whole path: recipe, workers, training, polishing, evaluation, report."""

import contextlib
import importlib.metadata
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from on_forked_workers import on_forked_workers
from PIL import Image
from programs import with_default_signals
from short_runs import SHALLOW, SMALL, STATISTICS, a_recipe, content, log, summary, weights

from largebatch import load_recipe, run
from largebatch.cli.main import main
from largebatch.cli.printing import INTERRUPTED
from largebatch.errors import BackendError, DivergedError, RecipeError
from largebatch.recipe.recipe import Recipe
from largebatch.report import write_report
from largebatch.tracking.events import Summary
from largebatch.training.checkpoint import load_checkpoint, newest_checkpoint

FOLDER = Path(__file__).parents[2] / "recipes"
DIGITS = str(FOLDER / "quickstart" / "digits_96.yaml")
COMMAND = [sys.executable, "-m", "largebatch", "train"]
CHANGES = [
    *("duration.epochs=4", "polish.clean.epochs=1"),
    *("schedule.warmup.epochs=1", "evaluation.every_epochs=2", *SMALL, SHALLOW),
]
SHORT = [word for change in CHANGES for word in ("--set", change)]


def assert_identical(ours: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare weights, statistics and momentum bit by bit, and the step."""
    torch.testing.assert_close(ours["model"], other["model"], rtol=0, atol=0)
    momentum, expected = ours["optimizer"]["state"], other["optimizer"]["state"]
    torch.testing.assert_close(momentum, expected, rtol=0, atol=0)
    assert ours["progress"]["step"] == other["progress"]["step"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same short recipe on one worker and on two torch workers."""
    root = tmp_path_factory.mktemp("runs")
    with (
        mock.patch("largebatch.runs.folder.write_report", write_report),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        assert main(["train", DIGITS, *SHORT, "--out", str(root / "one")]) == 0
    (root / "one.txt").write_text(printed.getvalue())
    run_on(2, load_recipe(DIGITS, CHANGES), root / "torch")
    return {name: root / name for name in ("one", "torch")}


def assert_as_alone(two: Path, one: Path) -> None:
    """Compare ten updates: rounding differences grow to 0.01 of the loss by step 20."""
    ours, alone = log(two, "step"), log(one, "step")
    assert [step["step"] for step in ours] == list(range(summary(two)["steps"]))
    for here, there in zip(ours[:10], alone[:10], strict=True):
        assert here["loss"] == pytest.approx(there["loss"], abs=1e-5)
        assert here["lr"] == there["lr"]


def test_two_workers_train_as_one_does(finished: dict[str, Path]) -> None:
    """The ends are two draws."""
    assert_as_alone(finished["torch"], finished["one"])
    found = summary(finished["torch"])
    assert (found["steps"], found["workers"], found["backend"]) == (60, 2, "torch")
    assert found["top1"] > 0.85


@pytest.mark.long
def test_two_horovod_workers_train_as_one_does(finished: dict[str, Path], tmp_path: Path) -> None:
    if not shutil.which("horovodrun", path=str(Path(sys.executable).parent)):
        pytest.skip("horovod is not installed; launch/install_horovod.sh builds it")
    words = ("--backend", "horovod", "--workers", "2", "--max-steps", "10")
    command = [*COMMAND, DIGITS, *SHORT, "--out", str(tmp_path / "run"), *words]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    assert_as_alone(tmp_path / "run", finished["one"])
    found = summary(tmp_path / "run")
    assert (found["steps"], found["workers"], found["backend"]) == (10, 2, "horovod")


def test_dali_trains_as_torchvision_does(finished: dict[str, Path], tmp_path: Path) -> None:
    """Pixels of enlarged digits differ by 1/255 at most; training makes more of it every step."""
    pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")
    recipe = load_recipe(DIGITS, [*CHANGES, "execution.cache=none", "execution.decoder=dali"])
    run(recipe, out=tmp_path / "run", max_steps=2)
    ours, theirs = (log(folder, "step") for folder in (tmp_path / "run", finished["one"]))
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], abs=5e-4)
    assert ours[0]["loss"] != theirs[0]["loss"]


def test_the_run_folder_is_the_record(finished: dict[str, Path]) -> None:
    folder = finished["one"]
    assert {path.name for path in folder.iterdir()} >= {
        *("recipe.yaml", "log.jsonl", "summary.json", "report.html", "report.png", "checkpoints"),
    }
    found = summary(folder)
    assert found["status"] == "finished"
    sizes = [found[name] for name in ("global_batch", "device_batch", "accumulation")]
    assert sizes == [96, 96, 1]
    assert (found["steps"], found["samples"]) == (60, 60 * 96)
    assert found["top1"] > 0.85
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert 0 < found["images_per_second"] < 1e6
    assert load_recipe(folder / "recipe.yaml").duration.epochs == 4
    with Image.open(folder / "report.png") as image:
        assert image.width >= 400


def test_every_stage_reports_what_it_changed(finished: dict[str, Path]) -> None:
    train, clean, statistics = summary(finished["torch"])["stages"]
    assert [stage["name"] for stage in (train, clean, statistics)] == [
        "train",
        "clean",
        "statistics",
    ]
    assert (train["steps"], clean["steps"], statistics["steps"]) == (45, 15, 0)
    assert train["before"] is None
    for earlier, later in ((train, clean), (clean, statistics)):
        assert later["before"] == {
            key: earlier[key] for key in ("top1", "top5", "loss", "balanced_top1")
        }
    evaluations = log(finished["torch"], "evaluation")
    assert [record["step"] for record in evaluations] == [30, 45, 60, 60]
    assert all(record["samples"] == 360 for record in evaluations)
    (drift,) = log(finished["torch"], "drift")
    assert len(drift["layers"]) == 13
    assert all(layer["mean_shift"] > 0 for layer in drift["layers"])


def run_on(
    workers: int,
    recipe: Recipe,
    folder: Path,
    *,
    max_steps: int | None = None,
    resume: bool = False,
) -> Summary:
    """Train as `run` does, on forked workers."""
    return on_forked_workers(be_worker, recipe, folder, max_steps, resume, workers=workers)


def be_worker(recipe: Recipe, folder: Path, max_steps: int | None, resume: bool) -> Summary:
    return run(recipe, out=folder, max_steps=max_steps, resume=resume)


def test_a_resumed_run_ends_with_identical_weights(tmp_path: Path) -> None:
    """Bit by bit, with dropout, and whatever step it was stopped at: here 7 and 16 of 20."""
    recipe = load_recipe(
        DIGITS,
        [
            *("duration={steps: 20}", "schedule.warmup={steps: 3}", "polish.clean={steps: 4}"),
            *("model.arguments.drop_rate=0.3", "evaluation={}", *SMALL),
        ],
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_on(2, recipe, whole).status == "finished"
    assert run_on(2, recipe, parts, max_steps=7).status == "paused"
    assert run_on(2, recipe, parts, max_steps=16, resume=True).steps == 16
    resumed = run_on(2, recipe, parts, resume=True)
    assert (resumed.status, resumed.steps, resumed.samples) == ("finished", 20, 20 * 96)
    assert [stage.name for stage in resumed.stages] == ["train", "clean", "statistics"]
    ours, other = content(parts), content(whole)
    assert_identical(ours, other)
    assert ours["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]
    assert [record["resume_step"] for record in log(parts, "start")] == [0, 7, 16]
    assert [record["step"] for record in log(parts, "step")] == list(range(20))
    again = run(recipe, workers=1, out=parts, resume=True)
    assert (again.status, again.steps, again.top1) == ("finished", 20, resumed.top1)


@pytest.mark.long
def test_two_workers_start_from_a_notebook(tmp_path: Path) -> None:
    """From a program, that is, which has no file that a worker could import."""
    program = (
        "from largebatch import load_recipe, run\n"
        f"summary = run(load_recipe({DIGITS!r}), workers=2, out={str(tmp_path / 'run')!r}, "
        "max_steps=1)\n"
        "print(summary.status, summary.workers, summary.steps)\n"
    )
    command = [sys.executable, "-"]
    done = subprocess.run(
        command, input=program, check=True, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines()[-1] == "paused 2 1"
    assert done.stderr == ""


def test_another_number_of_workers_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    recipe = load_recipe(
        DIGITS, ["duration={steps: 8}", "schedule.warmup={steps: 3}", "polish=null", *SMALL]
    )
    run(recipe, workers=1, out=tmp_path / "whole")
    run_on(2, recipe, tmp_path / "parts", max_steps=4)
    run(recipe, workers=1, out=tmp_path / "parts", resume=True)
    ours, alone = ([s["loss"] for s in log(tmp_path / name, "step")] for name in ("parts", "whole"))
    assert ours == pytest.approx(alone, abs=1e-5)


@pytest.mark.long
def test_a_run_asked_to_stop_saves_and_can_go_on(tmp_path: Path) -> None:
    words = [DIGITS, "--workers", "2", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        with_default_signals(*COMMAND, *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not (
        (tmp_path / "run/log.jsonl").exists() and len(log(tmp_path / "run", "step")) > 5
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=600)
    assert process.returncode == INTERRUPTED
    assert said.count("stopping") == 1
    found = summary(tmp_path / "run")
    assert found["status"] == "interrupted"
    assert 5 < found["steps"] < 599
    state = newest_checkpoint(tmp_path / "run/checkpoints")
    assert state is not None
    assert not (tmp_path / "run/report.html").exists()  # whoever stops a run has little time
    assert main(["report", str(tmp_path / "run")]) == 0


@pytest.mark.long
def test_a_saved_run_can_be_evaluated_and_polished(
    finished: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished["one"]
    assert main(["evaluate", str(folder)]) == 0
    assert f"top-1 {summary(folder)['top1']:.2%}" in capsys.readouterr().out

    unpolished = tmp_path / "unpolished"
    recipe = load_recipe(
        DIGITS, ["duration={epochs: 1}", "polish=null", "schedule.warmup={steps: 3}"]
    )
    run(recipe, out=unpolished)
    (checkpoint,) = (unpolished / "checkpoints").glob("step-00000015.safetensors")
    assert main(["polish", str(checkpoint), "--out", str(tmp_path / "polished")]) == 0
    shown = capsys.readouterr().out
    before, after = summary(tmp_path / "polished")["stages"]
    assert f"top-1 {before['top1']:.2%} -> {after['top1']:.2%} on 360" in shown
    assert before["top1"] == summary(unpolished)["top1"]
    assert after["before"]["top1"] == before["top1"]
    (drift,) = log(tmp_path / "polished", "drift")
    assert drift["samples"] == 1437
    state = weights(tmp_path / "polished")
    same = load_checkpoint(checkpoint).state["model"]
    assert state["conv1.weight"].equal(same["conv1.weight"])
    assert not state["bn1.running_mean"].equal(same["bn1.running_mean"])


def evaluate_on_worker(folder: Path, results: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["evaluate", str(folder)]) == 0
    (results / os.environ["RANK"]).write_text(printed.getvalue())


def test_evaluate_measures_on_two_workers_what_one_measures(
    finished: dict[str, Path], tmp_path: Path
) -> None:
    """Worker 0 prints; test_launch.py starts the workers of a command."""
    found = []
    for workers in (1, 2):
        results = tmp_path / str(workers)
        results.mkdir()
        on_forked_workers(evaluate_on_worker, finished["one"], results, workers=workers)
        printed = "".join(path.read_text() for path in results.iterdir())
        assert printed.count("top-1") == 1
        assert "(360 images)" in printed
        found.append(list(map(float, re.findall(r"\d+\.\d+", printed.partition("(")[0]))))
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_polishing_takes_any_batch(finished: dict[str, Path], tmp_path: Path) -> None:
    states = []
    for size in ("7", "96"):  # 7 are no whole spans of 48; the pass takes whole ones all the same
        out = tmp_path / size
        words = ["polish", str(finished["one"]), "--out", str(out), "--device-batch", size]
        assert main(words) == 0
        states.append(weights(out))
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-6)


def test_a_recipe_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Recipe] = []

    @dataclass
    class End:
        folder: Path | None = None

    def train(recipe: Recipe, _: object) -> End:
        trained.append(recipe)
        return End()

    monkeypatch.setattr("largebatch.runs.run.run_worker", train)
    for named in ("digits_96", DIGITS, Path(DIGITS), load_recipe(DIGITS)):
        run(named, out=tmp_path)
    assert trained == 4 * [load_recipe(DIGITS)]


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [
        ("digits_69", RecipeError, "digits_69"),
        ("no.yaml", RecipeError, "no.yaml"),
        ({"name": "a"}, TypeError, "recipe"),
    ],
)
def test_what_is_no_recipe_is_refused_by_what_it_is(
    recipe: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        run(recipe, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_worker_does_not_start_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(BackendError, match="RANK=1.*--workers 2"):
        run(load_recipe(DIGITS), workers=2)


@pytest.mark.parametrize("fails", [False, True])
def test_a_report_that_cannot_be_drawn_hides_no_end_of_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, fails: bool
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("drawing failed")

    def end(*_: object, **__: object) -> bool:
        raise DivergedError("planted")

    monkeypatch.setattr("largebatch.runs.folder.write_report", broken)
    if fails:
        monkeypatch.setattr("largebatch.runs.run.run_stages", end)
    expected = pytest.raises(DivergedError, match="planted") if fails else contextlib.nullcontext()
    with expected:
        run(a_recipe(STATISTICS), out=tmp_path / "run", max_steps=1)
    assert "drawing failed" in caplog.text
    assert log(tmp_path / "run", "finish")[0]["summary"]["status"] == (
        "failed" if fails else "paused"
    )

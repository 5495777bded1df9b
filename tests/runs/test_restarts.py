"""One command for the first start and every restart, and workers that are started again."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mlperf_logs import finish
from short_runs import CLEAN, DIGITS, SMALL, a_recipe, content, log, weights

from largebatch import accelerator, run
from largebatch.errors import (
    BackendError,
    DataError,
    LargebatchError,
    SmallerBatchError,
    WorkerFailedError,
    WrongCardError,
)
from largebatch.runs import launch
from largebatch.runs import run as runs
from largebatch.runs.interrupts import StopRequests
from largebatch.runs.options import Options
from largebatch.runs.run import JOB, run_workers, start
from largebatch.tracking.events import EVENTS, LOG, SUMMARY, Suspect, WrongCard, write_json


def test_resume_auto_begins_where_there_is_nothing_and_goes_on_where_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (2, 4):
        run(a_recipe(CLEAN), out=tmp_path / "run", resume="auto", max_steps=steps)
        assert content(tmp_path / "run")["progress"]["step"] == steps
    printed = capsys.readouterr().out
    assert printed.count("starting a new run") == 1
    assert printed.count("resumed at step 2") == 1


def test_resume_auto_does_not_begin_among_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(LargebatchError, match="already holds files"):
        run(a_recipe(CLEAN), out=tmp_path, resume="auto")


class Machine:
    """Starts that end as listed: by a worker that dies, after a checkpoint or before, or well."""

    def __init__(self, folder: Path, ends: list[str]) -> None:
        self.folder, self.ends = folder / "checkpoints", ends
        self.folder.mkdir()
        self.started: list[tuple[int, object]] = []
        self.limits: list[float | None] = []

    def start(self, command: list[str], *, workers: int, **others: object) -> None:
        _, options = JOB.validate_json(command[-1])
        self.started.append((workers, options.resume))
        self.limits.append(options.time_limit)
        end = self.ends[len(self.started) - 1]
        if end == "saved":
            (self.folder / f"step-{len(self.started):08d}.safetensors").touch()
        if end == "well":
            write_json(self.folder.parent / SUMMARY, finish().summary)
        if end == "wrong card":
            suspect = Suspect(worker=1, host="node17", device="NVIDIA H200")
            event = WrongCard(
                stage="train",
                step=9,
                suspects=(suspect,),
                is_certain=True,
                place="convolution of conv1 (forward)",
                last_equal=4,
                text="worker 1 computes wrong numbers",
            )
            (self.folder.parent / LOG).write_bytes(EVENTS.dump_json(event) + b"\n")
            raise WrongCardError(event.text)
        if end == "user":
            raise DataError("image.png: not an image")
        if end.startswith("stopped"):
            StopRequests().add()
        if end.endswith("memory"):
            raise SmallerBatchError("device batch 48 does not fit")
        if end != "well":
            raise WorkerFailedError("worker 1 exited")


@pytest.mark.parametrize(
    ("ends", "least", "started"),
    [
        pytest.param(["saved", "well"], 4, [(4, False), (4, "auto")], id="from the checkpoint"),
        pytest.param(["died", "died", "well"], 2, [(4, False), (3, "auto"), (2, "auto")], id="few"),
        pytest.param(["died", "well"], 4, [(4, False), (4, "auto")], id="no fewer"),
        pytest.param(
            ["died"] * 3 + ["well"], 1, [(4, False), *((n, "auto") for n in (3, 2, 1))], id="one"
        ),
    ],
)
def test_workers_that_died_are_started_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ends: list[str],
    least: int,
    started: list[tuple[int, object]],
) -> None:
    machine = Machine(tmp_path, ends)
    monkeypatch.setattr(launch, "start_workers", machine.start)
    options = Options(out=tmp_path, workers=4, restarts=3, min_workers=least)
    run_workers(a_recipe(CLEAN), options)
    assert machine.started == started
    assert "worker 1 exited" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        pytest.param(["died", "died", "died"], WorkerFailedError, id="too often"),
        pytest.param(["user"], DataError, id="a mistake of the user"),
        pytest.param(["stopped"], WorkerFailedError, id="Ctrl-C"),
        pytest.param(["stopped, no memory"], SmallerBatchError, id="Ctrl-C and no memory"),
    ],
)
def test_workers_are_not_restarted_indefinitely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[str], error: type[Exception]
) -> None:
    machine = Machine(tmp_path, ends)
    monkeypatch.setattr(launch, "start_workers", machine.start)
    with pytest.raises(error):
        run_workers(a_recipe(CLEAN), Options(out=tmp_path, workers=2, restarts=2))
    assert len(machine.started) == len(ends)


def test_after_want_of_memory_workers_are_started_again_uncounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, ["no memory", "no memory", "well"])
    monkeypatch.setattr(launch, "start_workers", machine.start)
    run_workers(a_recipe(CLEAN), Options(out=tmp_path, workers=2))
    assert machine.started == [(2, False), (2, "auto"), (2, "auto")]


def test_a_device_that_computes_wrong_numbers_is_left_out_as_the_recipe_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, ["wrong card", "well"])
    monkeypatch.setattr(launch, "start_workers", machine.start)
    monkeypatch.setattr(accelerator, "count", lambda: 4)
    monkeypatch.setenv(accelerator.visible_devices_variable(), "4,5,6,7")
    options = Options(out=tmp_path, workers=4, restarts=1, min_workers=3)
    recipe = a_recipe(CLEAN, changes=("execution.on_wrong_card=leave_out",))
    run_workers(recipe, options)
    assert machine.started == [(4, False), (3, "auto")]
    assert os.environ[accelerator.visible_devices_variable()] == "4,6,7"


@pytest.mark.parametrize(
    ("action", "least"),
    [pytest.param("stop", 3, id="stop"), pytest.param("leave_out", 4, id="no worker less")],
)
def test_a_wrong_device_ends_a_run_that_may_not_leave_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, least: int
) -> None:
    machine = Machine(tmp_path, ["wrong card"])
    monkeypatch.setattr(launch, "start_workers", machine.start)
    options = Options(out=tmp_path, workers=4, restarts=1, min_workers=least)
    recipe = a_recipe(CLEAN, changes=(f"execution.on_wrong_card={action}",))
    with pytest.raises(WrongCardError, match="worker 1"):
        run_workers(recipe, options)


def test_the_time_limit_is_that_of_all_starts_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, ["saved", "saved", "well"])
    times = iter([0.0, 100.0, 260.0])
    monkeypatch.setattr(launch, "start_workers", machine.start)
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: next(times)))
    options = Options(out=tmp_path, time_limit=250.0, workers=2, restarts=2)
    run_workers(a_recipe(CLEAN), options)
    assert machine.limits == [250.0, 150.0, 0.0]


@pytest.mark.long
@pytest.mark.usefixtures("ends")
def test_after_one_worker_ran_out_of_memory_all_continue_with_half_of_the_device_batch(
    tmp_path: Path,
) -> None:
    changes = ("execution.checkpoints.every_steps=2", "model.arguments.drop_rate=0")
    recipe = a_recipe(CLEAN, changes=changes)
    run(recipe, out=tmp_path / "whole")
    options = Options(out=tmp_path / "run", workers=2, imports=("short_of_memory",), report=False)
    assert start(recipe, options).status == "finished"
    starts = log(tmp_path / "run", "start")
    assert [it["resume_step"] for it in starts] == [0, 2]
    assert [it["plan"]["device_batch"] for it in starts] == [48, 24]
    found, whole = (weights(tmp_path / name) for name in ("run", "whole"))
    torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.usefixtures("ends")
def test_a_run_with_a_wrong_worker_continues_without_it(tmp_path: Path) -> None:
    changes = (
        *("execution.replay_every=4", "execution.on_wrong_card=leave_out"),
        *("execution.checkpoints.every_steps=2", "batch.bn_span=16"),
    )
    options = Options(
        out=tmp_path / "run",
        workers=3,
        restarts=1,
        min_workers=2,
        imports=("faulty_worker",),
        report=False,
    )
    assert start(a_recipe(CLEAN, changes=changes), options).status == "finished"
    starts = log(tmp_path / "run", "start")
    assert [it["plan"]["workers"] for it in starts] == [3, 2]
    assert [it["resume_step"] for it in starts] == [0, 2]
    (found,) = log(tmp_path / "run", "wrong_card")
    assert [it["worker"] for it in found["suspects"]] == [1]
    assert found["is_certain"]
    assert found["step"] == 3
    assert found["place"].startswith("gradient of")


@pytest.mark.parametrize(("workers", "restarts"), [(2, 0), (2, 1), (1, 0)])
def test_a_least_number_of_workers_that_cannot_apply_is_refused(
    tmp_path: Path, workers: int, restarts: int
) -> None:
    with pytest.raises(BackendError, match="--min-workers 5.*--restarts"):
        run(
            a_recipe(CLEAN),
            out=tmp_path / "run",
            workers=workers,
            restarts=restarts,
            min_workers=5,
        )


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2, "restarts": -1}])
def test_numbers_of_workers_and_restarts_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, int]
) -> None:
    with pytest.raises(BackendError, match="expected"):
        run(a_recipe(CLEAN), out=tmp_path / "run", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_a_single_process_cannot_restart_itself(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="--resume auto"):
        run(a_recipe(CLEAN), out=tmp_path / "run", restarts=1)


TORCHRUN = [*(sys.executable, "-m", "torch.distributed.run"), "--standalone", "--nproc-per-node=2"]
STARTS = {
    "torchrun": ([*TORCHRUN, "--max-restarts=1", "-m", "largebatch"], ["--resume", "auto"]),
    "--restarts": ([sys.executable, "-m", "largebatch"], ["--workers", "2", "--restarts", "1"]),
}


def kill_worker(rank: int, out: Path, *, at_step: int) -> None:
    """Wait for a step of a run, then SIGKILL one of its workers, which start in order."""
    path = out / "log.jsonl"
    while not path.exists() or path.read_text().count('"event":"step"') < at_step:
        time.sleep(0.05)
    of_run = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(out).encode() in (folder / "cmdline").read_bytes():
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                of_run[int(folder.name)] = int(parent)
    workers = sorted(process for process, parent in of_run.items() if parent in of_run)
    os.kill(workers[rank], signal.SIGKILL)


@pytest.mark.long
@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("start", STARTS)
def test_a_worker_that_is_killed_is_started_again_and_the_run_ends(
    start: str, tmp_path: Path
) -> None:
    """torchrun keeps its store from one start to the next, with the addresses of dead workers."""
    out = tmp_path / "run"
    changes = [*SMALL, "model={name: cifar_resnet8}", "execution.checkpoints.every_steps=5"]
    changes += ["duration={steps: 60}", "schedule.warmup={steps: 5}", "polish=null"]
    sets = [word for change in changes for word in ("--set", change)]
    before, after = STARTS[start]
    command = [*before, "train", str(DIGITS), *sets, "--out", str(out), *after]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        kill_worker(1, out, at_step=10)
        assert process.wait(timeout=600) == 0
    finally:
        process.kill()
    first, second = log(out, "start")
    assert first["resume_step"] == 0
    assert second["resume_step"] >= 5
    assert content(out)["progress"]["step"] == 60

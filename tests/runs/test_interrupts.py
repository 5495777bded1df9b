"""Requests to stop: which signals are one, which are two, and what the second one prints."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import with_default_signals
from short_runs import DIGITS

from largebatch.cli.main import STOPPED, main
from largebatch.distributed.environment import LAUNCHER
from largebatch.distributed.serial import Serial
from largebatch.runs.folder import end_of
from largebatch.runs.interrupts import SCHEDULERS, StopRequests, describe_saved, stop_requests
from largebatch.runs.launch import Processes
from largebatch.runs.options import Options, Resume
from largebatch.tracking.events import StopCause
from largebatch.training.step_log import Requests

pytestmark = pytest.mark.usefixtures("ends")

PROGRAM = """
import os, signal, sys, time
from largebatch.runs.interrupts import stop_requests
if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
with stop_requests(handles_signals=True) as wants_stop:
    print("ready", flush=True)
    try:
        for number in map(int, sys.stdin):
            os.kill(os.getpid(), number)
            print(wants_stop(), flush=True)
    except KeyboardInterrupt:
        print("at once", flush=True)
"""


def answers(
    *signals: tuple[signal.Signals, float],
    words: tuple[str, ...] = (),
    stderr: int = subprocess.PIPE,
) -> list[str]:
    """Return the output of a program that gets these signals, each after its seconds."""
    with subprocess.Popen(
        with_default_signals(sys.executable, "-c", PROGRAM, *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        stderr=stderr,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        found = [process.stdout.readline().strip()]
        for number, seconds in signals:
            time.sleep(seconds)
            process.stdin.write(f"{number:d}\n")
            process.stdin.flush()
            found.append(process.stdout.readline().strip())
        process.stdin.close()
    return found[1:]


@pytest.mark.parametrize("number", ["SIGINT", "SIGUSR1"])
def test_every_signal_that_schedulers_send_is_a_request_to_stop(number: str) -> None:
    assert answers((signal.Signals[number], 0)) == [number]


def test_a_run_under_nohup_goes_on_when_its_terminal_is_closed() -> None:
    assert answers((signal.SIGHUP, 0), words=("nohup",)) == ["None"]


def test_signals_that_come_together_are_one_request_and_a_later_one_is_the_second() -> None:
    several = [(signal.SIGUSR1, 0), (signal.SIGTERM, 0), (signal.SIGTERM, 0.1)]
    assert answers(*several, (signal.SIGTERM, 1.2)) == [*["SIGUSR1"] * 3, "at once"]


def test_a_run_that_is_stopped_at_once_names_what_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("largebatch.runs.run.start", stop)
    folder = tmp_path / "run"
    assert main(["train", str(DIGITS), "--out", str(folder)]) == STOPPED
    printed = capsys.readouterr().err
    assert "nothing is saved" in printed
    assert printed.count("\n") == 1
    (folder / "checkpoints").mkdir(parents=True)
    for step in (7, 1200):
        (folder / "checkpoints" / f"step-{step:08d}.safetensors").touch()
    newest = folder / "checkpoints" / "step-00001200.safetensors"
    text = describe_saved(folder)
    assert str(newest) in text
    assert "1,200" in text


@pytest.mark.parametrize(
    ("cause", "job", "resume", "named", "requeued"),
    [
        ("time limit", None, "auto", "--time-limit 90.0 min, of which 8", False),
        ("time limit", "PBS_JOBID", "auto", "--time-limit 90.0 min", True),
        ("SIGINT", "SLURM_JOB_ID", "auto", "Ctrl-C", False),
        ("SIGTERM", "SLURM_JOB_ID", "auto", "SIGTERM under SLURM", True),
        ("SIGUSR1", "SLURM_JOB_ID", "auto", "SIGUSR1 under SLURM", True),
        ("SIGTERM", "SLURM_JOB_ID", False, "SIGTERM under SLURM", False),
        ("SIGTERM", "KUBERNETES_SERVICE_HOST", "auto", "SIGTERM under Kubernetes", True),
        ("SIGTERM", None, "auto", "SIGTERM", False),
        ("SIGHUP", None, False, "SIGHUP", False),
        (None, None, False, "--max-steps 7", False),
    ],
)
def test_the_end_of_a_run_has_its_cause_and_whether_a_scheduler_starts_it_again(
    cause: StopCause | None,
    job: str | None,
    resume: Resume,
    named: str,
    requeued: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten of 90 minutes are left after a restart, 300 s of which are over: 85 minutes in all."""
    for variable in SCHEDULERS:
        monkeypatch.delenv(variable, raising=False)
    if job is not None:
        monkeypatch.setenv(job, "1")
    requests = Requests(Serial(torch.device("cpu")), wants_stop=lambda: cause)
    requests.take(*requests.own())
    session: Any = SimpleNamespace(requests=requests, began=time.time() - 300)
    options = Options(resume=resume, max_steps=7, time_limit=600.0, whole_limit=5400.0)
    end = end_of(session, options, complete=False)
    assert end.reason is not None
    assert named in end.reason
    assert end.is_requeued == requeued
    assert end_of(session, options, complete=True).reason is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_workers_get_the_signal_that_their_launcher_got_and_ctrl_c_by_another(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[signal.Signals] = []
    workers: Any = SimpleNamespace(send=passed.append, requests=StopRequests())
    Processes.pass_on(workers, number)
    monkeypatch.setenv(LAUNCHER, "1")
    with stop_requests(handles_signals=False) as wants_stop:
        signal.raise_signal(passed[-1])
        assert wants_stop() == number.name
    assert passed[-1] != signal.SIGINT


def test_a_time_limit_counts_from_when_it_is_said_to_begin() -> None:
    begun = time.monotonic() - 100
    for limit, is_over in ((90.0, True), (3600.0, False)):
        with stop_requests(handles_signals=False, limit=limit, begun=begun) as wants_stop:
            assert wants_stop() == ("time limit" if is_over else None)
